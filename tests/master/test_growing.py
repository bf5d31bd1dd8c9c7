"""Files join a running dataset: in the queue, in etcd, and for the next master."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import MasterSettings
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.events import LeasesSeen
from flightedl.domain.retries import Patience
from flightedl.errors import DataError, NotReadyError, UnavailableError, UsageError
from flightedl.master.declaring import Declaring
from flightedl.master.evaluations import EvaluationDatasets
from flightedl.master.growing import Growing
from flightedl.master.indexing import DatasetIndexing
from flightedl.master.recovery import read_state
from flightedl.master.state import JobState
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.messages.tasks import Assignment, EndGrowthRequest, FinishedTask, TasksTicket
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator, MemoryFiles, MemoryStorage

EVERY_S = 0.02
KEYS = JobKeys("demo")
SENDER = EndGrowthRequest(trainer="t", generation=1, job="demo")
DECLARED = DatasetDeclaration(urls=["/d/*.parquet"], batch_size=5, follow=True)


def parquet(*values: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"k": list(values)}), sink, row_group_size=10)
    return sink.getvalue()


class Master:
    """The parts of a master that handle its dataset."""

    def __init__(self, coordinator: MemoryCoordinator, files: MemoryFiles, storage: MemoryStorage | None) -> None:
        clock = SystemClock()
        self.coordinator = coordinator
        held = HeldKey.claim(coordinator, clock, KEYS.master_lock, b"", 20.0)
        assert held is not None
        self.held = held
        chosen = MasterSettings(etcd="memory:1", job="demo", follow_every_s=EVERY_S)
        evaluations = EvaluationDatasets(lambda: DatasetIndexing(files, clock), 3)
        self.state = JobState(
            chosen, 1, held.generation, coordinator, KEYS, clock, evaluations, keeps_checkpoints=False
        )
        indexing = DatasetIndexing(files, clock, storage, follow_every_s=EVERY_S)
        self.indexing = indexing
        self.reasons: list[str] = []
        self.growing = Growing(self.state, files, storage, EVERY_S, self.reasons.append)
        self.declaring = Declaring(self.state, self.growing, indexing)
        recovered = read_state(coordinator, KEYS)
        declared, dataset = recovered.stored.declaration.dataset, None
        if declared is not None:
            try:
                dataset = indexing.index_again(declared, recovered.arrivals)
            except DataError:
                held.release()
                raise
        self.state.recover(recovered.stored, dataset, len(recovered.arrivals))
        self.state.apply(LeasesSeen({"t": 1}, {}, 1))
        self.state.start_writing(held, recovered.known, lambda _: None)
        self.growing.begin()

    def close(self) -> None:
        self.indexing.close()
        self.growing.close()
        self.state.close()
        self.held.release()

    def _ask(self, **more: Any) -> Assignment | None:
        ticket = TasksTicket(trainer="t", generation=1, wait_s=0.0, **more)
        reply = self.state.ask(ticket)
        return reply.assignments[0] if reply.assignments else None

    def take(self) -> int | None:
        """Do a task durably; return its first record, or None if there is no task now."""
        given = self._ask(want=1)
        if given is None:
            return None
        done = FinishedTask(epoch=given.epoch, position=given.position, attempt=given.attempt, pservers=[])
        self._ask(finished=[done], want=0)
        dataset = self.state.dataset
        assert dataset is not None
        chunk = dataset.layout.chunks_of(given.task)[0]
        name = chunk.url.removeprefix("/d/").removesuffix(".parquet")
        return int(name) + chunk.first_record

    def take_all(self) -> list[int]:
        found = []
        while (first := self.take()) is not None:
            found.append(first)
        return found

    def has(self, url: str) -> bool:
        return url in self.files

    @property
    def files(self) -> list[str]:
        dataset = self.state.dataset
        return [] if dataset is None else [file[0] for each in dataset.arrivals for file in each.files]


Start = Callable[[], Master]


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles({"/d/100.parquet": parquet(*range(20))})


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def storage(request: pytest.FixtureRequest) -> MemoryStorage | None:
    return MemoryStorage() if request.param else None


@pytest.fixture
def start(files: MemoryFiles, storage: MemoryStorage | None) -> Iterator[Start]:
    coordinator = MemoryCoordinator(SystemClock())
    masters: list[Master] = []

    def begin() -> Master:
        for master in masters:
            master.close()
        masters.append(Master(coordinator.another(), files, storage))
        return masters[-1]

    before = set(threading.enumerate())
    yield begin
    for master in masters:
        master.close()
    eventually(lambda: not [t for t in threading.enumerate() if t not in before])


def declare(master: Master) -> None:
    def asked() -> bool:
        try:
            master.declaring.dataset(DECLARED)
        except NotReadyError:
            return False
        return True

    eventually(asked)


def test_files_join_in_the_order_of_their_arrival_also_after_a_takeover(start: Start, files: MemoryFiles) -> None:
    master = start()
    declare(master)
    assert master.take_all() == [100, 110]
    files.contents["/d/300.parquet"] = parquet(*range(10))
    eventually(lambda: len(master.files) == 2)
    files.contents["/d/200.parquet"] = parquet(*range(30))
    eventually(lambda: len(master.files) == 3)
    assert master.take() == 300
    second = start()
    assert second.files == ["/d/100.parquet", "/d/300.parquet", "/d/200.parquet"]
    assert second.take() == 200
    files.contents["/d/050.parquet"] = parquet(1)
    files.contents["/d/_END"] = b""
    eventually(lambda: second.state.core.work is not None and not second.state.core.work.queue.is_growing)
    third = start()
    assert third.take_all() == [210, 220, 50]
    assert third.state.core.work is not None
    assert third.state.core.work.queue.is_done
    assert third.growing._thread is None


def test_each_arrival_is_written_once(start: Start, files: MemoryFiles) -> None:
    master = start()
    declare(master)
    for number in (200, 300, 400):
        files.contents[f"/d/{number}.parquet"] = parquet(*range(10))
        eventually(partial(master.has, f"/d/{number}.parquet"))
        master.take()
    eventually(lambda: master.state.arrivals_saved == 4)
    assert master.state._snapshot()[1].keys() == {KEYS.job, KEYS.task_queues, KEYS.task_failures}
    entries = master.coordinator.list(KEYS.arrivals).entries
    assert [entry.key for entry in entries] == [KEYS.arrival(number) for number in range(4)]
    assert all(entry.mod_revision == entry.create_revision for entry in entries)


def test_it_waits_for_the_first_file(start: Start, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.master.indexing._QUICK_S", 0.1)
    first = files.contents.pop("/d/100.parquet")
    master = start()
    with pytest.raises(NotReadyError, match=r"the first file of /d/\*\.parquet"):
        master.declaring.dataset(DECLARED)
    files.contents["/d/100.parquet"] = first
    declare(master)
    assert master.take_all() == [100, 110]


def test_an_unusable_file_is_reported_and_joins_when_it_is_repaired(start: Start, files: MemoryFiles) -> None:
    master = start()
    declare(master)
    files.contents["/d/200.parquet"] = b"not yet"
    eventually(lambda: "200.parquet is corrupt" in master.state.dataset_alarm)
    assert "left out until it changes" in master.state.dataset_alarm
    files.contents["/d/200.parquet"] = parquet(*range(10))
    eventually(lambda: len(master.files) == 2)
    assert master.take_all() == [100, 110, 200]
    eventually(lambda: not master.state.dataset_alarm)


def test_a_removed_file_is_reported_and_the_next_master_refuses_unknown_ones(
    start: Start, files: MemoryFiles, storage: MemoryStorage | None
) -> None:
    master = start()
    declare(master)
    del files.contents["/d/100.parquet"]
    eventually(lambda: master.state.dataset_alarm == "/d/100.parquet is gone since it was taken into the dataset")
    if storage is not None:
        assert start().files == ["/d/100.parquet"]
    else:
        with pytest.raises(DataError, match=r"100\.parquet is gone since it joined the job's dataset: put it back"):
            start()


def test_a_user_declares_the_dataset_complete(start: Start, files: MemoryFiles) -> None:
    master = start()
    declare(master)
    files.contents["/d/200.parquet"] = parquet(*range(10))
    master.growing.end(SENDER)
    master.growing.end(SENDER)
    assert master.take_all() == [100, 110, 200]
    assert master.state.core.work is not None
    assert master.state.core.work.queue.is_done


def test_the_end_of_a_dataset_is_not_missed_while_files_are_looked_for(
    start: Start, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start()
    growing = master.growing
    look, looked = growing._look, threading.Event()

    def look_slowly(*arguments: Any) -> tuple[bool, bool]:
        found = look(*arguments)
        looked.set()
        # Declared after the files were listed.
        eventually(lambda: growing._is_declared_complete)
        return found

    monkeypatch.setattr(growing, "_look", look_slowly)
    declare(master)
    thread = growing._thread
    growing.begin()
    assert growing._thread is thread
    assert looked.wait(20.0)
    growing._every_s = 600.0
    growing.end(SENDER)
    assert master.take_all() == [100, 110]


def test_a_dataset_is_declared_complete_before_files_are_looked_for(start: Start) -> None:
    master = start()
    growing = master.growing
    growing._every_s = 600.0
    declare(master)
    declared: list[bool] = []

    class Wake(threading.Event):
        def set(self) -> None:
            declared.append(growing._is_declared_complete)
            super().set()

    former, growing._wake = growing._wake, Wake()
    former.set()
    with contextlib.suppress(NotReadyError):
        growing.end(SENDER)
    assert declared == [True]


def test_only_a_followed_dataset_can_end(start: Start) -> None:
    master = start()
    with pytest.raises(NotReadyError, match="no trainer has declared"):
        master.growing.end(SENDER)
    master.declaring.dataset(DatasetDeclaration(urls=["/d/*.parquet"], batch_size=5))
    with pytest.raises(UsageError, match="declared without follow=True"):
        master.growing.end(SENDER)


def test_a_listing_that_fails_is_reported_and_retried(start: Start, files: MemoryFiles) -> None:
    master = start()
    declare(master)
    files.plan.fail_from("expand", UnavailableError("the store does not answer"))
    eventually(
        lambda: "cannot look for new files now; retrying: the store does not answer" in master.state.dataset_alarm
    )
    assert master.take_all() == [100, 110]
    files.contents["/d/200.parquet"] = parquet(1)
    files.plan.heal("expand")
    eventually(lambda: len(master.files) == 2)
    eventually(lambda: not master.state.dataset_alarm)


@pytest.mark.parametrize("point", ["open", "file:read"])
def test_a_new_file_joins_although_the_store_failed_while_it_was_indexed(
    start: Start, files: MemoryFiles, point: str
) -> None:
    master = start()
    declare(master)
    files.plan.fail_from(point, ConnectionResetError(104, "Connection reset by peer"))
    files.contents["/d/200.parquet"] = parquet(*range(10))
    eventually(lambda: "Connection reset by peer: it is left out until" in master.state.dataset_alarm)
    files.contents["/d/_END"] = b""
    with pytest.raises(NotReadyError, match=r"being added: .*Connection reset by peer"):
        master.growing.end(SENDER)
    files.plan.heal(point)
    master.growing.end(SENDER)
    assert master.take_all() == [100, 110, 200]
    assert master.state.core.declaration.left_out == []


def test_the_next_master_knows_the_excluded_files_of_a_complete_dataset(
    start: Start, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flightedl.formats.following.PATIENT", Patience(limit_s=0.0))
    master = start()
    declare(master)
    files.contents["/d/200.parquet"] = b"not Parquet"
    files.contents["/d/300.parquet"] = parquet(*range(10))
    eventually(partial(master.has, "/d/300.parquet"))
    files.plan.fail_from("open", UnavailableError("/d/400.parquet cannot be read at the moment"))
    files.contents["/d/400.parquet"] = parquet(*range(10))
    master.growing.end(SENDER)
    assert master.take_all() == [100, 110, 300]
    files.plan.heal("open")
    for each in (master, start()):
        corrupt, unreadable = each.state.core.declaration.left_out
        assert "200.parquet is corrupt" in corrupt
        assert "400.parquet cannot be read at the moment" in unreadable


def test_a_master_that_cannot_look_for_files_because_of_a_bug_steps_down(start: Start, files: MemoryFiles) -> None:
    master = start()
    declare(master)
    files.plan.fail_at("expand", 1, MemoryError("no memory"))
    eventually(lambda: master.reasons == ["it cannot look for new files: MemoryError('no memory')"])


@pytest.mark.parametrize("point", ["stat", "open", "file:read"])
def test_a_successor_waits_for_a_store_that_fails_briefly(start: Start, files: MemoryFiles, point: str) -> None:
    master = start()
    declare(master)
    files.contents["/d/200.parquet"] = parquet(*range(10))
    eventually(partial(master.has, "/d/200.parquet"))
    master.close()
    files.plan.fail_at(point, 1, UnavailableError("Connection reset by peer"))
    files.plan.fail_at(point, 2, UnavailableError("Connection reset by peer"))
    assert start().take_all() == [100, 110, 200]
