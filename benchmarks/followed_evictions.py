"""Evictions in a follower's copy under kills: ``python -m benchmarks.followed_evictions [STEPS]``.

Rows of three tables are evicted by age, by number and by norm, while a pserver dies every few seconds and its successor
restores an older checkpoint. After each kill, and at the end, all ids that were ever pushed are looked up in the copy
and on the pservers. Prints the number of evicted rows, and of values that differ: stale or missing rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe

_PUSHED, _SHIFT = 6_000, 4_000
_EVERY = 25


def main(steps: int) -> None:
    """Train, kill, compare, and print the figures."""
    folder = Path(tempfile.mkdtemp())
    pq.write_table(pa.table({"k": np.arange(steps)}), folder / "data.parquet", row_group_size=10)
    rules = {
        "age": fe.Evict(unused_versions=8),
        "number": fe.Evict(max_rows=20_000),
        "norm": fe.Evict(norm_below=0.5),
    }
    differing = compared = kills = 0
    with (
        fe.local(pservers=2, checkpoint=str(folder / "c"), checkpoint_every_s=1.0, lease_ttl_s=2.0) as cluster,
        cluster.connect() as job,
        fe.Follower(etcd=cluster.etcd_address, job=cluster.job) as follower,
    ):
        data = job.dataset(str(folder / "data.parquet"), batch_size=1)
        tables = {
            name: job.table(name, 4, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
            for name, evict in rules.items()
        }
        for step, _ in enumerate(data):
            ids = np.arange(step * _SHIFT, step * _SHIFT + _PUSHED)
            values = np.full((_PUSHED, 4), -1.0, np.float32)
            values[::2] *= 0.1
            for table in tables.values():
                table.push(ids, values)
            job.step()
            if step % _EVERY == _EVERY - 1:
                if step // _EVERY % 2:
                    cluster.kill("pserver", step // _EVERY // 2 % 2)
                    kills += 1
                    time.sleep(0.2)
                every = np.arange(step * _SHIFT + _PUSHED)
                # The first lookup waits for the successor, and the copy is compared with what it restored.
                rows = {name: table.pull(every) for name, table in tables.items()}
                follower.catch_up(60.0)
                for name, table in tables.items():
                    found = follower.tables[name].lookup(every)
                    if not np.array_equal(found, rows[name]):
                        # Repeated batches may have been applied in between.
                        rows[name] = table.pull(every)
                        found = follower.catch_up(60.0).tables[name].lookup(every)
                    differing += int((found != rows[name]).any(axis=1).sum())
                    compared += every.size
        pushed = sum(3 * (_SHIFT * steps + _PUSHED - _SHIFT) for _ in (0,))
        left = sum(len(table) for table in tables.values())
    print(f"{pushed:,} rows created, {pushed - left:,} evicted, {kills} kills")
    print(f"{compared:,} lookups compared, {differing} stale or missing rows")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
