"""The account of a recorded run: batches that every block counted once, and each kind of error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.effects import Answer, Effect, Kind, Note
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.pserver.block_values import Extent, Joined, Push, ReleasedBlocks, Split
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.pserver.life_values import IndexAcquired
from flightedl.domain.queue.storage import VERSION
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedPiece, QueueSettings
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import BatchLoop, ReadBatch
from flightedl.domain.trainer.steps import Steps
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.tasks import FinishedTask, StopRecord, StopRequest, TasksReply, TasksTicket
from flightedl.recording.account import Account, account
from flightedl.recording.reader import recordings_in
from flightedl.recording.recorded import recorded
from flightedl.recording.values import assignment_of
from flightedl.recording.writer import SUFFIX, Recorder

#: Two epochs of two tasks; the second task has one batch.
COUNTS = (2, 1)
ALL = [Batch(epoch, task, number) for epoch in range(2) for task, count in enumerate(COUNTS) for number in range(count)]


class Clock:
    """A clock that a test sets. Clocks of processes on different machines start at different times."""

    def __init__(self, wall_s: float, ahead_s: float) -> None:
        self.wall_s = wall_s
        self._ahead_s = ahead_s

    def now(self) -> float:
        return self.wall_s + self._ahead_s

    def wall_time(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


class Run:
    """Recorded processes, each with its own clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clocks: list[Clock] = []
        self.wall_s = 100.0

    def recorder(self, process: str) -> Recorder:
        clock = Clock(self.wall_s, ahead_s=10.0 * len(self.clocks))
        self.clocks.append(clock)
        path = self.directory / f"{process}-{len(self.clocks)}{SUFFIX}"
        path.touch()

        def write(line: bytes) -> None:
            with path.open("ab") as file:
                file.write(line)

        return Recorder(process, "1", "demo", clock, write, is_strict=True)

    def at(self, wall_s: float) -> None:
        self.wall_s = wall_s
        for clock in self.clocks:
            clock.wall_s = wall_s


class Job:
    """Recorded processes of a small job."""

    def __init__(self, directory: Path, *, follow: bool = False) -> None:
        self.run = Run(directory)
        self.master = self.new_master(follow=follow)

    def new_master(self, *, follow: bool = False, **stored: Any) -> MasterCore:
        settings = CoreSettings(generation=5, pserver_count=1, keeps_checkpoints=False)
        tasks = QueueSettings(2, lambda task: COUNTS[task], epochs=2, follow=follow)
        recorder = self.run.recorder("master")
        return recorded(recorder, {}, MasterCore, settings, self.run.clocks[-1].now(), StoredState(**stored), tasks)

    def later(self) -> None:
        self.run.at(self.run.wall_s + 1.0)

    def done(self) -> None:
        """Let a master reach the end of the job."""
        self.later()
        master = self.new_master()
        now = self.run.clocks[-1].now()
        master.apply(events.LeasesSeen({"a": 1}, {}, 1), now)
        finished: list[FinishedTask] = []
        effects: Sequence[Effect] = ()
        for call in range(5):
            ticket = TasksTicket(trainer="a", generation=1, wait_s=0.0, want=1, finished=finished)
            effects = master.apply(events.Asked(call, ticket), now)
            (reply,) = (each.reply for each in effects if isinstance(each, Answer))
            assert isinstance(reply, TasksReply)
            finished = [
                FinishedTask(epoch=given.epoch, position=given.position, attempt=given.attempt)
                for given in reply.assignments
            ]
        assert Kind.JOB_DONE in [each.kind for each in effects if isinstance(each, Note)]

    def pserver(self, mode: Mode, *extents: range, applied: AppliedBatches | None = None) -> BlockProtocol:
        self.later()
        spans = [Extent(blocks, is_copied_at_once=len(blocks) > 1) for blocks in extents]
        about = {"pserver": 0, "generation": int(self.run.wall_s)}
        protocol = recorded(self.run.recorder("pserver"), about, BlockProtocol, spans, mode)
        if applied is not None:
            protocol.restore(applied, {number: (1, 1) for blocks in extents for number in blocks})
        members = [ViewMember(trainer=name, generation=1, member=m, first_round=0) for m, name in ((1, "a"), (2, "b"))]
        members = members[: 2 if isinstance(mode, Sync) else 1]
        protocol.apply_view(
            ViewRequest(plan_hash="p", master_generation=5, serial=1, members=members, mode=None, switch_round=0)
        )
        return protocol

    def trainer(self, *given: Batch) -> Steps:
        """A recorded trainer "a" whose loop received these batches."""
        recorder, about = self.run.recorder("trainer"), {"trainer": "a"}
        steps = recorded(recorder, about, Steps, [[2, 3]], Async(), [range(4, 4)])
        loop = recorded(recorder, about, BatchLoop)
        for number, batch in enumerate(given, 1):
            task = AssignedTask(assignment_of(batch.epoch, batch.task, number, COUNTS[batch.task]), number)
            loop.accept(ReadBatch.of(task, batch.batch))
        return steps

    def account(self) -> Account:
        return account(recordings_in(self.run.directory))


