"""``flightedl bench queue``: what a dispatch costs, and whether that depends on how many tasks there are.

Real masters on one real etcd, one for each number of tasks, alive at the same time and measured in turns. Their
datasets are invented: the index is put where a master looks for it, and no trainer reads a record. A *dispatch* is what
a trainer does between two tasks: one call that reports the last one and fetches the next, durable when it returns.
"""

from __future__ import annotations

import base64
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pyarrow as pa

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.storage import open_storage
from flightedl.config import MasterSettings, child_environment
from flightedl.coordination.keys import JobKeys
from flightedl.errors import JobFailedError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import ChunkColumns, FileIndex
from flightedl.formats.declared import spec_of
from flightedl.formats.stored_index import encode_index, index_name
from flightedl.launch.etcd import EmbeddedEtcd
from flightedl.launch.processes import Child, Children
from flightedl.messages.base import encode
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, JobDeclaration
from flightedl.ports import FileStat, Put

from .orders import Worker, worker
from .processes import peak_bytes
from .sides import measuring, print_json, print_table

_MODULE = "flightedl_tools.bench.dispatchers"
_CHUNKS_PER_FILE = 1000
_RECORDS_PER_CHUNK = 100
_START_S = 120.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class OfTasks:
    """One master's figures."""

    tasks: int
    start_s: float
    memory_mb: float
    dispatch_ms: float
    #: Of the queue's state in etcd, while all trainers hold a task.
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """All figures. Ratios are medians over the turns."""

    masters: tuple[OfTasks, ...]
    #: Time of a dispatch with the most tasks over that with the fewest.
    growth: float
    bare_ms: float
    #: Time of one trainer's dispatch over that of a bare transaction and a bare call.
    over_bare: float
    trainers: int
    one_per_s: float
    all_per_s: float
    #: Dispatches a second of all trainers over those of one.
    group_commit: float


def invented_index(task_count: int) -> ChunkIndex:
    """So many chunks, in files of a thousand."""
    schema = pa.schema([("k", pa.int64())])
    files = []
    for first in range(0, task_count, _CHUNKS_PER_FILE):
        count = min(_CHUNKS_PER_FILE, task_count - first)
        size_bytes = 1 << 20
        offsets = [number * size_bytes for number in range(count)]
        columns = ChunkColumns.of([_RECORDS_PER_CHUNK] * count, offsets, [size_bytes] * count)
        stat = FileStat(f"/invented/part-{first:09d}.parquet", count * size_bytes, "1")
        files.append(FileIndex(stat, "parquet", schema, columns))
    return ChunkIndex(files, schema)


class Bench:
    """An etcd with its masters."""

    def __init__(self, directory: Path, children: Children, etcd: str) -> None:
        self._directory = directory
        self._children = children
        self.etcd = etcd
        self._coordinator = EtcdCoordinator(etcd, clock=SystemClock())

    def start_master(self, task_count: int) -> tuple[Child, float]:
        """A master whose dataset has so many tasks, and how long it took to start."""
        job = job_of(task_count)
        index = invented_index(task_count)
        declared = DatasetDeclaration(urls=[f"/invented/{task_count}"], batch_size=10, epochs=None, shuffle=True)
        storage = open_storage(str(self._directory))
        storage.publish(index_name(spec_of(declared)), [encode_index(index)])
        reply = DeclaredDataset(
            index_hash=index.content_hash(),
            task_count=task_count,
            record_count=index.record_count,
            schema=base64.b64encode(index.schema.serialize().to_pybytes()).decode(),
            declaration=declared,
        )
        keys = JobKeys(job)
        self._coordinator.transact([], [Put(keys.job, encode(JobDeclaration(dataset=reply)))])
        values = MasterSettings(etcd=self.etcd, job=job, checkpoint=str(self._directory), lease_ttl_s=30.0)
        begun = time.perf_counter()
        child = self._children.start(job, [sys.executable, "-m", "flightedl.master"], child_environment(values))
        while self._coordinator.get(keys.master_address) is None:
            if child.poll() is not None or time.perf_counter() - begun > _START_S:
                raise JobFailedError(f"the master does not start: {' '.join(child.tail(3))}")
            time.sleep(_POLL_S)
        return child, time.perf_counter() - begun

    def state_bytes(self, task_count: int) -> int:
        """Of the queue's state as it is in etcd."""
        entry = self._coordinator.get(JobKeys(job_of(task_count)).task_queues)
        return 0 if entry is None else len(entry.value)

    def close(self) -> None:
        """Let go of etcd."""
        self._coordinator.close()


def job_of(task_count: int) -> str:
    """The name of the job with so many tasks."""
    return f"bench-{task_count}"


def timed(count: int, *workers: Worker) -> tuple[float, float]:
    """(median seconds of a step, steps a second) of ``count`` steps of each thread of the workers, all at once."""
    begun = time.perf_counter()
    for each in workers:
        each.order(count)
    seconds = [second for each in workers for second in each.answer()["seconds"]]
    return statistics.median(seconds), len(seconds) / (time.perf_counter() - begun)


