"""Requests of the master over a real socket: a pserver only accepts those for its own shard plan."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.domain.pserver import life_values
from flightedl.domain.pserver.life_values import Facts, State
from flightedl.errors import FencedError, NotReadyError, OutcomeUnknownError, UnavailableError
from flightedl.kernels.compiled import Update
from flightedl.master import resuming
from flightedl.messages.base import decode, encode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    CutRequest,
    OrderNumber,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewMember,
    ViewReply,
    ViewRequest,
    WrittenFile,
)
from flightedl.messages.declarations import (
    DeclaredModel,
    ElectionRecord,
    JobDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
)
from flightedl.messages.moving import CopyTicket
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.ports import Put
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.restoring import Restored
from flightedl.pserver.service import PserverService
from flightedl.rpc import Connection, FlightServer, ServerIdentity
from flightedl.wire.rows import Row, decode_batch, encode_rows
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
PLAN = plan_for([ParameterSpec("w", (4,))], 1, 0)


def orders(plan_hash: str) -> dict[str, msgspec.Struct]:
    """Return one of each request of a master."""
    member = ViewMember(trainer="t", generation=1, member=1, first_round=0)
    return {
        "view": ViewRequest(plan_hash=plan_hash, master_generation=1, serial=1, members=[member]),
        "snapshot": SnapshotRequest(OrderNumber(1, 1, 1), None, "c-1/shard", plan_hash=plan_hash),
        "seal": SealRequest(plan_hash=plan_hash, master_generation=1, epochs=[(0, 1)]),
        "applied": AppliedRequest(plan_hash=plan_hash),
        "reload": ReloadRequest(plan_hash=plan_hash, master_generation=1),
    }


class Served:
    """A pserver that waits for the first values of a declared model."""

    def __init__(self, directory: Directory) -> None:
        clock = self.clock = SystemClock()
        self.directory = directory
        #: Reasons for which a new start of the process was requested.
        self.ends: list[str] = []
        self.service = PserverService(directory, KEYS, pytest.fail, self.ends.append, None, clock)
        self.server = FlightServer(
            PserverFlight(self.service, clock).routes(), ServerIdentity("demo", "pserver"), clock=clock
        )
        self.service.refusals = lambda: self.server.refusals
        identity = ServerIdentity("demo", "pserver", 0, 1)
        self.service.acquire_index(0, 1, lambda: True)
        self.server.start_serving(identity)
        self.connection = Connection(self.server.address, expected=identity)

    def send(self, verb: str, message: msgspec.Struct) -> bytes:
        return self.connection.action(verb, encode(message), timeout_s=5.0)

    def await_blocks(self, timeout_s: float) -> None:
        """Wait until the service's builder thread has allocated the blocks."""
        deadline = self.clock.now() + timeout_s
        while not self.service.status().blocks:
            assert self.clock.now() < deadline
            self.clock.sleep(0.01)

    def close(self) -> None:
        self.connection.close()
        self.service.close()
        self.server.stop(1.0)


@pytest.fixture
def declared() -> MemoryCoordinator:
    model = ModelDeclaration(
        parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
        optimizer=SGD(0.1).to_json(),
        mode=Sync().to_json(),
    )
    coordinator = MemoryCoordinator(SystemClock())
    reply = DeclaredModel(declaration=model, pservers=1, plan_hash=PLAN.hash)
    coordinator.transact([], [Put(KEYS.job, encode(JobDeclaration(model=reply)))])
    return coordinator


@pytest.fixture
def served(declared: MemoryCoordinator) -> Iterator[Served]:
    with Directory(declared, KEYS, SystemClock()) as directory:
        assert directory.wait_until(lambda d: d.entry(KEYS.job), 5.0)
        served = Served(directory)
        try:
            served.service.look()
            served.await_blocks(30.0)
            yield served
        finally:
            served.close()


