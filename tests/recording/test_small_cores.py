"""Inputs that runs rarely contain, each recorded separately: end of the job, splits, election, snapshots, life."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.consistency.modes import Async
from flightedl.domain.exactly_once.batches import Batch as Identity
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.events import Answered, ManifestFailed
from flightedl.domain.master.state import CoreSettings
from flightedl.domain.pserver import life_values as happens
from flightedl.domain.pserver.block_values import Extent, Push, Pushed
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.trainer.acknowledged import Acknowledged, AcknowledgedLoop, Done
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.first_values import ElectionOfFirstValues
from flightedl.domain.trainer.readings import (
    REJECTION_LIMIT,
    BatchLoop,
    Finished,
    HandOut,
    NeedItem,
    ReadBatch,
    TaskEnd,
    Unreadable,
)
from flightedl.domain.trainer.steps import Steps, carried_out
from flightedl.errors import BegunAnewError, GradientError, NotReadyError, UnavailableError
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, ViewMember, ViewRequest
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration
from flightedl.messages.tasks import TasksReply
from flightedl.recording.reader import recordings_in
from flightedl.recording.recorded import recorded
from flightedl.recording.replay import Difference, replay
from flightedl.recording.values import assignment_of
from flightedl.recording.writer import SUFFIX, Recorder
from tests.simulation.bugs import CORE_BUGS
from tests.support.planting import planted

SECRET = "s3://private-bucket/models: AccessDenied (PutObject)"
Recorded = Callable[[str], Recorder]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorded:
    def make(process: str) -> Recorder:
        def write(line: bytes) -> None:
            with (tmp_path / f"1{SUFFIX}").open("ab") as file:
                file.write(line)

        return Recorder(process, "1", "demo", SystemClock(), write, is_strict=True)

    return make


def differences(directory: Path) -> list[Difference]:
    found = map(replay, recordings_in(directory))
    return [each.difference for each in found if each.difference is not None]


def answer(outcome: str, *pservers: int, is_ending: bool = False) -> TasksReply:
    return TasksReply(assignments=[], outcome=outcome, pservers=list(pservers), is_ending=is_ending)


class TestEndOfTheJob:
    @pytest.fixture
    def replied(self, recorder: Recorded) -> None:
        end = recorded(recorder("trainer"), {}, JobEnd)
        end.replied(answer("none_now"))
        assert end.may_read(0, 1)
        end.replied(answer("epochs_done", 3, 4))
        assert end.may_read(0, 3)
        assert not end.may_read(1, 9)
        with pytest.raises(NotReadyError):
            end.require(answer("none_now", is_ending=True), 1, 9)
        end.require(answer("epochs_done", 3, 9), 0, 3)
        with pytest.raises(BegunAnewError):
            end.require(answer("none_now"), 1, 9)

    @pytest.mark.usefixtures("replied")
    def test_the_core_replays_without_differences(self, tmp_path: Path) -> None:
        assert differences(tmp_path) == []

    @pytest.mark.usefixtures("replied")
    @pytest.mark.parametrize("method", ["replied", "require"])
    def test_a_replay_reveals_an_omitted_action(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        monkeypatch.setattr(JobEnd, method, lambda *_: None)
        assert [each.core for each in differences(tmp_path)] == ["end-1"]


class TestAcknowledgedBatches:
    @pytest.fixture
    def finished(self, recorder: Recorded) -> None:
        tasks = [AssignedTask(assignment_of(0, number, number, 2), number) for number in (1, 2)]
        loop = recorded(recorder("trainer"), {"trainer": "a"}, AcknowledgedLoop)
        batches = []
        for task in tasks:
            for number in range(2):
                step = loop.accept(ReadBatch.of(task, number), [1, 2])
                assert isinstance(step, HandOut)
                batches.append(step.batch)
            loop.accept(TaskEnd(task), [1, 2])
        assert loop.done(batches[1], [1, 2]) == Acknowledged(Done.COUNTED)
        assert loop.done(batches[0], [1, 2]) == Acknowledged(Done.COUNTED, Finished(tasks[0], []))
        loop.denied(batches[2], [2])
        assert loop.done(batches[3], []) == Acknowledged(Done.TAKEN)
        assert loop.next_step() == NeedItem()

    @pytest.mark.usefixtures("finished")
    def test_the_core_replays_without_differences(self, tmp_path: Path) -> None:
        assert differences(tmp_path) == []

    @pytest.mark.usefixtures("finished")
    def test_a_replay_reveals_an_omitted_action(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(AcknowledgedLoop, "done", lambda *_, **__: None)
        assert [each.core for each in differences(tmp_path)] == ["acknowledged-1"]


class TestARejectedGradient:
    @pytest.fixture
    def rejected(self, recorder: Recorded) -> None:
        task, made = AssignedTask(assignment_of(0, 1, 1, 2), 1), recorder("trainer")
        loop = recorded(made, {"trainer": "a"}, BatchLoop)
        steps = recorded(made, {"trainer": "a"}, Steps, [[0]], Async(push_every=2))
        step = loop.accept(ReadBatch.of(task, 0))
        for turn in range(REJECTION_LIMIT):
            assert isinstance(step, HandOut)
            assert step.is_again == (turn > 0)
            carried_out(steps, steps.open_batch(step.batch, 1, turn + 1), lambda _: None)
            steps.rejected(GradientError("it has NaN"))
            step = loop.next_step(carried_out(steps, steps.close_batch(), lambda _: None).batches)
        assert isinstance(step, Unreadable)

    @pytest.mark.usefixtures("rejected")
    def test_the_core_replays_without_differences(self, tmp_path: Path) -> None:
        assert differences(tmp_path) == []

    @pytest.mark.usefixtures("rejected")
    def test_a_replay_reveals_a_batch_that_is_not_undone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CurrentBatch, "reject", lambda *_: None)
        assert [each.core for each in differences(tmp_path)] == ["steps-1"]


def test_a_span_that_is_split_while_it_is_copied_replays_without_differences(
    tmp_path: Path, recorder: Recorded
) -> None:
    extents = [Extent(range(2, 4)), Extent(range(4, 5))]
    blocks = recorded(recorder("pserver"), {"pserver": 0, "generation": 7}, BlockProtocol, extents, Async())
    members = [ViewMember(trainer="a", generation=1, member=1, first_round=0)]
    blocks.apply_view(
        ViewRequest(plan_hash="p", master_generation=5, serial=1, members=members, mode=None, switch_round=0)
    )
    cut, _ = blocks.begin_cut(None)
    assert blocks.copy(cut, 3) is not None
    blocks.split(2, [range(2, 3), range(3, 4)])
    push = Push("a", 1, 1, [(Identity(0, 0, 0), 1)])
    assert blocks.prepare(2, push, 0, has_gradient=True).copies
    assert isinstance(blocks.push(2, push, 0, has_gradient=True), Pushed)
    assert blocks.copy(cut, 4) is not None
    blocks.end_cut(cut)
    blocks.set_task_counts([(0, 4)])
    assert differences(tmp_path) == []


def test_a_replay_reveals_that_an_old_order_is_carried_out(tmp_path: Path, recorder: Recorded) -> None:
    snapshots = recorded(recorder("pserver"), {}, PserverSnapshots)
    for number in (2, 1):
        order = SnapshotRequest(OrderNumber(1, number, number), None, "f", plan_hash="p")
        assert snapshots.take(order, [0, 0], 1) == (number == 2)
    assert differences(tmp_path) == []
    with planted([CORE_BUGS["old orders are new"]]):
        assert [each.core for each in differences(tmp_path)] == ["snapshots-1"]


class TestOmittedLocations:
    """Locations are omitted, which causes no difference in the replay."""

    def assert_left_out(self, directory: Path) -> None:
        assert differences(directory) == []
        (path,) = directory.iterdir()
        assert "private-bucket" not in path.read_text()
        assert "#" in path.read_text()

    def test_locations_of_a_snapshot_are_omitted(self, tmp_path: Path, recorder: Recorded) -> None:
        snapshots = recorded(recorder("pserver"), {}, PserverSnapshots)
        order = OrderNumber(1, 1, 1)
        assert snapshots.take(SnapshotRequest(order, None, "f", plan_hash="p"), [0, 0, 1], 1) is not None
        assert snapshots.taken(order)
        assert snapshots.failed(order, SECRET * 20)
        assert snapshots.progress is not None
        assert "private-bucket" in snapshots.progress.reason
        self.assert_left_out(tmp_path)

    def test_locations_of_an_election_are_omitted(self, tmp_path: Path, recorder: Recorded) -> None:
        election = recorded(recorder("trainer"), {}, ElectionOfFirstValues, "a", 1)
        election.next_step()
        election.failed(UnavailableError(SECRET))
        assert "private-bucket" in str(election.next_step())
        self.assert_left_out(tmp_path)

    def test_locations_of_a_pserver_are_omitted(self, tmp_path: Path, recorder: Recorded) -> None:
        life = recorded(recorder("pserver"), {}, PserverLife, "s3://private-bucket/c")
        declared = ModelDeclaration(parameters=[], optimizer={}, mode={})
        facts = happens.Facts(DeclaredModel(declaration=declared, pservers=1, plan_hash="p"), 5, range(1, 3))
        life.apply(happens.IndexAcquired(0, 7))
        life.apply(happens.Seen(facts))
        life.apply(happens.PlanMade("p"))
        life.apply(happens.BlocksMade(1))
        life.apply(happens.StoreUnreachable(SECRET))
        life.apply(happens.PauseOver())
        life.apply(happens.NothingLoadable((Skipped(2, SECRET),)))
        (effect,) = life.apply(happens.CaughtUp(facts))
        assert SECRET in str(effect)
        self.assert_left_out(tmp_path)

    def test_locations_of_a_master_are_omitted(self, tmp_path: Path, recorder: Recorded) -> None:
        settings = CoreSettings(generation=1, pserver_count=1, keeps_checkpoints=True)
        core = recorded(recorder("master"), {}, MasterCore, settings, 0.0)
        core.apply(ManifestFailed(1, SECRET), 0.0)
        order = SnapshotRequest(OrderNumber(1, 1, 1), None, "a", plan_hash="p")
        reply = SnapshotReply(OrderNumber(1, 1, 1), "failed", reason=SECRET)
        core.apply(Answered(0, 7, order, reply), 0.0)
        self.assert_left_out(tmp_path)