def measure(sizes: Sequence[int], trainers: int, turns: int, dispatches: int, directory: Path) -> Found:
    """Everything, in one run."""
    # All stay in their first epoch: at its end copies would be handed out, and the states would grow shorter.
    dispatches = max(min(dispatches, (min(sizes) - trainers) // (turns + 1)), 1)
    needed = trainers + (turns + 1) * (dispatches + trainers * _dispatches_of_each(dispatches, trainers))
    if sizes[-1] < needed:
        raise UsageError(f"{trainers} trainers dispatch {needed} tasks in {turns} turns: name a size above that, too")
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(Children(directory / "logs"))
        etcd = stack.enter_context(EmbeddedEtcd(children))
        bench = Bench(directory / "kept", children, etcd.address)
        stack.callback(bench.close)
        started = {size: bench.start_master(size) for size in sizes}
        stack.callback(lambda: children.stop([child for child, _ in started.values()], 2.0))
        environment = child_environment()

        def start(*arguments: object) -> Worker:
            found = stack.enter_context(worker(_MODULE, list(arguments), environment))
            if arguments[0] != "server":
                found.answer()
            return found

        ones = {size: start("trainers", etcd.address, job_of(size), 1) for size in sizes}
        # All of them hold a task in every job, so that the states have the same length.
        # In two processes, so that it is not their interpreter's lock that is measured.
        shares = [share for share in (trainers // 2, trainers - trainers // 2) if share]
        crowds = {size: [start("trainers", etcd.address, job_of(size), share) for share in shares] for size in sizes}
        many = crowds[sizes[-1]]
        bare = start("bare", etcd.address, f"127.0.0.1:{start('server').line()}")
        for each in (bare, *ones.values()):
            timed(dispatches // 4 + 1, each)
        timed(dispatches // trainers + 1, *many)
        turns_found = [_turn(sizes, ones, many, bare, dispatches, trainers, turn) for turn in range(turns)]
        masters = tuple(
            OfTasks(
                size,
                started[size][1],
                peak_bytes(started[size][0].pid) / (1 << 20),
                1e3 * statistics.median(turn.one_s[size] for turn in turns_found),
                bench.state_bytes(size),
            )
            for size in sizes
        )
    return _found(masters, sizes, trainers, turns_found)


@dataclass(frozen=True, slots=True)
class _Turn:
    bare_s: float
    one_s: dict[int, float]
    one_per_s: float
    all_per_s: float


def _turn(
    sizes: Sequence[int],
    ones: dict[int, Worker],
    many: Sequence[Worker],
    bare: Worker,
    dispatches: int,
    trainers: int,
    turn: int,
) -> _Turn:
    """Each side once; who goes first alternates."""
    order = list(sizes) if turn % 2 == 0 else list(reversed(sizes))
    bare_s, _ = timed(dispatches, bare)
    one = {size: timed(dispatches, ones[size]) for size in order}
    again_s, _ = timed(dispatches, bare)
    _, all_per_s = timed(_dispatches_of_each(dispatches, trainers), *many)
    return _Turn((bare_s + again_s) / 2, {size: one[size][0] for size in sizes}, one[sizes[-1]][1], all_per_s)


def _dispatches_of_each(dispatches: int, trainers: int) -> int:
    """Of many trainers, in a turn."""
    return max(dispatches // trainers, 1) * 4


def _found(masters: tuple[OfTasks, ...], sizes: Sequence[int], trainers: int, turns: Sequence[_Turn]) -> Found:
    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    return Found(
        masters,
        growth=median(turn.one_s[sizes[-1]] / turn.one_s[sizes[0]] for turn in turns),
        bare_ms=1e3 * median(turn.bare_s for turn in turns),
        over_bare=median(statistics.fmean(turn.one_s.values()) / turn.bare_s for turn in turns),
        trainers=trainers,
        one_per_s=median(turn.one_per_s for turn in turns),
        all_per_s=median(turn.all_per_s for turn in turns),
        group_commit=median(turn.all_per_s / turn.one_per_s for turn in turns),
    )


def print_found(found: Found) -> None:
    """Print the table and sentences for people."""
    rows = [
        (
            f"{one.tasks:,}",
            f"{one.dispatch_ms:.2f}",
            f"{one.state_bytes:,}",
            f"{one.memory_mb:.0f}",
            f"{one.start_s:.2f}",
        )
        for one in found.masters
    ]
    columns = ("tasks", "dispatch ms", "state bytes", "master's peak MB", "start s")
    print_table("one trainer's dispatch: report a task, get the next, durably", columns, rows, left=())
    for sentence in sentences(found):
        click.echo(sentence)


def sentences(found: Found) -> list[str]:
    """The ratios, with what they should be."""
    first, last = found.masters[0].tasks, found.masters[-1].tasks
    over_bare = f"a dispatch takes {found.over_bare:.2f} x a bare etcd transaction and a bare Flight call"
    group = f"{found.trainers} trainers get {found.all_per_s:,.0f} tasks a second, one gets {found.one_per_s:,.0f}"
    return [
        f"a dispatch of {last:,} tasks takes {found.growth:.2f} x that of {first:,} (should be at most 1.2)",
        f"{over_bare}, {found.bare_ms:.2f} ms (should be at most 2.5)",
        f"{group}: {found.group_commit:.1f} x (should be at least 3)",
    ]


@click.command()
@click.option("--sizes", default="1000,10000,100000,1000000", show_default=True, help="Numbers of tasks.")
@click.option("--trainers", type=click.IntRange(min=1), default=64, show_default=True, help="That ask at once.")
@click.option("--dispatches", type=click.IntRange(min=1), default=200, show_default=True, help="Of one trainer a turn.")
@measuring(turns=7)
def queue(*, sizes: str, trainers: int, turns: int, dispatches: int, wants_json: bool) -> None:
    """Cost of a dispatch by the number of tasks.

    Also: bytes of the durable state, memory and start of the master, group commit, and a bare transaction and call.
    """
    if not all(size.strip().isdecimal() for size in sizes.split(",")):
        raise UsageError(f"--sizes is {sizes!r:.80}, but must be numbers of tasks, separated by commas")
    counts = sorted({int(size) for size in sizes.split(",")})
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        found = measure(counts, trainers, turns, dispatches, Path(directory))
    if wants_json:
        print_json(found)
    else:
        print_found(found)