def test_requests_for_another_plan_are_rejected_counted_and_change_nothing(served: Served) -> None:
    for verb, message in orders("0" * 32).items():
        with pytest.raises(FencedError, match="different shard plan"):
            served.send(verb, message)
    status = served.service.status()
    assert status.refused_calls == {"fenced": 5}
    assert status.members == []
    assert not served.ends


def test_requests_for_the_same_plan_are_processed(served: Served) -> None:
    right = orders(PLAN.hash)
    assert not decode(served.send("view", right["view"]), ViewReply).outdated
    assert served.service.status().members == [1]
    for verb in ("snapshot", "seal", "applied"):
        with pytest.raises(NotReadyError, match="no values yet"):
            served.send(verb, right[verb])
    served.send("reload", right["reload"])
    served.send("reload", right["reload"])
    assert ["newest checkpoint" in why for why in served.ends] == [True]
    with pytest.raises(NotReadyError, match="is ending"):
        served.send("view", right["view"])


@pytest.mark.parametrize("verb", ["reload", "seal"])
def test_requests_of_an_older_master_are_rejected(served: Served, verb: str) -> None:
    view = msgspec.structs.replace(orders(PLAN.hash)["view"], master_generation=2)
    served.send("view", view)
    with pytest.raises(FencedError, match="deposed"):
        served.send(verb, orders(PLAN.hash)[verb])
    assert not served.ends
    assert decode(served.send("view", orders(PLAN.hash)["view"]), ViewReply).outdated


def test_a_master_deposed_in_etcd_cannot_reload_a_pserver(served: Served, declared: MemoryCoordinator) -> None:
    leader = ServerRecord(address="127.0.0.1:1", generation=2)
    declared.transact([], [Put(KEYS.master_address, encode(leader))])
    assert served.directory.wait_until(lambda d: d.master(), 5.0)
    with pytest.raises(FencedError, match="deposed"):
        served.send("reload", orders(PLAN.hash)["reload"])
    assert not served.ends
    served.send("reload", msgspec.structs.replace(orders(PLAN.hash)["reload"], master_generation=2))
    assert len(served.ends) == 1


def serve(served: Served, declared: MemoryCoordinator) -> None:
    """Give the model its first values."""
    served.send("view", orders(PLAN.hash)["view"])
    declared.transact([], [Put(KEYS.init_params, encode(ElectionRecord(trainer="t", done=True)))])
    entry = declared.get(KEYS.init_params)
    assert entry is not None
    shard = served.service.shard_for_init(PLAN.hash, entry.create_revision)
    assert shard is not None
    shard.initialize(entry.create_revision, Row(0, 0, memoryview(np.zeros(4, np.float32)).cast("B")))
    served.service.first_values_received(entry.create_revision)
    assert served.directory.wait_until(lambda d: d.entry(KEYS.init_params), 5.0)
    served.service.look()
    assert served.service.is_serving


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    raise NotReadyError("blocks are about to move")
    yield


@pytest.mark.parametrize("state", ["blocks are about to move", "rows of another pserver are being removed"])
def test_no_cut_begins_and_no_view_is_applied_while_blocks_move(
    served: Served, declared: MemoryCoordinator, state: str
) -> None:
    """The state that the other pserver has received would no longer match, and a file would have rows twice."""
    serve(served, declared)
    service, order = served.service, OrderNumber(1, 2, 1)
    shard, is_pinned = service.shard(PLAN.hash), "about to move" in state
    mover: Any = SimpleNamespace(
        is_discarding=not is_pinned,
        no_unit_is_pinned=pinned if is_pinned else contextlib.nullcontext,
        look=lambda: None,
        close=lambda: None,
    )
    service._mover = mover
    requests: dict[str, Callable[[], object]] = {
        "view": lambda: service.apply_view(orders_with("view", serial=2)),
        "snapshot": lambda: service.snapshot(orders_with("snapshot", order=order)),
        "cut": lambda: service.cut(CutRequest(order, None, plan_hash=PLAN.hash)),
        "copy": lambda: service.copies(PLAN.hash)[0]._begin(CopyTicket(plan_hash=PLAN.hash, standby=1), 1),
    }
    if not is_pinned:
        # Views and copies do not read rows that are being removed.
        del requests["view"], requests["copy"]
    for name, request in requests.items():
        with pytest.raises(NotReadyError, match=state):
            request()
        assert not shard.copying.under_way, name
    assert shard._protocol.view == (1, 1)
    mover.is_discarding, mover.no_unit_is_pinned = False, contextlib.nullcontext
    service._copies = None
    for request in requests.values():
        request()
    assert shard._protocol.view == ((1, 2) if is_pinned else (1, 1))


