"""Cost of a dispatch, and how it grows with the number of tasks.

python -m benchmarks.dispatch --help

Several masters, one for each number of tasks, share one etcd and are measured in turn. Their datasets are synthetic:
the benchmark publishes only an index, and trainers read no records. A *dispatch* is the call that a trainer makes
between two tasks, to report the last task and get the next one. Both are durable when the call returns.
"""

from __future__ import annotations

import base64
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
from pyarrow import flight

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.storage import open_storage
from flightedl.config import MasterSettings, child_environment
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.errors import JobFailedError, UnavailableError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import ChunkColumns, FileIndex
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.stored_index import encode_index, index_name
from flightedl.launch.etcd import EmbeddedEtcd
from flightedl.launch.processes import Child, Children
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, JobDeclaration
from flightedl.messages.tasks import Assignment, FinishedTask, TasksReply, TasksTicket
from flightedl.ports import Coordinator, FileStat, Put
from flightedl.process import tuning as process_tuning
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.rpc.request_stream import RequestStream
from flightedl_tools.bench.sides import Side, begin, measuring, print_json, print_table, ratio, take_turns
from flightedl_tools.bench.workers import next_order, peak_bytes, print_line, ready, report, serve, started

_CHUNKS_PER_FILE = 1000
_RECORDS_PER_CHUNK = 100
_START_S = 120.0
_POLL_S = 0.005
_CALL_S = 20.0
_LEASE_S = 60.0
#: Approximate size of the queue's state when 64 trainers hold tasks.
_STATE_BYTES = 3000


@dataclass(frozen=True, slots=True)
class OfTasks:
    """Results for one master, identified by its number of tasks."""

    tasks: int
    start_s: float
    memory_mb: float
    dispatch_ms: float
    #: Size of the queue's state in etcd while all trainers hold a task.
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """All results. Ratios are medians over the turns."""

    masters: tuple[OfTasks, ...]
    #: Time of a dispatch with the most tasks, divided by the time with the fewest.
    growth: float
    bare_ms: float
    #: Time of one trainer's dispatch, divided by the time of a bare transaction and a bare call.
    over_bare: float
    trainers: int
    one_per_s: float
    all_per_s: float
    #: Dispatches per second of all trainers together, divided by the rate of a single trainer.
    group_commit: float


def invented_index(task_count: int) -> ChunkIndex:
    """Return an index of ``task_count`` chunks, with a thousand chunks per file."""
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
        """Start a master whose dataset has ``task_count`` tasks. Return it and its startup time in seconds."""
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
        """Return the size of the queue's state in etcd."""
        entry = self._coordinator.get(JobKeys(job_of(task_count)).task_queues)
        return 0 if entry is None else len(entry.value)

    def close(self) -> None:
        self._coordinator.close()


def job_of(task_count: int) -> str:
    """Return the name of the job with ``task_count`` tasks."""
    return f"bench-{task_count}"


class _Asking:
    def __init__(self, job: str, name: str, coordinator: Coordinator, address: str, generation: int) -> None:
        held = HeldKey.claim(coordinator, SystemClock(), JobKeys(job).trainer(name), b'{"id":"t"}', _LEASE_S)
        assert held is not None
        self.held = held
        self.name = name
        self.connection = Connection(
            address, expected=ServerIdentity(job, "master", 0, generation), caller=Caller("trainer", name)
        )
        self._request_stream = RequestStream("tasks", SystemClock())
        self.assignment: Assignment | None = None

    def dispatch(self) -> None:
        """Report the last task and get the next one."""
        last = self.assignment
        finished = (
            [] if last is None else [FinishedTask(epoch=last.epoch, position=last.position, attempt=last.attempt)]
        )
        ticket = TasksTicket(trainer=self.name, generation=self.held.generation, finished=finished, want=1)
        while True:
            try:
                text = self._request_stream.ask(self.connection, encode(ticket), timeout_s=_CALL_S)
            except UnavailableError:
                continue
            break
        reply = decode(text, TasksReply)
        if not reply.assignments:
            raise JobFailedError("the bench has used up its tasks: reduce the number of dispatches")
        self.assignment = reply.assignments[0]

    def work(self, times: int, started: threading.Barrier, seconds: list[float]) -> None:
        """Wait until all trainers have started, then dispatch repeatedly. Append the durations in seconds."""
        started.wait()
        for _ in range(times):
            begun = time.perf_counter()
            self.dispatch()
            seconds.append(time.perf_counter() - begun)

    def close(self) -> None:
        self._request_stream.close_idle()
        self.connection.close()
        self.held.release()


def run_trainers(etcd: str, job: str, count: int) -> None:
    """Run ``count`` trainers as threads with separate connections. They dispatch concurrently, on request."""
    process_tuning.apply()
    clock = SystemClock()
    coordinator = EtcdCoordinator(etcd, clock=clock)
    directory = Directory(coordinator, JobKeys(job), clock).start()
    record = directory.wait_until(lambda found: found.master(), 30.0)
    assert record is not None
    trainers = [
        _Asking(job, f"bench-{time.time_ns()}-{number}", coordinator, record.address, record.generation)
        for number in range(count)
    ]
    for trainer in trainers:
        trainer.dispatch()
    ready()
    while times := next_order()[0]:
        seconds: list[float] = []
        started = threading.Barrier(count + 1)
        threads = [threading.Thread(target=trainer.work, args=(times, started, seconds)) for trainer in trainers]
        for thread in threads:
            thread.start()
        cpu_s = time.process_time()
        started.wait()
        for thread in threads:
            thread.join()
        report(seconds, time.process_time() - cpu_s, count)
    for trainer in trainers:
        trainer.close()
    directory.close()
    coordinator.close()