def push(protocol: BlockProtocol, batches: Sequence[Batch], member: int = 1, base: int = 0) -> None:
    for batch in batches:
        pushed = Push("ab"[member - 1], 1, member, [(batch, COUNTS[batch.task])])
        for span in list(protocol.spans):
            result = protocol.push(span.numbers.start, pushed, base, has_gradient=True)
            if isinstance(result, Split):
                for part in result.into:
                    protocol.push(part.start, pushed, base, has_gradient=True)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks forget which batches they have."""
    monkeypatch.setattr(AppliedBatches, "mark_together", lambda _self, _blocks, batches: [0] * len(batches))


def test_a_run_in_which_every_block_counts_every_batch_is_exact(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 3), range(3, 4))
    push(protocol, ALL)
    push(protocol, ALL)  # repetitions, which do not count
    found = job.account()
    assert found.is_exact
    assert (found.expected, found.blocks, found.findings) == (6, 2, {})


def test_a_batch_that_one_block_lacks_is_lost(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 3), range(3, 4))
    push(protocol, ALL[:-1])
    protocol.push(2, Push("a", 1, 1, [(ALL[-1], 1)]), 0, has_gradient=True)
    found = job.account()
    assert (found.lost, found.double, found.is_exact) == (1, 0, False)
    assert found.findings == {"lost": "1 batch not counted by every block (2/1/0)"}


@pytest.mark.usefixtures("forgetful")
def test_a_batch_in_two_updates_is_double(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 3))
    push(protocol, [*ALL, ALL[2]])
    assert job.account().findings == {"double": "1 batch counted twice (1/1/0)"}


def test_a_gradient_that_waits_in_a_round_is_lost(job: Job) -> None:
    protocol = job.pserver(Sync(), range(2, 3))
    for first, second in zip(ALL[::2], ALL[1::2], strict=True):
        base = protocol.version(2)
        push(protocol, [first], 1, base)
        if second is not ALL[-1]:
            push(protocol, [second], 2, base)
    assert job.account().findings == {"lost": "2 batches not counted by every block (2/0/1, 2/1/0)"}


def test_batches_of_a_checkpoint_count_for_the_successor(job: Job) -> None:
    first = job.pserver(Async(), range(2, 3))
    push(first, ALL[:4])
    second = job.pserver(Async(), range(2, 3), applied=first.applied())
    push(second, ALL)
    assert job.account().is_exact


def test_a_batch_that_the_checkpoint_contained_is_double_if_it_counts_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job.pserver(Async(), range(2, 3))
    push(first, ALL[:4])
    second = job.pserver(Async(), range(2, 3), applied=first.applied())
    monkeypatch.setattr(AppliedBatches, "mark_together", lambda _self, _blocks, batches: [0] * len(batches))
    push(second, ALL[3:])
    assert job.account().findings == {"double": "1 batch counted twice (2/0/0)"}


def test_work_that_a_dead_pserver_took_with_it_is_lost(job: Job) -> None:
    first = job.pserver(Async(), range(2, 3))
    push(first, ALL)
    job.pserver(Async(), range(2, 3), applied=AppliedBatches([2]))
    assert job.account().lost == len(ALL)


def test_a_process_that_begins_after_the_end_of_the_job_decides_nothing(job: Job) -> None:
    first = job.pserver(Async(), range(2, 3), range(3, 4))
    push(first, ALL)
    job.done()
    job.pserver(Async(), range(2, 4))
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 2)


def test_a_process_that_begins_before_the_last_end_decides(job: Job) -> None:
    """After the job was done, work was lost and was not repeated."""
    push(job.pserver(Async(), range(2, 3)), ALL)
    job.done()
    job.pserver(Async(), range(2, 3))
    job.done()
    assert job.account().lost == len(ALL)


def test_blocks_that_move_after_the_end_keep_their_batches(job: Job) -> None:
    first = job.pserver(Async(), range(2, 3))
    second = job.pserver(Async(), range(4, 5))
    for protocol in (first, second):
        push(protocol, ALL)
    job.done()
    first.state_of(range(2, 3))
    released = first.release(range(2, 3))
    assert isinstance(released, ReleasedBlocks)
    job.later()
    assert second.adopt(released) is None
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 2)


def test_spans_are_followed_through_splits_and_joins(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 6))
    push(protocol, ALL[:2])
    protocol.split(2, [range(2, 3), range(3, 6)])
    push(protocol, ALL[2:3])
    joined = protocol.join(3, 2)
    assert isinstance(joined, Joined)
    push(protocol, ALL[3:])
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 4)


def test_a_growing_dataset_expects_what_any_block_counted(tmp_path: Path) -> None:
    """Its first epoch may have had fewer tasks than its last one."""
    job = Job(tmp_path, follow=True)
    protocol = job.pserver(Async(), range(2, 3), range(3, 4))
    push(protocol, ALL[:2])
    push(protocol, ALL[3:])
    assert job.account().is_exact
    protocol.push(2, Push("a", 1, 1, [(ALL[2], 1)]), 0, has_gradient=True)
    assert job.account().lost == 1


def test_blocks_take_their_batches_to_another_pserver(job: Job) -> None:
    first = job.pserver(Async(), range(2, 3), range(3, 4))
    second = job.pserver(Async(), range(4, 5))
    for protocol in (first, second):
        push(protocol, ALL[:3])
    first.state_of(range(3, 4))  # which removes nothing
    released = first.release(range(3, 4))
    assert isinstance(released, ReleasedBlocks)
    assert second.adopt(released) is None
    for protocol in (first, second):
        push(protocol, ALL)
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 3)


def test_a_job_with_growing_data_expects_what_its_last_pserver_has_restored(tmp_path: Path) -> None:
    job = Job(tmp_path, follow=True)
    first = job.pserver(Async(), range(2, 3))
    push(first, ALL)
    job.pserver(Async(), range(2, 3), applied=first.applied())
    found = job.account()
    assert (found.is_exact, found.expected) == (True, len(ALL))


def test_blocks_of_a_standby_count_once_it_has_taken_over(job: Job) -> None:
    push(job.pserver(Async(), range(2, 3)), ALL)
    job.later()
    recorder = job.run.recorder("pserver")
    life = recorded(recorder, {}, PserverLife, None)
    recorded(recorder, {}, BlockProtocol, [Extent(range(2, 3), is_copied_at_once=False)], Async())
    assert job.account().is_exact

    life.apply(IndexAcquired(0, 9))
    assert job.account().lost == len(ALL)


def test_an_unfinished_copy_of_a_standby_counts_no_more_once_it_was_given_up(job: Job) -> None:
    """It may have blocks that have moved to other pservers since."""
    other = job.pserver(Async(), range(3, 4))
    push(other, ALL)
    job.later()
    recorder = job.run.recorder("pserver")
    life = recorded(recorder, {}, PserverLife, None)
    recorded(recorder, {}, BlockProtocol, [Extent(range(2, 4), is_copied_at_once=False)], Async())
    life.apply(IndexAcquired(0, 9))
    job.later()
    restored = recorded(recorder, {}, BlockProtocol, [Extent(range(2, 3), is_copied_at_once=False)], Async())
    restored.apply_view(
        ViewRequest(
            plan_hash="p",
            master_generation=5,
            serial=1,
            members=[ViewMember(trainer="a", generation=1, member=1, first_round=0)],
            mode=None,
            switch_round=0,
        )
    )
    push(restored, ALL)
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 2)


def test_adopted_blocks_that_join_others_keep_their_batches(job: Job) -> None:
    first = job.pserver(Async(), range(2, 4))
    second = job.pserver(Async(), range(4, 6))
    for protocol in (first, second):
        push(protocol, ALL)
    first.state_of(range(2, 4))
    released = first.release(range(2, 4))
    assert isinstance(released, ReleasedBlocks)
    job.later()
    assert second.adopt(released) is None
    assert isinstance(second.join(4, 9), Joined)
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 4)


def test_joined_blocks_keep_what_each_of_them_has_restored(job: Job) -> None:
    applied = AppliedBatches(range(2, 6))
    for blocks, batch in ((range(2, 4), ALL[0]), (range(4, 6), ALL[1])):
        applied.mark(blocks, batch, COUNTS[batch.task])
    protocol = job.pserver(Async(), range(2, 4), range(4, 6), applied=applied)
    push(protocol, ALL[:3])
    assert isinstance(protocol.join(4, 1), Joined)
    push(protocol, ALL[3:5])
    found = job.account()
    assert found.findings == {"lost": "1 batch not counted by every block (2/1/0)"}
    push(protocol, ALL)
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 4)


def test_joined_blocks_belong_to_their_process_since_it_adopted_them(job: Job) -> None:
    """A process that has died with them had begun later than the one that has adopted them since."""
    first = job.pserver(Async(), range(2, 4))
    job.pserver(Async(), range(4, 6))
    second = job.pserver(Async(), range(4, 6))
    for protocol in (first, second):
        push(protocol, ALL)
    released = second.release(range(4, 6))
    assert isinstance(released, ReleasedBlocks)
    job.later()
    assert first.adopt(released) is None
    assert isinstance(first.join(4, 9), Joined)
    found = job.account()
    assert (found.is_exact, found.blocks) == (True, 4)


def test_the_process_that_received_a_block_last_decides(job: Job, tmp_path: Path) -> None:
    """The killed process's recording may lack the release of the block."""
    second = job.pserver(Async(), range(4, 5))
    push(second, ALL)
    first = job.pserver(Async(), range(2, 3), range(3, 4))
    push(first, ALL[:3])
    (file,) = tmp_path.glob("pserver-3*")
    kept = file.read_bytes()
    released = first.release(range(3, 4))
    assert isinstance(released, ReleasedBlocks)
    file.write_bytes(kept)
    job.later()
    assert second.adopt(released) is None
    third = job.pserver(Async(), range(2, 3))
    for protocol in (second, third):
        push(protocol, ALL)
    assert job.account().is_exact