class _Span(SimpleNamespace):
    __hash__ = object.__hash__


def orders_with(verb: str, **fields: object) -> Any:
    return msgspec.structs.replace(orders(PLAN.hash)[verb], **fields)


def test_a_view_wakes_those_who_wait_for_its_rounds(served: Served, declared: MemoryCoordinator) -> None:
    """The members that have left no longer hold up a round."""
    serve(served, declared)
    shard = served.service.shard(PLAN.hash)
    before = shard.changes.count
    served.service.apply_view(orders_with("view", serial=2, members=[]))
    assert shard.changes.count > before


def test_a_pserver_has_one_feed_and_one_source_of_copies(served: Served, declared: MemoryCoordinator) -> None:
    """Two feeds would number changes differently, and two sources would each forget what the other has sent."""
    serve(served, declared)
    makers: list[Callable[[], object]] = [
        lambda: served.service.feed(PLAN.hash),
        lambda: served.service.copies(PLAN.hash)[0],
    ]
    for make in makers:
        with ThreadPoolExecutor(2) as executor:
            with served.service._lock:
                made = [executor.submit(make) for _ in range(2)]
                with pytest.raises(TimeoutError):
                    made[0].result(0.05)
            first, second = (each.result(20.0) for each in made)
        assert first is second
        assert first is make()
    assert served.service._snapshots is not None
    assert served.service._snapshots.feed is served.service.feed(PLAN.hash)


def test_a_checkpoint_that_was_ordered_before_the_drain_does_not_complete_it(
    served: Served, declared: MemoryCoordinator
) -> None:
    """Pushes that came after it would be lost with the process."""
    serve(served, declared)

    def progress(number: int) -> SnapshotReply:
        file = WrittenFile(
            name="f", size_bytes=1, hash="", blocks=1, lowest_version=0, highest_version=0, row_bytes=0, after=""
        )
        return SnapshotReply(OrderNumber(1, number, 1), "written", file=file)

    service, snapshots = served.service, SimpleNamespace(progress=progress(3))
    service._snapshots = snapshots  # type: ignore[assignment]
    service._life._facts = dataclasses.replace(service._life._facts, loadable=range(9))
    assert not service.is_drained
    service.drain()
    assert service._life.state is State.DRAINING
    assert not service.is_drained
    snapshots.progress = progress(4)
    assert service.is_drained


def test_a_service_that_ends_ends_everything_that_it_has_started() -> None:
    ended: list[str] = []
    work, is_closing = queue.SimpleQueue[object](), threading.Event()

    def of(name: str) -> Any:
        return SimpleNamespace(close=lambda: ended.append(name))

    builder = threading.Thread(target=work.get)
    builder.start()
    service: Any = SimpleNamespace(
        _is_closing=is_closing,
        _standby=of("standby"),
        _consumers=of("consumers"),
        _mover=of("mover"),
        _work=work,
        _builder=builder,
    )
    service.end_standby = lambda: PserverService.end_standby(service)
    PserverService.close(service)
    assert sorted(ended) == ["consumers", "mover", "standby"]
    assert is_closing.is_set()
    assert not builder.is_alive()
    service.end_standby()
    assert ended.count("standby") == 1, "a standby is ended once"