class _BareServer(flight.FlightServerBase):  # type: ignore[misc]
    def do_get(self, _context: Any, _ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(pa.table({"value": pa.array([1], pa.int64())}))


def run_bare(etcd: str, address: str) -> None:
    """On request, run the minimum that a durable dispatch needs: a Flight call and an etcd transaction."""
    process_tuning.apply()
    coordinator = EtcdCoordinator(etcd, clock=SystemClock())
    client = flight.FlightClient(f"grpc://{address}")
    options = flight.FlightCallOptions(timeout=_CALL_S)
    state = b"x" * _STATE_BYTES

    def step() -> None:
        client.do_get(flight.Ticket(b"next"), options).read_all()
        coordinator.transact([], [Put("/flightedl-bench/bare", state)])

    serve(step)
    client.close()
    coordinator.close()


def run_server() -> None:
    """Print the server's address, then serve until standard input ends."""
    process_tuning.apply()
    server = _BareServer("grpc://127.0.0.1:0")
    print_line(f"127.0.0.1:{server.port}")
    sys.stdin.read()
    server.shutdown()


def measure(sizes: Sequence[int], trainers: int, turns: int, dispatches: int, directory: Path) -> Found:
    """Measure all masters in one run."""
    # All jobs stay in their first epoch. Copied tasks and a smaller state at its end would change the results.
    dispatches = max(min(dispatches, (min(sizes) - trainers) // (turns + 1)), 1)
    of_each = max(dispatches // trainers, 1) * 4
    needed = trainers + (turns + 1) * (dispatches + trainers * of_each)
    if sizes[-1] < needed:
        raise UsageError(f"{trainers} trainers dispatch {needed} tasks in {turns} turns: add a larger size to --sizes")
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(Children(directory / "logs"))
        etcd = stack.enter_context(EmbeddedEtcd(children)).address
        bench = Bench(directory / "kept", children, etcd)
        stack.callback(bench.close)
        masters = {size: bench.start_master(size) for size in sizes}
        stack.callback(lambda: children.stop([child for child, _ in masters.values()], 2.0))
        ones = [Side(begin(stack, run_trainers, etcd, job_of(size), 1), [], 0) for size in sizes]
        # All trainers hold a task in every job, so that the states have the same size. The trainers run in two
        # processes, so that the benchmark does not measure how they compete for an interpreter's lock.
        shares = [share for share in (trainers // 2, trainers - trainers // 2) if share]
        for size in sizes:
            crowd = [begin(stack, run_trainers, etcd, job_of(size), share)[0] for share in shares]
        many = Side(crowd, [], 0)
        bare = Side(begin(stack, run_bare, etcd, stack.enter_context(started(run_server)).line()), [], 0)
        counts = [*[dispatches] * (1 + len(sizes)), of_each]
        bare_s, *one_s, _ = take_turns([bare, *ones, many], turns, counts)
        return Found(
            tuple(
                OfTasks(
                    size,
                    start_s,
                    peak_bytes(child.pid) / (1 << 20),
                    1e3 * statistics.median(seconds),
                    bench.state_bytes(size),
                )
                for (size, (child, start_s)), seconds in zip(masters.items(), one_s, strict=True)
            ),
            growth=ratio(one_s[-1], one_s[0]),
            bare_ms=1e3 * statistics.median(bare_s),
            over_bare=ratio([statistics.fmean(each) for each in zip(*one_s, strict=True)], bare_s),
            trainers=trainers,
            one_per_s=statistics.median(ones[-1].rates),
            all_per_s=statistics.median(many.rates),
            group_commit=ratio(many.rates, ones[-1].rates),
        )


def print_found(found: Found) -> None:
    """Print a table, and messages about the results."""
    layouts = ("{0.tasks:,}", "{0.dispatch_ms:.2f}", "{0.state_bytes:,}", "{0.memory_mb:.0f}", "{0.start_s:.2f}")
    rows = [[layout.format(one) for layout in layouts] for one in found.masters]
    columns = ("tasks", "dispatch ms", "state bytes", "master's peak MB", "start s")
    print_table("one trainer's dispatch: report a task, get the next, durably", columns, rows, left=())
    for sentence in sentences(found):
        click.echo(sentence)


def sentences(found: Found) -> list[str]:
    """Return messages that state the ratios and their limits."""
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
@click.option("--trainers", type=click.IntRange(min=1), default=64, show_default=True, help="Concurrent trainers.")
@click.option(
    "--dispatches", type=click.IntRange(min=1), default=200, show_default=True, help="Dispatches per trainer and turn."
)
@measuring(turns=7)
def dispatch(*, sizes: str, trainers: int, turns: int, dispatches: int, wants_json: bool) -> None:
    """Measure how the cost of a dispatch depends on the number of tasks.

    Also measures the size of the durable state, the master's memory and startup time, group commits, and a bare
    transaction and call.
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


if __name__ == "__main__":
    # Processes that the benchmark starts import its functions by the module's name.
    from benchmarks.dispatch import dispatch as command

    command()
