"""A pserver restored from an older state: reports that count, and reopened tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.queue.tasks import EpochsDone, QueueSettings, TaskGiven, TaskQueue
from flightedl.domain.recovery.replay import AppliedSummary, PserverRecovery, Reload, tasks_to_reopen
from flightedl.errors import CorruptError
from tests.domain.bitmaps import tasks_in

NOTHING = AppliedSummary()


def with_tasks(tasks, blocks=2) -> AppliedBatches:
    applied = AppliedBatches(range(blocks))
    for epoch, task in tasks:
        applied.mark(range(blocks), Batch(epoch, task, 0), 1)
    return applied


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 40))), st.integers(0, 4), st.integers(1, 41))
def test_all_tasks_that_are_not_applied_are_missing(tasks, begun, size):
    applied = with_tasks({(e, t) for e, t in tasks if t < size})
    if tasks:
        applied.set_task_count(0, size)
    summary = AppliedSummary.decode(AppliedSummary.of(applied).encode())
    lacking = tasks_to_reopen(summary, begun, lambda _: size)
    found = {(epoch, task) for epoch, runs in lacking.items() for start, end in runs for task in range(start, end)}
    assert found == {(e, t) for e in range(begun) for t in range(size) if (e, t) not in tasks}
    assert all(lacking.values())


def test_complete_epochs_take_a_few_bytes():
    applied = AppliedBatches(range(1))
    for epoch in range(500):
        applied.mark([0], Batch(epoch, 0, 0), 1)
        applied.set_task_count(epoch, 1)
    summary = AppliedSummary.of(applied)
    assert summary.through == [(0, 500, 1)]
    assert len(summary.encode()) < 20
    assert tasks_to_reopen(summary, 501, lambda _: 1).keys() == {500}


def test_tasks_that_joined_an_epoch_after_its_count_was_set_are_missing():
    applied = with_tasks([(0, 0), (0, 1)])
    applied.set_task_count(0, 2)
    lacking = tasks_to_reopen(AppliedSummary.of(applied), 1, lambda _: 4)
    assert list(lacking[0]) == [(2, 4)]


def test_a_pserver_without_blocks_lacks_nothing():
    assert tasks_to_reopen(AppliedSummary.of(AppliedBatches(range(0))), 3, lambda _: 9) == {}


def test_a_million_tasks_are_compared_quickly():
    applied = AppliedSummary(done={0: b"\xff" * 125_000})
    assert tasks_to_reopen(applied, 1, lambda _: 1_000_000) == {}


def settled(*generations, recovery="replay") -> PserverRecovery:
    recovery = PserverRecovery(len(generations), recovery)
    for index, generation in enumerate(generations):
        recovery.announced(index, generation, NOTHING, 0, lambda _: 0, 1)
    return recovery


def test_reports_of_a_past_generation_do_not_count():
    recovery = settled(5, 6)
    assert recovery.accepts([5, 6])
    assert not recovery.accepts([5])
    assert not recovery.accepts([])
    assert recovery.accepts([5, 9]), "it will announce its applied batches"
    recovery.seen(1, 9)
    assert not recovery.accepts([5, 6])
    assert recovery.accepts([5, 9])


def test_all_is_settled_only_when_every_pserver_has_announced():
    recovery = settled(5, 6)
    assert recovery.is_all_settled
    recovery.seen(1, 9)
    assert not recovery.is_all_settled
    assert recovery.announced(1, 9, NOTHING, 1, lambda _: 3) is not None
    assert recovery.is_all_settled
    assert recovery.announced(1, 9, NOTHING, 1, lambda _: 3) is None, "announced twice"
    assert recovery.announced(1, 6, NOTHING, 1, lambda _: 3) is None, "from a process that is gone"


def test_a_new_master_repeats_questions_whose_answers_were_not_stored():
    stored = settled(5, 6).encode()
    recovery = PserverRecovery.restore(stored, 2)
    recovery.check()
    assert recovery.is_all_settled
    assert not recovery.accepts([4, 6])
    recovery.seen(0, 8)
    assert not recovery.is_all_settled
    with pytest.raises(CorruptError):
        PserverRecovery.restore(b"", 2)


def test_a_pserver_with_an_impossible_index_is_unknown():
    recovery = settled(5, 6)
    for index in (-1, 2):
        recovery.seen(index, 9)
        assert recovery.generation_of(index) is None
    assert PserverRecovery.restore(settled(5, 6, 7).encode(), 2).settled() == {0: 5, 1: 6}


def test_done_tasks_are_applied_after_an_announcement_in_any_state_of_the_queue():
    """The claim of ``checkpoints``: any queue and any applied sets end in done ⊆ applied, and in completion."""
    settings = QueueSettings(
        task_count=6, batch_counts=lambda _: 1, epochs=2, seed=3, shuffle=True, is_deduplicated=False
    )
    states = [TaskQueue(settings).encode()]
    queue = TaskQueue(settings)
    while isinstance(given_ := queue.request("t", 0.0), TaskGiven):
        a = given_.assignment
        states.append(queue.encode())
        queue.finish("t", a.epoch, a.position, a.attempt, 1.0)
        states.append(queue.encode())
    for state in states:
        for had in ([], [(0, 1), (0, 4)], [(0, t) for t in range(6)] + [(1, 2)]):
            applied = with_tasks(had)
            restored = TaskQueue.decode(state, settings)
            for trainer in restored.holders():
                restored.trainer_departed(trainer, 0.0, is_graceful=True)
            begun = restored.begun_epochs
            for epoch, tasks in tasks_to_reopen(AppliedSummary.of(applied), begun, restored.epoch_size).items():
                restored.reopen(epoch, tasks)
            for epoch in range(begun):
                for task in range(6):
                    if restored.batches(epoch, task).done:
                        assert (epoch, task) in had
            while isinstance(given_ := restored.request("t", 0.0), TaskGiven):
                a = given_.assignment
                applied.mark(range(2), Batch(a.epoch, a.task, 0), 1)
                restored.finish("t", a.epoch, a.position, a.attempt, 1.0)
            assert isinstance(given_, EpochsDone)
            assert tasks_in(applied.done_bitmap(0)) == tasks_in(applied.done_bitmap(1)) == list(range(6))


def test_rollback_restores_the_other_pservers_from_the_same_checkpoint():
    recovery = settled(5, 6, 7, recovery="rollback")
    assert recovery.is_all_settled
    recovery.announced(1, 20, NOTHING, 1, lambda _: 3, 4)
    assert recovery.to_reload() == {0: Reload(5, 4), 2: Reload(7, 4)}
    assert not recovery.is_all_settled
    again = PserverRecovery.restore(recovery.encode(), 3, "rollback")
    assert again.to_reload() == recovery.to_reload(), "a new master continues it"
    recovery.announced(0, 21, NOTHING, 1, lambda _: 3, 4)
    recovery.announced(2, 22, NOTHING, 1, lambda _: 3, 4)
    assert recovery.is_all_settled


def test_a_second_loss_during_a_rollback_starts_it_again():
    recovery = settled(5, 6, 7, recovery="rollback")
    recovery.announced(1, 20, NOTHING, 1, lambda _: 3, 4)
    recovery.announced(0, 21, NOTHING, 1, lambda _: 3, 4)
    recovery.announced(0, 23, NOTHING, 1, lambda _: 3, 4)
    assert recovery.to_reload() == {1: Reload(20, 4), 2: Reload(7, 4)}
    recovery.announced(2, 25, NOTHING, 1, lambda _: 3, 5)
    assert recovery.to_reload() == {0: Reload(23, 5), 1: Reload(20, 5)}, (
        "it loaded another checkpoint: all return to that one"
    )


def test_the_pserver_that_started_a_rollback_may_be_lost_again():
    recovery = settled(5, 6, recovery="rollback")
    recovery.announced(1, 20, NOTHING, 1, lambda _: 3, 4)
    recovery.announced(0, 21, NOTHING, 1, lambda _: 3, 4)
    recovery.announced(1, 22, NOTHING, 1, lambda _: 3, 4)
    assert recovery.to_reload() == {0: Reload(21, 4)}, "it may have trained in the meantime"


def test_a_restarted_pserver_without_blocks_causes_no_rollback():
    recovery, empty = settled(5, 6, 7, recovery="rollback"), AppliedSummary(has_blocks=False)
    recovery.announced(2, 20, empty, 1, lambda _: 3, None)
    assert recovery.is_all_settled
    recovery.announced(1, 21, NOTHING, 1, lambda _: 3, 4)
    assert recovery.to_reload() == {0: Reload(5, 4), 2: Reload(20, 4)}
    recovery.announced(0, 22, NOTHING, 1, lambda _: 3, 4)
    recovery.announced(2, 23, empty, 1, lambda _: 3, None)
    assert recovery.is_all_settled


def test_replay_restarts_no_other_pserver():
    recovery = settled(5, 6)
    recovery.announced(1, 20, NOTHING, 1, lambda _: 3, 4)
    assert recovery.to_reload() == {}