def restoring(found: Restored | Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[object]]:
    """Return the event after a search for checkpoints, and what the blocks have received."""

    def load(*_: object) -> Restored:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("flightedl.pserver.service.load_newest", load)
    received: list[object] = []
    service: Any = SimpleNamespace(
        _shard=SimpleNamespace(restored=received.append, size_bytes_total=1),
        _plan="plan",
        _storage="storage",
        _clock=SystemClock(),
        _turns=SimpleNamespace(turn=contextlib.nullcontext),
        _life=SimpleNamespace(index=0),
        _keys=KEYS,
        _specs=[],
        _said="",
    )
    wanted: Any = SimpleNamespace(loadable=None, rejected=())
    return PserverService._restore(service, wanted), received


def test_restored_blocks_know_the_batches_that_they_contain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the batches would be applied again."""
    applied = AppliedBatches((0,))
    skipped = (Skipped(5, "torn"),)
    assert restoring(Restored(3, applied, skipped), monkeypatch) == (life_values.Restored(3, skipped), [applied])
    nothing = life_values.NothingLoadable(skipped)
    assert restoring(Restored(None, None, skipped), monkeypatch) == (nothing, [])
    away = life_values.StoreUnreachable("away")
    assert restoring(UnavailableError("away"), monkeypatch) == (away, [])


def test_memory_that_is_no_longer_needed_is_freed_by_and_by() -> None:
    expired: list[str] = []
    service: Any = SimpleNamespace(_cuts=None, _feed=None)
    PserverService.expire(service)
    service._cuts = SimpleNamespace(expire=lambda: expired.append("cuts"))
    service._feed = SimpleNamespace(expire=lambda: expired.append("feed"))
    PserverService.expire(service)
    assert expired == ["cuts", "feed"]


@pytest.mark.parametrize("trouble", [None, UnavailableError("etcd is away"), OutcomeUnknownError("cut off")])
def test_the_standby_of_a_pserver_that_reloads_is_dismissed_first(
    served: Served, declared: MemoryCoordinator, trouble: Exception | None
) -> None:
    """Its copy has the values that the pserver is about to lose on purpose."""
    done: list[object] = []
    served.service._start_again = lambda _: done.append("reload")

    def dismiss(index: int) -> None:
        done.append(index)
        if trouble is not None:
            raise trouble

    served.service._peers = SimpleNamespace(read=lambda _: None, dismiss_standby=dismiss)  # type: ignore[assignment]
    declared.transact([], [Put(KEYS.standby(0), encode(ServerRecord(address="127.0.0.1:1")))])
    assert served.directory.wait_until(lambda d: d.standbys() or None, 5.0)
    served.send("reload", orders(PLAN.hash)["reload"])
    assert done == [0, "reload"]


def test_declared_rows_are_loaded_once_and_all_trainers_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going_on, loads = threading.Event(), threading.Event(), list[object]()

    def load(span: object, *_: object) -> None:
        loads.append(span)
        begun.set()
        assert going_on.wait(20.0)

    monkeypatch.setattr("flightedl.pserver.stores.first_rows.load_first_rows", load)
    service: Any = SimpleNamespace(
        _loading=threading.Lock(), _has_first_rows=False, _files=None, _clock=None, _fail=pytest.fail
    )
    span = _Span(begin_restore=lambda: loads.append("empty"))
    rows = SimpleNamespace(tables=[SimpleNamespace(first_rows="f.parquet")], spans={0: span})
    shard: Any = SimpleNamespace(rows=rows)
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(PserverService._load_first_rows, service, shard)
        assert begun.wait(20.0)
        second = executor.submit(PserverService._load_first_rows, service, shard)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        going_on.set()
        first.result(20.0)
        second.result(20.0)
    assert loads == ["empty", span]


def test_an_interrupted_push_ends_the_process(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.send("view", orders(PLAN.hash)["view"])
    shard = served.service.shard_for_init(PLAN.hash, 1)
    header = PushHeader(
        trainer="t",
        generation=1,
        plan_hash=PLAN.hash,
        member=1,
        identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=1),
        weight=1.0,
        rows=1,
    )
    rows = decode_batch(encode_rows([0], [0], [np.ones(4, np.float32)]))
    monkeypatch.setattr(Update, "__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shard.push_rows(header, rows)
    assert ["ZeroDivisionError" in why for why in served.ends] == [True]
    with pytest.raises(NotReadyError, match="is ending"):
        served.send("view", orders(PLAN.hash)["view"])


def test_a_resumed_job_waits_until_a_trainer_declares_the_model_again(
    declared: MemoryCoordinator,
) -> None:
    entry = declared.get(KEYS.job)
    assert entry is not None
    former = resuming.former(decode(entry.value, JobDeclaration))
    assert former.model is not None
    declared.transact([], [Put(KEYS.job, encode(former))])
    with Directory(declared, KEYS, SystemClock()) as directory:
        assert directory.wait_until(lambda d: d.entry(KEYS.job), 5.0)
        served = Served(directory)
        try:
            served.service.look()
            served.service.prepare()
            assert served.service._builder is None
            with pytest.raises(NotReadyError, match="has not read the model's declaration"):
                served.service.shard_for_init(PLAN.hash, 1)
            with pytest.raises(NotReadyError):
                served.send("view", orders(PLAN.hash)["view"])
            now = msgspec.structs.replace(former.model.declaration, optimizer=SGD(0.5).to_json())
            again = msgspec.structs.replace(former.model, declaration=now, is_former=False)
            written = encode(JobDeclaration(model=again))
            declared.transact([], [Put(KEYS.job, written)])
            assert directory.wait_until(
                lambda d: ((found := d.entry(KEYS.job)) and found.value == written) or None, 5.0
            )
            served.service.look()
            served.await_blocks(30.0)
            served.send("view", orders(PLAN.hash)["view"])
            shard = served.service.shard_for_init(PLAN.hash, 1)
            (span,) = set(shard.dense.spans.values())
            span.update(span.values, np.ones(4, np.float32), span.slots, 0, 0, 1.0, 1.0)
            assert span.values.tolist() == [-0.5] * 4
        finally:
            served.close()


def test_requests_before_the_declaration_are_answered_with_not_ready() -> None:
    coordinator = MemoryCoordinator(SystemClock())
    with Directory(coordinator, KEYS, SystemClock()) as directory:
        served = Served(directory)
        try:
            for verb, message in orders(PLAN.hash).items():
                with pytest.raises(NotReadyError, match="is waiting for the model"):
                    served.send(verb, message)
        finally:
            served.close()


def test_the_master_learns_which_checkpoints_could_not_be_loaded(served: Served) -> None:
    life = served.service._life
    life.state, life.checkpoint = State.SERVING, 3
    life.skipped = (Skipped(5, "torn"), Skipped(4, "c-4/shard is missing"))
    reply = decode(served.send("applied", AppliedRequest(plan_hash=PLAN.hash)), AppliedReply)
    assert (reply.checkpoint, reply.rejected) == (3, [5, 4])
    assert reply.skipped == ["checkpoint 5: torn", "checkpoint 4: c-4/shard is missing"]


def test_the_state_of_etcd_is_read_and_applied_under_one_lock(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thread could apply an older state after another thread has applied a newer one."""
    service = served.service
    facts, is_locked = service._facts, []

    def read() -> Facts:
        is_locked.append(service._lock.locked())
        return facts()

    monkeypatch.setattr(service, "_facts", read)
    service.look()
    assert is_locked == [True]


@pytest.mark.parametrize("answer", [True, False, UnavailableError("etcd is away")])
def test_a_checkpoint_is_chosen_only_after_catching_up_with_etcd(answer: bool | Exception) -> None:
    def catch_up(key: str, _timeout_s: float) -> bool:
        assert key == KEYS.checkpoint_latest
        if isinstance(answer, Exception):
            raise answer
        return answer

    service: Any = SimpleNamespace(_directory=SimpleNamespace(catch_up=catch_up), _keys=KEYS)
    assert PserverService._has_caught_up(service) is (answer is True)
