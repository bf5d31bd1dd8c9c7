"""A master's service as it is in the product, with an etcd, a storage, pservers and trainers that live in memory.

A pserver's twin answers the master's calls and keeps, instead of blocks, which tasks it has. What it answers, and
whether it answers at all, is the test's to say.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from flightedl.adapters.clock import SystemClock
from flightedl.config import MasterSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord, TrainerRecord
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import NotReadyError, UnavailableError
from flightedl.formats.registry import named_format
from flightedl.master.recovery import read_state
from flightedl.master.service import MasterService
from flightedl.messages.base import decode, encode
from flightedl.messages.control import (
    AppliedReply,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
    WrittenFile,
)
from flightedl.messages.declarations import DatasetDeclaration, ModelDeclaration, ParameterDeclaration
from flightedl.messages.status import PserverStatusReply
from flightedl.messages.tasks import Assignment, FinishedTask, JoinRequest, TasksReply, TasksTicket
from flightedl.rpc import Caller, Connector, Role
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator, MemoryFiles, MemoryStorage

KEYS = JobKeys("demo")
TASKS = 4
DATASET = DatasetDeclaration(urls=["a.parquet"], batch_size=2)
MODEL = ModelDeclaration(
    parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
    optimizer={"kind": "SGD", "lr": 0.1},
    mode={"kind": "Sync"},
)
Result = TypeVar("Result")


class PserverTwin:
    """A process of a pserver."""

    def __init__(self, index: int, pserver_count: int, generation: int, storage: MemoryStorage | None) -> None:
        self.index = index
        self.generation = generation
        self._pserver_count = pserver_count
        self._storage = storage
        #: Epoch -> its applied tasks.
        self.done: dict[int, set[int]] = {}
        #: Calls that get no answer.
        self.silent: set[str] = set()
        #: False if it accepts views but cannot report its applied batches yet.
        self.is_ready = True
        #: Checkpoints that it could not load.
        self.rejected: list[int] = []
        self.calls: Counter[str] = Counter()
        self.views: list[ViewRequest] = []
        #: Reason why files cannot be written; empty if they can.
        self.store_trouble = ""

    def action(self, name: str, body: bytes) -> bytes:
        self.calls[name] += 1
        if name in self.silent or "all" in self.silent:
            raise UnavailableError(f"pserver {self.index} does not answer")
        answer: Any = getattr(self, f"_{name}", lambda _: None)(body)
        return b"" if answer is None else encode(answer)

    def _view(self, body: bytes) -> ViewReply:
        self.views.append(decode(body, ViewRequest))
        return ViewReply(serial=self.views[-1].serial)

    def take(self, done: Assignment) -> None:
        """Let it have all batches of a task."""
        self.done.setdefault(done.epoch, set()).add(done.task)

    def _applied(self, _: bytes) -> AppliedReply:
        if not self.is_ready:
            raise NotReadyError(f"pserver {self.index} is loading")
        done = {
            epoch: sum(1 << task for task in tasks).to_bytes(1 + max(tasks, default=0) // 8, "little")
            for epoch, tasks in self.done.items()
        }
        return AppliedReply(summary=AppliedSummary(done=done).encode(), rejected=self.rejected)

    def _status(self, _: bytes) -> PserverStatusReply:
        numbers = dict.fromkeys(("lowest_version", "highest_version", "size_bytes", "pushes"), 0)
        return PserverStatusReply(
            index=self.index, state="serving", blocks=1, rows={}, members=[], waiting_for="", **numbers
        )

    def _snapshot(self, body: bytes) -> SnapshotReply:
        order = decode(body, SnapshotRequest)
        if self.store_trouble or self._storage is None:
            return SnapshotReply(order.order, "failed", reason=self.store_trouble)
        size_bytes = self._storage.publish(order.name, [b"values"])
        file = WrittenFile(
            name=order.name, size_bytes=size_bytes, hash="0" * 32, blocks=1, lowest_version=0, highest_version=0
        )
        return SnapshotReply(order.order, "written", file=file)


class _TwinConnection:
    """Replacement of ``rpc.client.Connection``."""

    def __init__(self, twin: PserverTwin) -> None:
        self._twin = twin

    def action(self, name: str, body: bytes, *, timeout_s: float) -> bytes:
        assert timeout_s > 0
        return self._twin.action(name, body)

    def close(self) -> None: ...

    def abort_calls(self) -> None: ...


class Job:
    """One job: its etcd, its storage, and who is there.

    Args:
        pserver_count: Pservers; none is there before ``start_pserver``.
        is_kept: Whether it keeps checkpoints.
    """

    def __init__(self, pserver_count: int = 1, *, is_kept: bool = True) -> None:
        self._clock = SystemClock()
        self.coordinator = MemoryCoordinator(self._clock)
        self.storage = MemoryStorage() if is_kept else None
        self.pserver_count = pserver_count
        batches = pa.table({"k": range(4 * TASKS)}).to_batches(max_chunksize=4)
        self.files = MemoryFiles({"a.parquet": b"".join(named_format("parquet").write(batches, batches[0].schema))})
        self._twins: dict[str, PserverTwin] = {}
        self._numbers = count()
        self._held: dict[str, HeldKey] = {}
        self._masters: list[Master] = []
        #: The master's own connection to etcd.
        self.master_coordinator = self.coordinator.another()

    # processes

    def start_pserver(
        self, index: int, done: dict[int, Iterable[int]] | None = None, *silent: str, is_ready: bool = True
    ) -> PserverTwin:
        """Start a new process of a pserver, with these tasks; it does not answer ``silent`` calls."""
        key, address = KEYS.pserver(index), f"twin:{next(self._numbers)}"
        record = msgspec.json.encode(ServerRecord(address=address, process=f"pserver-{index + 3}"))
        twin = PserverTwin(index, self.pserver_count, 0, self.storage)
        twin.done = {epoch: set(tasks) for epoch, tasks in (done or {}).items()}
        twin.silent.update(silent)
        twin.is_ready = is_ready
        self._twins[address] = twin
        twin.generation = self._claim(key, record)
        return twin

    def end_pserver(self, index: int) -> None:
        """End its lease."""
        self._held.pop(KEYS.pserver(index)).release()

    def start_trainer(self, name: str) -> int:
        """Register a trainer; return its generation."""
        return self._claim(KEYS.trainer(name), msgspec.json.encode(TrainerRecord(id=name)))

    def end_trainer(self, name: str) -> None:
        """End its lease."""
        self._held.pop(KEYS.trainer(name)).release()

    def _claim(self, key: str, record: bytes) -> int:
        held = HeldKey.claim(self.coordinator, self._clock, key, record, 20.0)
        assert held is not None
        self._held[key] = held
        return held.generation

    def start_master(self, **settings: object) -> Master:
        """Start a master. The previous one ends, and its successor gets its own connection."""
        self.end_master()
        self.master_coordinator = self.coordinator.another()
        self._masters.append(Master(self, self._clock, **settings))
        return self._masters[-1]

    def end_master(self) -> None:
        """End the master."""
        while self._masters:
            self._masters.pop().close()

    def connect(self, address: str, expected: object) -> _TwinConnection:
        return _TwinConnection(self._twins[address])

    def close(self) -> None:
        self.end_master()
        for held in self._held.values():
            held.release()
        self.coordinator.close()


class Master:
    """The service of one master, with requests of trainers."""

    def __init__(self, job: Job, clock: SystemClock, **settings: object) -> None:
        self._job = job
        held = HeldKey.claim(job.master_coordinator, clock, KEYS.master_lock, b"", 20.0)
        assert held is not None
        self._held = held
        self.directory = Directory(job.coordinator, KEYS, clock).start()
        self.service = MasterService(
            MasterSettings(etcd="memory:1", job="demo", pservers=job.pserver_count, **settings),  # type: ignore[arg-type]
            pserver_count=job.pserver_count,
            held=held,
            coordinator=job.master_coordinator,
            directory=self.directory,
            keys=KEYS,
            files=job.files,
            checkpoints=job.storage,
            index_storage=None,
            clock=clock,
            connector=job,
            step_down=lambda _: None,
        )
        self.service.start(read_state(job.coordinator, KEYS))

    def close(self) -> None:
        self._job.master_coordinator.reconnect()
        self.service.close()
        self.directory.close()
        self._held.release()

    @property
    def state(self) -> Any:
        return self.service._state

    def declare(self, dataset: DatasetDeclaration = DATASET, model: ModelDeclaration = MODEL) -> None:
        until_ready(lambda: self.service.declaring.dataset(dataset))
        until_ready(lambda: self.service.declaring.model(model))

    def ask(self, trainer: str, generation: int, **more: object) -> TasksReply:
        """Exchange one ticket; it may fail."""
        ticket = TasksTicket(trainer=trainer, generation=generation, wait_s=0.0, **more)  # type: ignore[arg-type]
        return self.service.tasks.exchange(ticket, threading.Event())[0]

    def work(self, trainer: str, generation: int, **more: object) -> TasksReply:
        """Exchange one ticket, as soon as the master is ready."""
        return until_ready(lambda: self.ask(trainer, generation, **more))

    def take(self, trainer: str, generation: int) -> Assignment:
        """Get one piece of work."""
        (given,) = self.work(trainer, generation, want=1).assignments
        return given

    def report(self, trainer: str, generation: int, *done: Assignment, by: Iterable[int], **more: object) -> TasksReply:
        """Report pieces as finished; pservers of the generations ``by`` acknowledged them."""
        finished = [
            FinishedTask(epoch=each.epoch, position=each.position, attempt=each.attempt, pservers=list(by))
            for each in done
        ]
        return self.work(trainer, generation, finished=finished, **{"want": 0, **more})

    def do_all(self, trainer: str, generation: int, pservers: Iterable[PserverTwin]) -> list[Assignment]:
        """Do all tasks until there are none."""
        done: list[Assignment] = []
        while given := self.work(trainer, generation, want=1).assignments:
            for each in given:
                for pserver in pservers:
                    pserver.take(each)
            self.report(trainer, generation, *given, by=[pserver.generation for pserver in pservers])
            done += given
        return done

    def join(self, trainer: str, generation: int, wait_s: float = 0.0) -> int:
        """Return the member's number; 0 if it is not a member yet."""
        return self.service.ask(JoinRequest(trainer=trainer, generation=generation, wait_s=wait_s)).member

    def join_at_last(self, trainer: str, generation: int) -> int:
        """Return the member's number, as soon as the master is ready and the trainer is a member."""
        return eventually(lambda: until_ready(lambda: self.join(trainer, generation)))

    def says_done(self, trainer: str, generation: int) -> bool:
        """True if the job is reported as done after one tick."""
        self.service.tick()
        return self.ask(trainer, generation).outcome == "epochs_done"

    def is_settled(self, pserver: PserverTwin) -> bool:
        with self.state.lock:
            return bool(self.state.core.pservers.is_settled(pserver.index, pserver.generation))


