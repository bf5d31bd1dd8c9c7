"""Evictions in a follower's copy under kills: ``python -m benchmarks.followed_evictions [STEPS]``.

Rows of three tables are evicted by age, by number and by norm. Every few steps, a pserver, the master or the follower
is killed. A pserver's successor restores an older checkpoint. After each kill, and at the end, all ids that were ever
pushed are looked up in the copy and on the pservers. Prints the number of rows that were evicted, or lost with a
pserver, and of values that differ: stale or missing rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe

_PUSHED, _SHIFT = 6_000, 4_000
#: Steps between two kills, and the processes that are killed in turn.
_EVERY = 10
_VICTIMS = (("pserver", 0), ("follower", 0), ("master", 0), ("pserver", 1))
_DIM = 4
_RULES = {
    "age": fe.Evict(unused_versions=8),
    "number": fe.Evict(max_rows=20_000),
    "norm": fe.Evict(norm_below=0.5),
}
_LIMIT_S = 60.0


class FollowerProcess:
    """A process with a follower, which answers lookups.

    Args:
        etcd: Address of etcd.
        job: Name of the job.
    """

    def __init__(self, etcd: str, job: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_follow, args=(other, etcd, job), daemon=True)
        self._process.start()
        other.close()

    def lookup(self, count: int) -> dict[str, npt.NDArray[np.float32]]:
        """Return the values of the ids up to ``count`` in all tables, after all present changes have been applied."""
        self._pipe.send_bytes(str(count).encode())
        return {name: np.frombuffer(self._pipe.recv_bytes(), np.float32).reshape(count, _DIM) for name in _RULES}

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _follow(pipe: Connection, etcd: str, job: str) -> None:
    with fe.Follower(etcd=etcd, job=job) as follower, contextlib.suppress(EOFError):
        while True:
            count = int(pipe.recv_bytes())
            follower.catch_up(_LIMIT_S)
            for name in _RULES:
                pipe.send_bytes(follower.tables[name].lookup(np.arange(count)).tobytes())


def main(steps: int) -> None:
    """Train, kill, compare, and print the figures."""
    folder = Path(tempfile.mkdtemp())
    pq.write_table(pa.table({"k": np.arange(steps)}), folder / "data.parquet", row_group_size=10)
    differing = compared = 0
    kills: Counter[str] = Counter()
    with (
        fe.local(pservers=2, checkpoint=str(folder / "c"), checkpoint_every_s=1.0, lease_ttl_s=2.0) as cluster,
        cluster.connect() as job,
    ):
        data = job.dataset(str(folder / "data.parquet"), batch_size=1)
        tables = {
            name: job.table(name, _DIM, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
            for name, evict in _RULES.items()
        }
        follower = FollowerProcess(cluster.etcd_address, cluster.job)
        for step, _ in enumerate(data):
            ids = np.arange(step * _SHIFT, step * _SHIFT + _PUSHED)
            values = np.full((_PUSHED, _DIM), -1.0, np.float32)
            values[::2] *= 0.1
            for table in tables.values():
                table.push(ids, values)
            job.step()
            if step % _EVERY == _EVERY - 1:
                role, index = _VICTIMS[kills.total() % len(_VICTIMS)]
                if role == "follower":
                    follower.kill()
                    follower = FollowerProcess(cluster.etcd_address, cluster.job)
                else:
                    cluster.kill(role, index)
                kills[role] += 1
                time.sleep(0.2)
                every = np.arange(step * _SHIFT + _PUSHED)
                # The first lookup waits for the successor, and the copy is compared with what it restored.
                rows = {name: table.pull(every) for name, table in tables.items()}
                found = follower.lookup(every.size)
                if any(not np.array_equal(found[name], rows[name]) for name in tables):
                    # Repeated batches may have been applied in between.
                    rows = {name: table.pull(every) for name, table in tables.items()}
                    found = follower.lookup(every.size)
                differing += sum(int((found[name] != rows[name]).any(axis=1).sum()) for name in tables)
                compared += len(tables) * every.size
        # Batches that are repeated push other ids.
        created = len(tables) * (step * _SHIFT + _PUSHED)
        left = sum(len(table) for table in tables.values())
        follower.kill()
    killed = ", ".join(f"{count} of a {role}" for role, count in sorted(kills.items()))
    print(f"{created:,} rows created, {created - left:,} evicted or lost; kills: {killed}")
    print(f"{compared:,} lookups compared, {differing} stale or missing rows")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
