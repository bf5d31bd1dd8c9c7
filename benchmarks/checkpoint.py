"""A checkpoint of one big shard: how long pushes wait for its copy, how fast it is written, against np.save, and read.

All blocks are pushed continuously. Training stands still for as long as the longest push during the copy takes more
than the usual time. On a busy machine pushes also take longer for other reasons, so the same figure is measured for an
equal time without a checkpoint.
"""

from __future__ import annotations

import collections
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.storage import open_storage
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, manifest_name
from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.optimizers import Adam
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_shards
from flightedl.messages.control import OrderNumber, SnapshotRequest, ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.restoring import load_newest
from flightedl.pserver.shard import Shard
from flightedl.wire.rows import Rows

_JOB = "shard"
_SNAPSHOTS = 5


class Pusher:
    """Pushes all blocks of a shard one batch after the other, as a trainer's stream does, and times each push."""

    def __init__(self, shard: Shard, plan: ShardPlan) -> None:
        self._shard = shard
        sizes = [4 * plan.block(number).size for number in shard.numbers]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._gradient = np.full(self._offsets[-1] // 4, 1e-3, np.float32).data.cast("B")
        self._stop = threading.Event()
        #: Begin and seconds of each push of all blocks.
        self.taken: list[tuple[float, float]] = []
        members = [ViewMember(trainer="t", generation=1, member=1, first_round=0)]
        shard.set_members(ViewRequest(plan_hash=plan.hash, master_generation=1, serial=1, members=members))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        while len(self.taken) < 3 and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        numbers = self._shard.numbers
        batch = 0
        while not self._stop.is_set():
            identity = BatchIdentity(epoch=0, task=batch >> 10, batch=batch & 1023, batch_count=1024)
            header = PushHeader(
                trainer="t",
                generation=1,
                plan_hash=self._shard.plan_hash,
                member=1,
                identity=identity,
                weight=1.0,
                rows=len(numbers),
                pull=False,
            )
            began = time.monotonic()
            zeros = [0] * len(numbers)
            self._shard.push_rows(header, Rows(numbers, zeros, zeros, self._offsets, self._gradient))
            self.taken.append((began, time.monotonic() - began))
            batch += 1

    def until(self, instant: float) -> None:
        """Wait until the push that was in progress at this instant is over."""
        while sum(self.taken[-1]) <= instant and self._thread.is_alive():
            time.sleep(0.001)

    def stall_without_reason_s(self, seconds: float) -> float:
        """Return ``stall_s`` of a period that begins now, without a checkpoint."""
        began = time.monotonic()
        time.sleep(seconds)
        self.until(began + seconds)
        return self.stall_s(began, began + seconds)

    def stall_s(self, began: float, ended: float) -> float:
        """Return the time by which the longest push in this period exceeded the usual time."""
        usual = statistics.median(taken for begun, taken in self.taken if begun + taken < began)
        return max(taken for begun, taken in self.taken if begun <= ended and begun + taken >= began) - usual


def saved_s(size_bytes: int, path: Path) -> float:
    """Return the seconds of np.save and fsync for this number of bytes."""
    values = np.ones(size_bytes // 4, np.float32)
    began = time.monotonic()
    with path.open("wb") as file:
        np.save(file, values)
        os.fsync(file.fileno())
    taken = time.monotonic() - began
    path.unlink()
    return taken


def main(mb: str = "1024") -> None:
    """Copy, write and read one shard with Adam's slots, while batches are pushed to it."""
    element_count = (int(mb) << 20) // 12
    specs = [ParameterSpec("w", (element_count,))]
    plan = plan_shards(specs, 1)
    clock = SystemClock()
    found: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        storage = open_storage(directory)
        shard = Shard(plan, 0, Adam(lr=1e-3), Async())
        snapshots = Snapshots(shard.copying, storage, _JOB, 0, 1, clock)
        snapshots.prepare()
        file = None
        with Pusher(shard, plan) as pusher:
            for number in range(1, _SNAPSHOTS + 1):
                name = f"c-{number}/shard.arrow"
                began = time.monotonic()
                snapshots.order(SnapshotRequest(OrderNumber(1, number, 1), None, name, plan_hash=""))
                while (progress := snapshots.progress) is None or progress.state == "waiting":
                    time.sleep(0.001)
                taken = time.monotonic()
                pusher.until(taken)
                found["stall"].append(pusher.stall_s(began, taken))
                found["copied"].append(snapshots.copied_s)
                while (progress := snapshots.progress) is None or progress.state not in {"written", "failed"}:
                    time.sleep(0.001)
                file = progress.file
                found["written"].append(snapshots.written_s)
                # During the same pushes, on the same disk.
                found["saved"].append(saved_s(file.size_bytes if file else 1, Path(directory) / "plain.npy"))
                found["other"].append(pusher.stall_without_reason_s(taken - began))
        assert file is not None, "the snapshot failed"
        manifest = Manifest(
            job=_JOB,
            number=_SNAPSHOTS,
            plan_hash=plan.hash,
            pserver_count=1,
            cut_for=1,
            round=None,
            created_s=0.0,
            shards=(ShardFile.of(0, 1, file),),
        )
        storage.publish(manifest_name(_SNAPSHOTS), [manifest.encode()])
        began = time.monotonic()
        restored = load_newest(storage, _JOB, specs, plan, 0, shard)
        restore_s = time.monotonic() - began
        assert restored.number == _SNAPSHOTS, restored.skipped
    kept = file.size_bytes / 1e6
    usual = {name: statistics.median(seconds) for name, seconds in found.items()}
    wrote, saved = usual["written"], usual["saved"]
    for line in (
        f"one shard of {kept:,.0f} MB, a third of it values, else Adam's slots; {_SNAPSHOTS} checkpoints under pushes",
        f"  training stood still for the copy    at most {max(found['stall']):.3f} s, median {usual['stall']:.3f} s",
        f"  as long a time without a checkpoint  at most {max(found['other']):.3f} s, median {usual['other']:.3f} s",
        f"  all blocks copied after              {usual['copied']:8.3f} s",
        f"  written to local disk, fsynced       {wrote:8.3f} s  {kept / wrote:8,.0f} MB/s",
        f"  np.save and fsync under the pushes   {saved:8.3f} s, so it writes {saved / wrote:.2f} x as fast",
        f"  restored, all checksums compared     {restore_s:8.3f} s  {kept / restore_s:8,.0f} MB/s",
    ):
        print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
