"""Operations of thread-safe objects wait for the one in progress, so that none of them sees a half-changed state.

The other tests of this package explore what goes wrong without a lock. This table only shows that each operation
acquires the lock, also for those whose races do harm too rarely to be explored.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator, EtcdWatch, _History
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.client.connections import Servers
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.read_queue import ReadQueue
from flightedl.client.following.copy import FollowedModel
from flightedl.client.model.lending import Lending
from flightedl.client.progress import LoggedValues, ProgressReporter
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.config import TrainerSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import ServerRecord
from flightedl.domain.consistency.modes import Async
from flightedl.domain.feed.follower import Use
from flightedl.domain.master.effects import Kind
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.moving.server import State
from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.domain.recovery.lives import name_in
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import NotReadyError, UnavailableError
from flightedl.launch.policy import Limits, Role, Slot
from flightedl.launch.processes import Children
from flightedl.launch.supervisor import Outcome, Supervisor
from flightedl.master.durable import DurableState
from flightedl.master.exporting import ModelExports
from flightedl.master.growing import Growing
from flightedl.master.journal import Journal
from flightedl.master.reading import ModelLocations
from flightedl.messages.base import encode
from flightedl.messages.checkpoints import SaveModelRequest
from flightedl.messages.control import CutRequest, OrderNumber
from flightedl.messages.feed import ChangesHeader, ChangesTicket, Position
from flightedl.messages.status import EventsRequest
from flightedl.messages.tasks import LogReply, TasksReply
from flightedl.ports import Put
from flightedl.pserver.cuts.copier import CopyMemory, SnapshotCopier
from flightedl.pserver.cuts.kept import KeptCut, RequestedCuts
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.meter import Meter
from flightedl.pserver.moving.mover import Mover
from flightedl.pserver.moving.peers import Peers
from flightedl.pserver.readers.consumers import ConsumerPositions
from flightedl.pserver.readers.feed import PserverFeed
from flightedl.pserver.shard import Shard
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.pserver.stores.arena import Arena
from flightedl.pserver.stores.changes import Changes
from flightedl.recording.writer import BackgroundFile
from flightedl.rpc import Caller, Connector, ServerIdentity
from flightedl.rpc.admission import Admission
from flightedl.rpc.authentication import Role as Authenticated
from flightedl.rpc.call import Limits as CallLimits
from flightedl.rpc.line import Lines
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from flightedl.wire.changes import Change
from tests.support.memory import MemoryCoordinator

KEYS, CLOCK = JobKeys("j"), SystemClock()
NOTHING: Any = None
#: A lock, and the operations that must wait for it, by name.
Case = tuple[Any, dict[str, Callable[[], object]]]


class Double(SimpleNamespace):
    """A double that can be a member of a set."""

    __hash__ = object.__hash__


def journal(_: ExitStack) -> Case:
    made = Journal(1, CLOCK)
    operations = {
        "add": lambda: made.add(Kind.EPOCH_DONE, "", "text"),
        "read": lambda: made.read(EventsRequest()),
        "counts": lambda: made.counts,
    }
    return made._changed, operations


def lines(stack: ExitStack) -> Case:
    made, line = Lines(), SimpleNamespace(shut=lambda: None, close=lambda: None)
    return made._lock, {
        "add": lambda: made.add("stream", line),  # type: ignore[arg-type]
        "shut": made.shut,
        "end": lambda: made.end("stream"),
    }


def admission(_: ExitStack) -> Case:
    made = Admission(ServerIdentity("j", "pserver"), CLOCK, CallLimits(), is_secured=False)
    made.closing.set()
    call: Any = Double(end=lambda: None)
    return made._lock, {
        "release": lambda: made.release(call),
        "late": made.late,
        "note a refusal": lambda: made.note_refusal(NotReadyError("x")),
        "refusals": lambda: made.refusals,
        "give back": made.has_memory_to_give_back,
    }


def line_loop(stack: ExitStack) -> Case:
    made = LineLoop(CLOCK.now)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.enter_context(here)
    stack.enter_context(there)
    lent: Any = Double(fileno=here.fileno(), due_at=None, receive=lambda: True)
    return made._lock, {
        "enter": made.enter,
        "lend": lambda: made.lend(lent),
        "take back": lambda: made.take_back(lent),
        "leave": made.leave,
    }


def reusable(_: ExitStack) -> Case:
    made = ReusableExchange("v", pa.schema([]), CLOCK, HeldStream)
    return made._lock, {"close": made.close_idle}


def arena(_: ExitStack) -> Case:
    made = Arena()
    values = made.allocate(4, np.float32, is_values=True)
    return made._lock, {
        "allocate": lambda: made.allocate(4, np.float32),
        "move": lambda: made.move(values, []),
        "release": lambda: made.release(values, [], []),
    }


def copier(_: ExitStack) -> Case:
    made = SnapshotCopier([0, 1], CopyMemory(), SimpleNamespace(round=0))  # type: ignore[arg-type]
    return made._changed, {
        "note due": lambda: made.note_due([0]),
        "next": made.next_due,
        "wait": lambda: made.wait(0.0),
        "drop": made.drop_rows,
        "give up": lambda: made.give_up("x"),
    }


def changes(_: ExitStack) -> Case:
    made = Changes()
    made.has_news = True
    return made._changed, {"announce": made.announce, "wait": lambda: made.wait(0, 0.0)}


def meter(_: ExitStack) -> Case:
    made = Meter()
    return made._lock, {
        "message": lambda: made.message(0.0, [], []),
        "sent": lambda: made.sent(1),
        "stream": lambda: made.stream(1),
        "stream of": lambda: made.stream_of(1, 1, is_shared=True),
        "rows": lambda: made.rows_by_outcome,
        "shares memory": made.shares_memory,
        "waits": lambda: made.waits_s("x"),
    }


def mover(stack: ExitStack) -> Case:
    peers: Any = SimpleNamespace(read=lambda _: None)
    shard: Any = SimpleNamespace(rows=SimpleNamespace(has_leftovers=False))
    made = Mover(0, 1, State((0, 1)), shard, peers, CLOCK, NOTHING, NOTHING)

    def apply_a_view() -> None:
        with made.no_unit_is_pinned():
            pass

    return made._changed, {"look": made.look, "apply a view": apply_a_view, "close": made.close}


def connector(_: ExitStack) -> Case:
    made = Connector(Caller("trainer", "t"), Authenticated.TRAINER)
    made._directory = str(_place[-1])
    made._state = made._looks()
    return made._lock, {"connect": made._present}


def peers(stack: ExitStack) -> Case:
    coordinator = MemoryCoordinator(CLOCK)
    coordinator.transact([], [Put(KEYS.pserver(1), encode(ServerRecord(address="127.0.0.1:1")))])
    place = stack.enter_context(Directory(coordinator, KEYS, CLOCK))
    assert place.wait_until(lambda known: known.pservers() or None, 5.0)
    made = Peers(place, KEYS, coordinator, Connector(Caller("pserver", "j"), Authenticated.SERVER))
    return made._lock, {"connect": lambda: made.source(1)}


def positions(_: ExitStack) -> Case:
    holders: Any = SimpleNamespace(entry=lambda _: SimpleNamespace(create_revision=1))
    made = ConsumerPositions(NOTHING, holders, KEYS, CLOCK)
    ticket = ChangesTicket(plan_hash="p", consumer="c", consumer_generation=1)
    position = Position(life=1, generation=1, placement=1, number=1)
    return made._lock, {
        "acknowledge": lambda: made.acknowledged(ticket, position, 1),
        "answer": lambda: made.answered(ticket, 1, 0.0),
    }


def shard() -> Shard:
    plan = plan_shards([ParameterSpec("w", (6,))], 1, tables=[TableSpec("t", 2, SGD(lr=1.0))])
    return Shard(plan, 0, SGD(lr=1.0), Async())


def row_store(_: ExitStack) -> Case:
    made = shard().rows
    return made.lock, {
        "count": made.counts,
        "discard": made.discard_some,
        "require room": lambda: made.require_room(0),
    }


def block_feed(_: ExitStack) -> Case:
    held = shard()
    made = PserverFeed(held, plan_shards([ParameterSpec("w", (6,))], 1), 1, 1, CLOCK)
    return made._lock, {
        "reserve": made.reserve_mark,
        "begin": lambda: made.begin_mark(1, KeptCut([], None)),
        "expire": made.expire,
    }


def kept_cut(_: ExitStack) -> Case:
    span = next(iter(shard().rows.spans.values()))
    made = KeptCut([0, *span.numbers], None)
    return made._changed, {
        "cut rows": lambda: made.copy_rows(span, CopyBlocks(0, span.numbers, 1, 1)),
        "drop": made.drop,
    }


def requested_cuts(_: ExitStack) -> Case:
    made = RequestedCuts(shard().copying, CLOCK)
    request = CutRequest(OrderNumber(1, 1, 1), None, plan_hash="p")
    return made._lock, {
        "order": lambda: made.order(request),
        "read": lambda: made.kept((1, 1)),
        "expire": made.expire,
    }


def snapshots(_: ExitStack) -> Case:
    made = Snapshots(shard().copying, None, "j", 0, 1, CLOCK)
    return made._lock, {"progress": lambda: made.progress}


def task_feed(stack: ExitStack) -> Case:
    made = TaskFeed(lambda _: TasksReply(assignments=[], outcome="none_now", retry_after_s=600.0), lambda: None, CLOCK)
    stack.callback(made.close, 5.0)
    return made._changed, {
        "next": lambda: made.next(0.0),
        "next ahead": made.next_ahead,
        "is done": lambda: made.is_done,
        "trouble": lambda: made.trouble,
        "held": lambda: made.held,
        "register again": made.registered_again,
        "retire": lambda: made.retire(None),
        "close": lambda: made.close(5.0),
    }


def read_queue(_: ExitStack) -> Case:
    made = ReadQueue[int](100)

    def get() -> None:
        with contextlib.suppress(queue.Empty):
            made.get(0.0)

    return made._changed, {"get": get, "put": lambda: made.put(1, 0.0)}


def lending(_: ExitStack) -> Case:
    made = Lending(lambda *_: None)
    values = memoryview(bytearray(4))
    return made._lock, {"show": lambda: made.show("w", 0, values, np.dtype(np.float32))}


def progress(stack: ExitStack) -> Case:
    made = ProgressReporter(lambda _: encode(LogReply()), lambda: ("t", 1), lambda: None, CLOCK.now)
    stack.callback(made.close)
    return made._lock, {
        "skipped": lambda: made.skipped(1),
        "metrics": lambda: made.metrics({"loss": 1.0}, 1.0),
        "figures": lambda: made.figures(1.0),
    }


def registration(stack: ExitStack) -> Case:
    made = Registration(MemoryCoordinator(CLOCK), CLOCK, KEYS, 60.0)
    stack.callback(made.close)
    return made._lock, {
        "held": lambda: made.held,
        "renewed": made.renewed,
        "under lease": lambda: made.under_lease(lambda _: None),
        "close": made.close,
    }


def held_key(stack: ExitStack) -> Case:
    made = HeldKey.claim(MemoryCoordinator(CLOCK), CLOCK, "k", b"", 600.0)
    assert made is not None
    stack.callback(made.release)
    return made._lock, {
        "reason": lambda: made.lost_because,
        "slack": lambda: made.slack_s,
        "write": lambda: made.write([]),
        "lose": made.has_lost,
        "attach": lambda: made.attached("other", b""),
    }


def directory(stack: ExitStack) -> Case:
    made = Directory(MemoryCoordinator(CLOCK), KEYS, CLOCK)
    return made._condition, {
        "subscribe": lambda: made.subscribe(lambda: None),
        "replace": lambda: made._replace({}, 1),
        "wait": lambda: made.wait_until(lambda _: None, 0.01),
        "close": made.close,
    }


def job_coordinator(_: ExitStack) -> Case:
    made = JobCoordinator(MemoryCoordinator(CLOCK), KEYS)
    return made._lock, {"read the life": lambda: made.get("x"), "look again": made.look_again}


def etcd_coordinator(stack: ExitStack) -> Case:
    made = EtcdCoordinator("127.0.0.1:1", clock=CLOCK)
    stack.callback(made.close)
    watch = made.watch("k", 0)
    return made._lock, {
        "connect": made._connection,
        "switch": lambda: made._switch_from(0, NOTHING, is_stuck=False),
        "watch": lambda: made.watch("k", 0),
        "close a watch": watch.close,
        "close": made.close,
    }


def etcd_history(_: ExitStack) -> Case:
    made, header = _History(), SimpleNamespace(cluster_id=1, revision=1)
    return made._lock, {"see": lambda: made.saw(None, header, is_current=True)}


def etcd_watch(_: ExitStack) -> Case:
    made = EtcdWatch(EtcdAccess("127.0.0.1:1"), "k", 0, 1.0, CLOCK, _History(), lambda _: None)
    made._reopen_at = math.inf
    former: Any = Double()
    return made._condition, {
        "next": lambda: made.next(0.0),
        "receive": lambda: made._received(former, NOTHING),
        "end": lambda: made._ended(former),
        "close": made.close,
    }


def locations(_: ExitStack) -> Case:
    model = SimpleNamespace(plan_hash="h")
    state: Any = SimpleNamespace(core=SimpleNamespace(declaration=SimpleNamespace(model=model)))
    made = ModelLocations(state, "j", 1, NOTHING, NOTHING)
    made._known = Double(hash="h")  # type: ignore[assignment]
    return made._lock, {"plan": made._plan}


def exports(_: ExitStack) -> Case:
    storage: Any = SimpleNamespace()
    made = ModelExports(storage, "j", NOTHING, NOTHING, CLOCK)
    made._exports[name_in(0, "m.npz")] = Double(result=lambda: None)  # type: ignore[assignment]
    return made._lock, {"ask": lambda: made.ask(SaveModelRequest(url="m.npz"))}


def waiting(_: ExitStack) -> Case:
    made = Waiting(CLOCK, 0.0, 60.0, lambda _: None)
    return made._lock, {
        "look": made.look,
        "because": lambda: made.because("x"),
        "patiently": lambda: made.patiently("x"),
        "withdraw": made.withdraw,
    }


def logged_values(_: ExitStack) -> Case:
    chosen = TrainerSettings(job="j", etcd="e:1", output_dir=str(_place[-1]))
    made = LoggedValues(chosen, "t", CLOCK)
    return made._lock, {"add": lambda: made.add({"loss": 1.0}, 1.0, 0, 1, 1), "write": made.write}


def durable(stack: ExitStack) -> Case:
    coordinator = MemoryCoordinator(CLOCK)
    held = HeldKey.claim(coordinator, CLOCK, "k", b"", 600.0)
    assert held is not None
    stack.callback(held.release)
    made = DurableState(held, coordinator, CLOCK, lambda: (1, {}), lambda _: None, {})
    return made._changed, {"wait": lambda: made.wait(1, 5.0), "close": made.close}


def growing(_: ExitStack) -> Case:
    state: Any = SimpleNamespace(
        lock=contextlib.nullcontext(), core=SimpleNamespace(work=None), dataset=None, dataset_alarm=""
    )
    made = Growing(state, NOTHING, None, 1.0, NOTHING)
    return made._lock, {"begin": made.begin, "close": made.close}


def followed_model(_: ExitStack) -> Case:
    made = FollowedModel(plan_shards([ParameterSpec("w", (6,))], 1, tables=[TableSpec("t", 2, SGD(lr=1.0))]))
    position = Position(life=1, generation=1, placement=1, number=1)
    header = ChangesHeader(position=position, since=None, blocks=[(0, 1)], buckets=[(0, 1024)])
    received = made.begin(header, 1.0)
    received.add([Change("end", block=0)])

    def apply() -> None:
        assert made.apply(0, received) is Use.APPLY

    return made._lock, {
        "since": lambda: made.since(0),
        "apply": apply,
        "is complete": lambda: made.is_complete,
        "covers": lambda: made.covers(0.0),
        "read": lambda: made.read("t", np.zeros(1, np.uint64)),
        "rows": lambda: made.rows("t"),
    }


def servers(_: ExitStack) -> Case:
    place: Any = SimpleNamespace(subscribe=lambda _: None, pservers=dict, master=lambda: None)
    made = Servers("j", place, Connector(Caller("trainer", "t"), Authenticated.TRAINER))
    return made._lock, {"leave the replaced": made._leave_replaced, "close": made.close}


def supervisor(stack: ExitStack) -> Case:
    def start(_: int) -> Any:
        raise UnavailableError("not now")

    children: Any = SimpleNamespace(stop=lambda *_: None)
    made = Supervisor(children, {Slot(Role.PSERVER, 0): start}, CLOCK, Limits())
    return made._lock, {
        "processes": made.processes,
        "child": lambda: made.child(Slot(Role.PSERVER, 0)),
        "resize": lambda: made.resize_pservers(2, lambda _: start),
        "give up": lambda: made.give_up(Outcome(2, "enough")),
        "stop": made.stop,
    }


def child(stack: ExitStack) -> Case:
    children = stack.enter_context(Children(Path(_place[-1])))
    made = children.start("child", ["/bin/sleep", "60"], {})
    return made._lock, {"poll": made.poll, "send": lambda: made.send(0), "kill": made.kill}  # type: ignore[arg-type]


def background_file(stack: ExitStack) -> Case:
    made = BackgroundFile(Path(_place[-1]) / "file")
    stack.callback(made.close)
    return made._lock, {"write": lambda: made.write(b"x")}


CASES: list[Callable[[ExitStack], Case]] = [
    *(journal, lines, admission, line_loop, reusable, arena, copier, changes, meter, mover, task_feed, read_queue),
    *(lending, progress, registration, held_key, directory, job_coordinator, durable, growing, followed_model),
    *(servers, supervisor, child, background_file, etcd_coordinator, etcd_history, etcd_watch, locations, exports),
    *(waiting, logged_values, connector, peers, positions, row_store, block_feed, kept_cut, requested_cuts, snapshots),
]
#: Directory of the current test.
_place: list[Path] = []


@pytest.fixture(autouse=True)
def place(tmp_path: Path) -> Iterator[None]:
    _place.append(tmp_path)
    yield
    _place.pop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_operation_waits_for_the_one_in_progress(case: Callable[[ExitStack], Case]) -> None:
    with ExitStack() as stack:
        lock, operations = case(stack)
        executor = stack.enter_context(ThreadPoolExecutor(1))
        for name, operation in operations.items():
            with lock:
                running = executor.submit(operation)
                with contextlib.suppress(TimeoutError):
                    running.result(0.02)
                    pytest.fail(f"{name!r} does not wait")
            running.result(20.0)