class LoneMaster:
    """A master's service of a job with one pserver, which never starts, and without checkpoints."""

    def __init__(self, coordinator: MemoryCoordinator, files: MemoryFiles) -> None:
        clock = SystemClock()
        held = HeldKey.claim(coordinator, clock, KEYS.master_lock, b"", 20.0)
        assert held is not None
        self._held = held
        self._directory = Directory(coordinator, KEYS, clock).start()
        self.service = MasterService(
            MasterSettings(etcd="memory:1", job="demo", pservers=1),
            pserver_count=1,
            held=held,
            coordinator=coordinator,
            directory=self._directory,
            keys=KEYS,
            files=files,
            checkpoints=None,
            index_storage=None,
            clock=clock,
            connector=Connector(Caller("master", "demo"), Role.SERVER),
            step_down=lambda _: None,
        )
        self.service.start(read_state(coordinator, KEYS))

    def close(self) -> None:
        self.service.close()
        self._directory.close()
        self._held.release()


def until_ready(call: Callable[[], Result]) -> Result:
    """Return the result of a request, as soon as the master is ready."""

    def attempt() -> list[Result]:
        try:
            return [call()]
        except NotReadyError:
            return []

    return eventually(attempt)[0]


@contextmanager
def jobs() -> Iterator[Callable[..., Job]]:
    """Make jobs whose masters reach the twins; remove everything afterwards."""
    made: list[Job] = []
    before = set(threading.enumerate())

    def make(*arguments: Any, **more: Any) -> Job:
        made.append(Job(*arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread not in before])