def test_a_batch_that_the_dataset_does_not_have_is_foreign(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 3))
    push(protocol, [*ALL, Batch(7, 0, 1)])
    assert job.account().findings == {"foreign": "1 batch counted that the dataset does not have (8/0/1)"}


def test_a_batch_that_its_trainer_had_not_received_is_stray(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 3))
    steps = job.trainer(*ALL[:3])
    push(protocol, ALL)
    job.later()
    steps.refresh(1)  # the recording covers the time of the pushes
    assert job.account().stray == len(ALL)


def test_the_end_of_a_killed_trainers_recording_may_be_missing(job: Job) -> None:
    job.trainer(ALL[0])
    protocol = job.pserver(Async(), range(2, 3))
    push(protocol, ALL)
    found = job.account()
    assert (found.stray, found.computed) == (0, 1)


def test_a_stopped_job_expects_what_any_block_counted(job: Job) -> None:
    protocol = job.pserver(Async(), range(2, 3), range(3, 4))
    job.master.apply(events.Asked(1, StopRequest(trainer="a", generation=1, reason="enough")), job.run.wall_s)
    push(protocol, ALL[:2])
    assert job.account().is_exact
    protocol.push(2, Push("a", 1, 1, [(ALL[2], 1)]), 0, has_gradient=True)
    assert job.account().lost == 1


def test_the_recording_of_a_killed_master_may_lack_a_stop(job: Job) -> None:
    push(job.pserver(Async(), range(2, 3)), ALL[:2])
    assert not job.account().is_exact
    job.new_master(stop=StopRecord())
    assert job.account().is_exact


def test_the_recording_of_a_killed_master_may_lack_a_quarantined_batch(job: Job) -> None:
    push(job.pserver(Async(), range(2, 3)), ALL[:-1])
    assert job.account().lost == 1
    (epoch, task, batch), queue = ALL[-1], TaskQueue(QueueSettings(2, lambda task: COUNTS[task], epochs=2))
    piece = FailedPiece(epoch, 1, task, batch, batch + 1, 5, "a", "it failed")
    failures = {"version": VERSION, "serial": 0, "details": [asdict(piece)]}
    job.new_master(queue=queue.encode_parts()[0], failures=msgspec.json.encode(failures))
    assert job.account().is_exact
