"""The task queue: given these events, expect exactly these answers. Every test ends with a check of all invariants."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.permutation import KeyedPermutation, key_of
from flightedl.domain.queue.reopening import with_gaps_filled
from flightedl.domain.queue.storage import is_over
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import (
    AlreadyDone,
    EpochFinished,
    EpochsDone,
    Expired,
    FailedSelector,
    Finished,
    NoTaskNow,
    Quarantined,
    QueueSettings,
    TaskGiven,
)
from flightedl.errors import CorruptError, FencedError, JobFailedError, NotFoundError, UsageError


def four(_task):
    return 4


@pytest.fixture
def make():
    queues = []

    def queue(task_count=3, *, batch_counts=four, **settings):
        queues.append(TaskQueue(QueueSettings(task_count=task_count, batch_counts=batch_counts, **settings)))
        return queues[-1]

    yield queue
    for each in queues:
        each.check()


def take(queue, trainer="a", now=0.0, **more):
    answer = queue.request(trainer, now, **more)
    assert isinstance(answer, TaskGiven), answer
    return answer.assignment


def finish(queue, assignment, trainer="a", now=0.0):
    return queue.finish(trainer, assignment.epoch, assignment.position, assignment.attempt, now)


def fail(queue, assignment, trainer="a", now=0.0, error="broken", batch=None):
    where = (assignment.epoch, assignment.position, assignment.attempt)
    return queue.fail(trainer, *where, now, error=error, batch=batch)


def give_back(queue, assignment, trainer="a", now=0.0):
    return queue.give_back(trainer, assignment.epoch, assignment.position, assignment.attempt, now)


def run(queue, trainer="a", now=0.0, count=10**9):
    """Let one trainer do up to ``count`` pieces; return (epoch, task, first batch, end batch) of them."""
    done = []
    while len(done) < count and isinstance(answer := queue.request(trainer, now), TaskGiven):
        finish(queue, answer.assignment, trainer, now)
        given = answer.assignment
        done.append((given.epoch, given.task, given.first_batch, given.end_batch))
    return done


def stretch(assignment):
    return assignment.first_batch, assignment.end_batch


# --- registrations ---


def test_another_registration_of_a_name_does_not_hold_its_tasks(make):
    queue = make(3)
    held = take(queue, generation=5)
    where = (held.epoch, held.position, held.attempt)
    for event in (queue.finish, queue.give_back):
        with pytest.raises(FencedError, match=r"trainer . does not hold attempt"):
            event("a", *where, 0.0, generation=6)
    with pytest.raises(FencedError, match=r"trainer . does not hold attempt"):
        queue.fail("a", *where, 0.0, error="broken", generation=6)
    with pytest.raises(FencedError, match="generation 5 of trainer a"):
        queue.request("a", 0.0, generation=6)
    assert queue.is_current("a", held.attempt, 5)
    assert not queue.is_current("a", held.attempt, 6)
    queue.trainer_departed("a", 0.0)
    again = take(queue, generation=6)
    assert (again.position, again.attempt) == (held.position, held.attempt + 1)


def test_the_registration_that_holds_tasks_is_stored(make):
    queue = make(3)
    held = take(queue, generation=5)
    take(queue, "b", generation=9)
    restored = TaskQueue.decode(queue.encode(), queue.settings)
    assert restored.registrations() == {"a": 5, "b": 9}
    with pytest.raises(FencedError):
        restored.finish("a", held.epoch, held.position, held.attempt, 0.0, generation=6)
    assert isinstance(restored.finish("a", held.epoch, held.position, held.attempt, 0.0, generation=5), Finished)


# --- the usual way ---


def test_every_task_of_every_epoch_is_assigned_once(make):
    queue = make(3, epochs=2)

    assert run(queue) == [(epoch, task, 0, 4) for epoch in range(2) for task in range(3)]

    assert queue.request("a", 0.0) == EpochsDone()
    assert queue.is_done
    counts = queue.counts()
    assert (counts.epoch, counts.todo, counts.pending, counts.done, counts.failed, counts.total) == (1, 0, 0, 3, 0, 3)


def test_shuffled_epochs_follow_the_keyed_permutation(make):
    queue = make(50, epochs=2, shuffle=True, seed=9)

    tasks = [task for _, task, _, _ in run(queue)]

    for epoch in range(2):
        permutation = KeyedPermutation(50, key_of(9, epoch))
        assert tasks[50 * epoch : 50 * epoch + 50] == [permutation.at(position) for position in range(50)]


def test_an_epoch_begins_when_the_previous_one_is_done(make):
    queue = make(2, epochs=2)
    begun = [queue.begun_epochs]
    for _ in range(4):
        run(queue, count=1)
        begun.append(queue.begun_epochs)
    assert begun == [1, 1, 2, 2, 2]


def test_a_task_that_does_not_exist_has_no_batches(make):
    queue = make(2)
    assert queue.batches(0, 1).todo == ((0, 4),)
    for task in (-1, 2):
        with pytest.raises(UsageError, match=f"there is no task {task}"):
            queue.batches(0, task)


def test_endless_epochs_continue(make):
    queue = make(2, epochs=None)
    assert len(run(queue, count=9)) == 9
    assert queue.epoch == 4


def test_the_last_finished_task_ends_an_epoch(make):
    queue = make(2, epochs=2, is_deduplicated=False)
    first, second = take(queue), take(queue)
    assert queue.request("b", 0.0) == NoTaskNow(1.0), "the next epoch waits for this one"

    assert finish(queue, second) == Finished()
    assert finish(queue, first) == Finished((EpochFinished(0),))
    assert take(queue).epoch == 1


def test_a_trainer_holds_at_most_its_limit(make):
    queue = make()
    take(queue, holding_limit=1)
    assert isinstance(queue.request("a", 0.0, holding_limit=1), NoTaskNow)
    take(queue, holding_limit=2)
    assert [a.task for a in queue.holders()["a"]] == [0, 1]
    assert queue.holds("a")
    assert not queue.holds("b")


def test_an_assignment_whose_reply_was_lost_is_repeated(make):
    queue = make()
    known = take(queue)
    lost = take(queue)
    revision = queue.revision

    assert take(queue, known={known.attempt}) == lost
    assert queue.revision == revision
    assert isinstance(queue.request("a", 0.0, known={known.attempt, lost.attempt}), NoTaskNow)


def test_a_repeated_assignment_is_marked_if_it_is_a_copy(near_end):
    queue, _, waiting = near_end
    assert queue.request("slow", 101.0, known=()) == TaskGiven(queue.holders()["slow"][0], is_copy=False)
    copy = queue.request("fast", 120.0)
    assert copy.is_copy
    assert copy.assignment.task == waiting.task
    assert queue.request("fast", 120.0, known=()) == copy


def test_only_changes_increment_the_revision(make):
    queue = make(1)
    assignment = take(queue)
    revisions = [queue.revision]
    queue.request("b", 0.0)
    queue.tick(1.0)
    with pytest.raises(FencedError):
        finish(queue, structs.replace(assignment, attempt=77))
    assert queue.revision == revisions[0]
    finish(queue, assignment)
    assert queue.revision > revisions[0]


def test_a_task_without_batches_is_refused(make):
    queue = make(batch_counts=lambda task: 0 if task == 1 else 4)
    assignment = take(queue)
    before = queue.encode()
    with pytest.raises(UsageError, match="task 1 has 0 batches"):
        take(queue)
    assert queue.encode() == before
    finish(queue, assignment)


# --- reports ---


def test_reports_of_pieces_that_are_not_held_are_refused(make):
    queue = make()
    mine = take(queue)
    before = queue.encode()
    for trainer, wrong in [
        ("b", mine),
        ("a", structs.replace(mine, epoch=1)),
        ("a", structs.replace(mine, position=1)),
        ("a", structs.replace(mine, attempt=2)),
        ("a", structs.replace(mine, attempt=0)),
    ]:
        for report in (finish, fail, give_back):
            with pytest.raises(FencedError):
                report(queue, wrong, trainer)
    assert queue.encode() == before


def test_reports_of_pieces_that_were_never_assigned_are_refused(make):
    queue = make(3, epochs=2)
    run(queue, count=1)
    held = take(queue)
    for epoch, position, attempt in [(0, 2, 1), (0, 2, held.attempt), (1, 0, 1), (0, 0, held.attempt + 1), (0, 0, 99)]:
        with pytest.raises(FencedError):
            queue.finish("a", epoch, position, attempt, 0.0)
    assert queue.finish("a", 0, 0, 1, 0.0) == AlreadyDone()


def test_a_repeated_report_of_a_part_is_already_done_while_another_part_waits(make):
    queue = make(3)
    run(queue)
    queue.reopen(0, [], {0: [(0, 1), (2, 3)]})
    part = take(queue)
    finish(queue, part)
    assert finish(queue, part) == AlreadyDone()


def test_a_repeated_report_is_already_done(make):
    queue = make()
    assignment = take(queue)
    finish(queue, assignment)
    before = queue.encode()
    assert finish(queue, assignment) == AlreadyDone()
    assert fail(queue, assignment) == ()
    assert queue.encode() == before


def test_returned_pieces_are_assigned_first_and_are_not_counted(make):
    queue = make(attempts_limit=1)
    first, second = take(queue), take(queue)
    give_back(queue, second)
    give_back(queue, first)
    assert queue.counts().retries == 2
    again = take(queue)
    assert (again.task, stretch(again)) == (0, (0, 4))
    assert again.attempt > second.attempt
    with pytest.raises(FencedError, match="no longer current"):
        finish(queue, first)


def test_a_dead_trainer_counts_as_a_failure_and_a_leaving_one_does_not(make):
    queue = make(1, attempts_limit=1)
    take(queue)
    queue.trainer_departed("a", 0.0, is_graceful=True)
    assert stretch(take(queue)) == (0, 4)
    queue.trainer_departed("a", 0.0)
    assert stretch(take(queue)) == (0, 2), "it was split"
    assert queue.trainer_departed("nobody", 0.0) == ()


# --- time ---


def expired(effects):
    return [(each.trainer, each.assignment) for each in effects if isinstance(each, Expired)]


def test_a_first_task_may_run_while_its_trainer_makes_progress(make):
    queue = make(stuck_after_s=100.0)
    slow = take(queue, "a", 0.0)
    for now in range(50, 1250, 50):
        assert queue.tick(float(now), progressed=["a", "who holds nothing"]) == ()
    assert queue.tick(1300.0) == ()
    assert expired(queue.tick(1301.0)) == [("a", slow)]


def test_a_task_may_run_as_long_as_the_others_regardless_of_progress(make):
    queue = make(stuck_after_s=100.0, timeout_factor=2.0)
    finish(queue, take(queue, "a", 0.0), now=1200.0)
    slow = take(queue, "a", 1200.0)
    assert queue.tick(3600.0) == ()
    assert expired(queue.tick(3601.0, progressed=["a"])) == [("a", slow)]


@pytest.mark.parametrize("average_s", [None, 10.0])
def test_clocks_are_stopped_while_no_task_can_run(make, average_s):
    queue = make(4, stuck_after_s=20.0, timeout_factor=2.0, timeout_floor_s=1.0)
    if average_s is not None:
        finish(queue, take(queue, "a", 0.0), now=average_s)
    slow = take(queue, "a", 100.0)
    assert queue.tick(105.0, is_held_up=True) == ()
    assert queue.tick(500.0, is_held_up=True) == ()
    late = take(queue, "b", 600.0)
    assert queue.tick(700.0) == ()
    assert [(who, task, ran_s) for who, _, task, ran_s in queue.longest_running(2, 701.0)] == [
        ("a", slow.task, 6.0),
        ("b", late.task, 1.0),
    ]
    assert queue.tick(715.0) == ()
    assert expired(queue.tick(715.5)) == [("a", slow)]
    assert expired(queue.tick(720.5)) == [("b", late)]


def test_the_time_in_which_no_task_could_run_is_not_averaged(make):
    queue = make()
    held = take(queue, "a", 0.0)
    queue.tick(3.0, is_held_up=True)
    queue.tick(303.0)
    finish(queue, held, now=305.0)
    assert queue.average_s == 5.0


def test_an_expired_piece_names_its_duration_and_the_deciding_setting(make):
    queue = make(stuck_after_s=100.0, timeout_factor=2.0, timeout_floor_s=30.0)
    take(queue, "a", 0.0)
    (first,) = queue.tick(101.0)
    assert first.reason == "the trainer finished no batch for 101 s; the limit is 100 s (stuck_after_s)"
    finish(queue, take(queue, "a", 200.0), now=220.0)
    take(queue, "b", 300.0)
    (second,) = queue.tick(341.0)
    assert second.reason == (
        "the task ran for 41 s; the limit is 40 s: 2 times the average of 20.0 s (task_timeout_factor), at least 30 s "
        "(task_timeout_floor_s)"
    )


def test_the_timeout_follows_the_average_duration_of_tasks(make):
    queue = make(8, timeout_floor_s=10.0, stuck_after_s=100.0, timeout_factor=4.0)
    assert queue.timeout_s == 100.0
    for duration_s, timeout_s in [(1.0, 10.0), (9.0, 20.0), (200.0, 280.0)]:
        assignment = take(queue, now=500.0)
        finish(queue, assignment, now=500.0 + duration_s)
        assert queue.timeout_s == timeout_s
    assert queue.average_s == 70.0


def test_expired_pieces_are_taken_back(make):
    queue = make(stuck_after_s=100.0)
    early, late = take(queue, "a", 0.0), take(queue, "b", 50.0)

    assert queue.tick(100.0) == ()
    assert expired(queue.tick(101.0)) == [("a", early)]

    assert not queue.is_current("a", early.attempt)
    assert queue.is_current("b", late.attempt)
    again = take(queue, "c", 101.0)
    assert again.task == early.task
    with pytest.raises(FencedError):
        finish(queue, early, "a", 102.0)
    finish(queue, again, "c", 102.0)
    assert finish(queue, early, "a", 102.0) == AlreadyDone()


def test_timeouts_restart_under_another_master(make):
    queue = make(stuck_after_s=100.0)
    assignment = take(queue, now=9000.0)
    settings = QueueSettings(task_count=3, batch_counts=four, stuck_after_s=100.0)
    restored = TaskQueue.decode(queue.encode(), settings)
    assert restored.tick(5.0) == ()
    assert restored.tick(100.0) == ()
    assert expired(restored.tick(106.0)) == [("a", assignment)]


def test_an_unknown_duration_is_not_averaged(make):
    queue = make()
    assignment = take(queue, now=9000.0)
    restored = TaskQueue.decode(queue.encode(), QueueSettings(task_count=3, batch_counts=four))
    restored.tick(5.0)
    finish(restored, assignment, now=9.0)
    assert restored.average_s is None


# --- running and waiting pieces ---


def test_a_part_of_a_task_is_not_averaged(make):
    queue = make(3)
    run(queue)
    queue.reopen(0, [], {0: [(0, 1)]})
    finish(queue, take(queue, now=100.0), now=150.0)
    assert queue.average_s is None


def test_a_piece_begins_when_the_previous_one_is_reported(make):
    queue = make(9, timeout_floor_s=1.0, timeout_factor=4.0)
    pieces = [take(queue, now=float(n), holding_limit=9) for n in range(3)]
    assert len(pieces) == 3
    finish(queue, pieces[0], now=10.0)
    finish(queue, pieces[1], now=16.0)
    assert queue.average_s == 8.0
    finish(queue, pieces[2], now=16.0)
    assert queue.average_s == 8.0, "the durations of pieces reported together are unknown"


def test_when_a_piece_expires_its_backlog_is_taken_back_without_blame(make):
    queue = make(30, attempts_limit=1, stuck_after_s=100.0)
    running, *waiting = [take(queue, now=float(n), holding_limit=5) for n in range(5)]
    other = take(queue, "b", 60.0)
    assert queue.tick(100.0) == ()

    assert expired(queue.tick(100.5)) == [("a", running)]

    assert list(queue.holders()) == ["b"]
    again = [take(queue, "c", 101.0, holding_limit=5) for _ in waiting]
    assert [(each.task, stretch(each)) for each in again] == [(each.task, (0, 4)) for each in waiting]
    finish(queue, other, "b", 101.0)


def test_the_clock_of_a_waiting_piece_is_stopped(make):
    queue = make(30, timeout_factor=2.0)
    first, second = take(queue, now=0.0), take(queue, now=0.0)
    finish(queue, first, now=99.0)
    assert queue.tick(297.0) == ()
    assert expired(queue.tick(297.5)) == [("a", second)]


def test_only_pieces_that_a_dead_trainer_may_have_started_are_blamed(make):
    """The running piece and the next one, which is being read; with a limit of 1 they are suspect at once."""
    queue = make(60, attempts_limit=1)
    held = [take(queue, holding_limit=9) for _ in range(9)]
    finish(queue, held[0])
    queue.trainer_departed("a", 1.0)
    again = [take(queue, "b", holding_limit=6) for _ in range(6)]
    assert [each.task for each in again] == [each.task for each in held[3:]]
    run(queue, "c")
    assert {piece.task for piece in queue.waiting.pieces} == set(), "c did the suspects, alone"


def test_a_piece_finished_elsewhere_makes_way_for_the_next(make):
    queue = make(3, timeout_floor_s=1.0, timeout_factor=1.0)
    finish(queue, take(queue, "b", 0.0), "b", 10.0)
    first, second = take(queue, "a", 10.0), take(queue, "a", 10.0)
    waits = take(queue, "b", 11.0)
    finish(queue, waits, "b", 15.0)
    runs = take(queue, "b", 100.0)
    assert (waits.task, runs.task) == (second.task, first.task)
    finish(queue, runs, "b", 101.0)
    assert not queue.holds("a")
    assert queue.is_done


# --- shares ---


def test_a_trainer_holds_more_than_two_only_while_enough_is_left_for_all(make):
    queue = make(100)
    asks = {"holding_limit": 64, "trainer_count": 4}
    held = []
    while isinstance(answer := queue.request("a", 0.0, **asks), TaskGiven):
        held.append(answer.assignment)
    assert len(held) == 11, "11 of 89 divided by 2 x 4"
    assert len(queue.holders()) == 1


def test_shares_shrink_to_two_at_the_end_of_an_epoch(make):
    """All trainers want as many pieces as possible; after a finished piece a trainer takes its share."""
    queue = make(400)
    trainers = [f"t{n}" for n in range(5)]
    left_behind = []
    while not queue.is_done:
        for trainer in trainers:
            while isinstance(answer := queue.request(trainer, 0.0, 64, trainer_count=5), TaskGiven):
                todo = queue.counts().todo
                assert queue.held_count(trainer) <= max(2, (todo + 1) // 10)
                assert answer.is_copy or todo or queue.held_count(trainer) <= 2
            if held := queue.holders().get(trainer):
                finish(queue, held[0], trainer)
        if not queue.counts().todo:
            left_behind.append(max(map(len, queue.holders().values()), default=0))
    assert max(left_behind) <= 2


def test_pieces_assigned_together_are_one_stored_row(make):
    queue = make(1000)
    for _ in range(40):
        take(queue, holding_limit=64)
    before = len(queue.encode_parts()[0])
    finish(queue, queue.holders()["a"][0])
    assert queue.pending.backlog_of("a").rows == [[0, 1, 39, 0, 2]]
    assert abs(len(queue.encode_parts()[0]) - before) < 5
    settings = QueueSettings(task_count=1000, batch_counts=four)
    assert TaskQueue.decode(queue.encode(), settings).holders() == queue.holders()


def test_a_trainer_that_asks_for_single_pieces_soon_gets_no_more(make):
    """Each of its pieces is a separate row."""
    queue = make(1000)
    for _ in range(20):
        for trainer in "ab":
            queue.request(trainer, 0.0, 64)
    assert {trainer: len(held) for trainer, held in queue.holders().items()} == {"a": 4, "b": 4}
    for _ in range(2):
        finish(queue, queue.holders()["a"][0])
    for _ in range(20):
        queue.request("a", 0.0, 64)
    assert len(queue.holders()["a"]) == 22, "they are consecutive"


# --- copies ---


@pytest.fixture
def near_end(make):
    """One task took 10 s; "slow" has run its second one since 100, and the third waits."""
    queue = make(3)
    finish(queue, take(queue, "fast", 0.0), "fast", 10.0)
    return queue, take(queue, "slow", 100.0), take(queue, "slow", 101.0)


def test_an_idle_trainer_gets_a_copy_of_a_waiting_piece_then_of_the_slowest(near_end):
    queue, slowest, waiting = near_end
    answer = queue.request("fast", 101.5)

    assert answer.is_copy
    assert (answer.assignment.task, answer.assignment.attempt > waiting.attempt) == (waiting.task, True)
    assert queue.counts().copies == 1
    assert isinstance(queue.request("fast", 112.0), NoTaskNow), "it is no longer idle"
    assert isinstance(queue.request("slow", 200.0, holding_limit=9), NoTaskNow), "no copy of its own piece"

    finish(queue, answer.assignment, "fast", 103.5)
    assert queue.average_s == 6.0
    assert queue.request("fast", 103.5) == NoTaskNow(1.0)
    assert queue.request("fast", 106.0) == NoTaskNow(0.05), "this is the average"
    assert queue.request("fast", 105.5).retry_after_s == pytest.approx(0.55)
    assert take(queue, "fast", 106.5).task == slowest.task


@pytest.mark.parametrize("winner", ["fast", "slow"])
def test_the_first_to_finish_wins(near_end, winner):
    queue, _, original = near_end
    both = {"slow": original, "fast": take(queue, "fast", 120.0)}
    loser = "slow" if winner == "fast" else "fast"

    assert isinstance(finish(queue, both[winner], winner, 121.0), Finished)
    assert finish(queue, both[loser], loser, 122.0) == AlreadyDone()
    assert queue.counts().done == 2


def test_a_piece_has_at_most_two_holders(near_end):
    queue, slowest, waiting = near_end
    assert take(queue, "fast", 120.0).task == waiting.task
    assert take(queue, "third", 120.0).task == slowest.task
    assert isinstance(queue.request("fourth", 120.0), NoTaskNow)


def test_a_copy_survives_its_original(near_end):
    queue, _, waiting = near_end
    copy = take(queue, "fast", 120.0)
    queue.trainer_departed("slow", 121.0)
    assert queue.is_current("fast", copy.attempt)
    again = take(queue, "other", 122.0)
    assert again.task != waiting.task
    assert isinstance(finish(queue, copy, "fast", 123.0), Finished)


def test_the_last_piece_of_the_longest_backlog_is_copied(make):
    queue = make(60)
    first = [take(queue, "a", 0.0, holding_limit=9) for _ in range(3)]
    second = [take(queue, "b", 0.0, holding_limit=9) for _ in range(5)]
    run(queue, "c")  # It does all the others, one after the other, and then gets copies.

    assert queue.counts().copies == len(first) + len(second) - 2, "all that were waiting"
    assert {trainer: [held.task for held in pieces] for trainer, pieces in queue.holders().items()} == {
        "a": [first[0].task],
        "b": [second[0].task],
    }


def test_waiting_pieces_of_the_longest_backlog_are_copied_first(make):
    queue = make(60)
    for trainer, count in [("a", 3), ("b", 5)]:
        for _ in range(count):
            last = take(queue, trainer, holding_limit=9)
    for number in range(60 - 8):
        take(queue, f"other-{number}")
    assert take(queue, "idle").task == last.task


def test_the_first_of_equally_long_backlogs_is_copied(make):
    queue = make(4)
    lines = {trainer: [take(queue, trainer) for _ in range(2)] for trainer in "ab"}
    assert take(queue, "idle").task == lines["a"][1].task


def test_a_suspect_is_not_copied(make):
    queue = make(2, attempts_limit=1, batch_counts=lambda _: 1)
    finish(queue, take(queue), now=1.0)
    fail(queue, take(queue, now=1.0), now=1.0)
    suspect = take(queue, now=1.0)
    assert isinstance(queue.request("b", 500.0), NoTaskNow), "only one trainer may die of it"
    assert queue.is_current("a", suspect.attempt)


def test_data_without_a_model_is_never_assigned_twice(make):
    queue = make(3, is_deduplicated=False, stuck_after_s=600.0)
    finish(queue, take(queue, "fast", 0.0), "fast", 1.0)
    runs, waits = take(queue, "slow", 1.0), take(queue, "slow", 1.0)
    for now in (2.0, 500.0, 601.0):
        assert queue.tick(now, progressed=["slow"]) == ()
        assert isinstance(queue.request("fast", now), NoTaskNow)
    assert queue.tick(1201.0) == ()
    assert expired(queue.tick(1201.1)) == [("slow", runs)]
    assert not queue.is_current("slow", waits.attempt)
    assert take(queue, "fast", 1202.0).task == runs.task


def taken_stretches(queue, trainer, now=0.0):
    found = []
    while isinstance(answer := queue.request(trainer, now), TaskGiven):
        found.append(stretch(answer.assignment))
        finish(queue, answer.assignment, trainer, now)
    return found


@pytest.mark.parametrize("how", ["back", "fail", "gone", "tick", "restart"])
def test_only_undone_batches_of_data_without_a_model_are_assigned_again(make, how):
    queue = make(1, batch_counts=lambda _: 8, is_deduplicated=False, stuck_after_s=60.0)
    given = take(queue)
    queue.note_done("a", given.attempt, [(0, 2), (5, 6)], 1.0)
    queue.note_done("a", given.attempt, [(0, 3), (5, 6)], 2.0)
    assert queue.batches(0, 0).done == ((0, 3), (5, 6))
    if how == "restart":
        stored = queue.encode()
        queue = TaskQueue.decode(stored, queue.settings)
        assert queue.encode() == stored
        assert queue.batches(0, 0).pending == ((3, 5), (6, 8))
    if how == "back":
        give_back(queue, given)
    elif how == "fail":
        fail(queue, given)
    elif how == "tick":
        assert queue.tick(62.0) == (), "it has made progress"
        assert [each.assignment for each in queue.tick(62.1)] == [given]
    else:
        queue.trainer_departed("a", 3.0)
    assert taken_stretches(queue, "b", 99.0) == [(3, 5), (6, 8)]
    assert queue.is_done


def test_a_completely_done_piece_of_data_without_a_model_is_not_assigned_again(make):
    queue = make(1, epochs=2, is_deduplicated=False)
    given = take(queue)
    queue.note_done("a", given.attempt, [(0, 4)], 1.0)
    assert queue.epoch == 0, "its trainer will report it soon"
    assert queue.trainer_departed("a", 2.0) == (EpochFinished(0),)
    assert finish(queue, given, "a", 3.0) == AlreadyDone()
    again = take(queue)
    queue.note_done("a", again.attempt, [(0, 4)], 1.0)
    assert finish(queue, again) == Finished((EpochFinished(1),))


def test_done_batches_of_pieces_that_are_not_held_are_ignored(make):
    queue = make(2, is_deduplicated=False)
    given = take(queue)
    before = queue.encode()
    queue.note_done("b", given.attempt, [(0, 1)], 1.0)
    queue.note_done("a", given.attempt, [(0, 1)], 1.0, generation=7)
    queue.note_done("a", given.attempt + 1, [(0, 1)], 1.0)
    queue.note_done("a", given.attempt, [(4, 9)], 1.0)
    assert queue.encode() == before


def test_only_pservers_decide_what_is_done_if_there_is_a_model(make):
    queue = make(1)
    given = take(queue)
    queue.note_done("a", given.attempt, [(0, 1)], 1.0)
    assert queue.batches(0, 0).done == ()
    alone = make(1, is_deduplicated=False)
    given = take(alone)
    alone.note_done("a", given.attempt, [(0, 1)], 1.0)
    alone.deduplicate()
    assert alone.batches(0, 0).pending == ((0, 4),)


def test_pending_pieces_may_be_copied_once_a_model_is_declared(make):
    queue = make(2, is_deduplicated=False)
    finish(queue, take(queue, "fast", 0.0), "fast", 1.0)
    take(queue, "slow", 1.0)
    queue.deduplicate()
    assert queue.request("fast", 500.0).is_copy
    assert queue.timeout_s == 30.0


# --- poison ---


def test_a_known_failing_batch_is_isolated(make):
    queue = make(1, attempts_limit=2, confirmations=1)
    fail(queue, take(queue), batch=2)
    fail(queue, take(queue), batch=2)

    before, after = take(queue), take(queue)
    assert (stretch(before), stretch(after)) == ((0, 2), (3, 4))
    finish(queue, before)
    assert finish(queue, before) == AlreadyDone()
    finish(queue, after)
    it = take(queue)
    assert stretch(it) == (2, 3)
    assert fail(queue, it, error="bad record", batch=2) == (
        Quarantined(queue.failed.details[0]),
        EpochFinished(0),
    )

    piece = queue.failed.details[0]
    assert (piece.epoch, piece.task, piece.first_batch, piece.end_batch, piece.attempts) == (0, 0, 2, 3, 3)
    assert (piece.trainer, piece.error) == ("a", "bad record")
    assert queue.is_done
    assert queue.counts().failed == 1
    batches = queue.batches(0, 0)
    assert (batches.done, batches.failed) == (((0, 2), (3, 4)), ((2, 3),))


def test_an_unknown_failing_batch_is_found_by_halving(make):
    queue = make(1, batch_counts=lambda _: 64, attempts_limit=2)
    tried = 0
    while not queue.is_done:
        assignment = take(queue)
        if assignment.first_batch <= 37 < assignment.end_batch:
            fail(queue, assignment)
            tried += 1
        else:
            finish(queue, assignment)
    assert queue.batches(0, 0).failed == ((37, 38),)
    assert tried == 2 + 6 + 1, "the limit, the halves, then the confirmations, of which one counts as the last half"


def test_a_record_that_kills_trainers_convicts_no_other(make):
    """Every trainer that holds the poison dies, with all its pieces; trainers hold pieces in advance."""
    poison = {(3, 5), (4, 0), (11, 7)}
    queue = make(20, batch_counts=lambda _: 8, epochs=2)
    chance = random.Random(4)
    deaths = 0
    while not queue.is_done:
        trainer = chance.choice("abcd")
        while isinstance(queue.request(trainer, 0.0), TaskGiven):
            pass
        held = queue.holders().get(trainer, ())
        doomed = [a for a in held if any(t == a.task and a.first_batch <= b < a.end_batch for t, b in poison)]
        if doomed:
            queue.trainer_departed(trainer, 0.0)
            deaths += 1
        elif held:
            finish(queue, held[0], trainer)
        queue.check()
    failed = {(piece.epoch, piece.task, piece.first_batch, piece.end_batch) for piece in queue.failed.details}
    assert failed == {(epoch, task, batch, batch + 1) for epoch in range(2) for task, batch in poison}
    assert deaths <= 2 * len(poison) * (3 + 3 + 5), "the limit, the halves, the first loss and twice the confirmations"


@pytest.fixture
def suspect(make):
    """Two tasks of one batch: the trainer of the first was lost, so it is suspect. "busy" holds the other one."""
    queue = make(2, batch_counts=lambda _: 1, attempts_limit=1, confirmations=2)
    take(queue, "victim")
    take(queue, "busy")
    queue.trainer_departed("victim", 0.0)
    return queue


def lose(queue, times=1):
    """Lose this many trainers, each with the suspect; return the effects of the last loss."""
    effects = ()
    for _ in range(times):
        assert take(queue, "victim").task == 0
        effects = queue.trainer_departed("victim", 0.0)
    return effects


def test_losses_of_trainers_convict_a_batch_if_no_others_are_lost(suspect):
    assert lose(suspect, 1 + 3) == (), "the first loss begins the count"
    assert lose(suspect) == (Quarantined(suspect.failed.details[0]),)
    assert suspect.failed.details[0].error == "its trainer died or lost its lease"


def test_losses_convict_nothing_while_other_trainers_are_lost_too(suspect):
    for _ in range(50):
        assert lose(suspect) == ()
        suspect.trainer_departed("idle", 0.0)
    finish(suspect, take(suspect, "victim"), "victim")


def test_a_trainer_that_leaves_gracefully_is_not_a_loss(suspect):
    lose(suspect, 4)
    suspect.trainer_departed("idle", 0.0, is_graceful=True)
    assert lose(suspect)


def test_an_expired_piece_is_a_loss(suspect):
    finish(suspect, suspect.holders()["busy"][0], "busy", 1.0)
    for number in range(1, 5):
        take(suspect, "slow", 1000.0 * number)
        assert len(suspect.tick(1000.0 * number + 901.0)) == 1
    take(suspect, "slow", 5000.0)
    assert isinstance(suspect.tick(5901.0)[1], Quarantined)


def test_reported_failures_convict_a_batch_regardless_of_lost_trainers(suspect):
    suspect.trainer_departed("idle", 0.0)
    assert fail(suspect, take(suspect), error="bad record") == ()
    suspect.trainer_departed("idle", 0.0)
    assert isinstance(fail(suspect, take(suspect), error="bad record")[0], Quarantined)


def test_the_count_of_a_batch_that_is_done_after_all_starts_again(suspect):
    lose(suspect, 4)
    finish(suspect, take(suspect, "victim"), "victim")
    suspect.reopen(0, [(0, 1)])
    assert take(suspect, "victim").task == 0
    assert suspect.trainer_departed("victim", 0.0) == (), "a new piece"
    assert lose(suspect, 4) == ()
    assert isinstance(lose(suspect)[0], Quarantined)


def test_a_suspect_is_assigned_alone(make):
    queue = make(3, attempts_limit=1)
    fail(queue, take(queue, "a"), "a")  # task 0 is split in halves, both suspect
    take(queue, "b")
    assert take(queue, "b").task == 2, "new tasks come before suspects"
    assert isinstance(queue.request("b", 0.0, holding_limit=9), NoTaskNow), "b is not idle"
    assert stretch(take(queue, "a")) == (0, 2)
    give_back(queue, queue.holders()["b"][1], "b")
    assert isinstance(queue.request("a", 0.0, holding_limit=9), NoTaskNow), "nothing together with a suspect"
    assert take(queue, "b").task == 2


def test_many_suspects_are_assigned_before_new_tasks(make):
    queue = make(100, attempts_limit=1)
    take(queue, "busy")
    for _ in range(8):
        fail(queue, take(queue))
    assert isinstance(queue.request("busy", 0.0), NoTaskNow), "it must become idle"
    assert (take(queue).task, stretch(queue.holders()["a"][0])) == (1, (0, 2))
    assert take(queue, "busy").task == 9, "few enough are left"


def test_errors_are_kept_short_and_valid(make):
    queue = make(1, batch_counts=lambda _: 1, attempts_limit=1, confirmations=0)
    fail(queue, take(queue), error="\ud800" + "x" * 5000)
    assert queue.failed.details[0].error == "?" + "x" * 198 + "…"
    assert (
        TaskQueue.decode(queue.encode(), QueueSettings(task_count=1, batch_counts=four)).failed.details
        == queue.failed.details
    )


def test_failed_batches_can_be_retried_or_dropped(make):
    queue = make(3, attempts_limit=1, confirmations=0, batch_counts=lambda _: 1)
    for _ in range(3):
        fail(queue, take(queue))
    assert queue.is_done
    with pytest.raises(NotFoundError):
        queue.retry_failed(FailedSelector(task=7))

    assert queue.drop_failed(FailedSelector(task=2)) == 1
    assert queue.retry_failed(FailedSelector(epoch=0, task=1)) == 1

    assert [piece.task for piece in queue.failed.details] == [0]
    assert not queue.is_done
    assert finish(queue, take(queue)) == Finished((EpochFinished(0),))
    counts = queue.counts()
    assert (counts.done, counts.failed, counts.dropped_batches) == (2, 1, 1)
    assert queue.reopen(0, [(0, 3)]) == 1, "neither the failed nor the dropped one"


def test_too_many_failures_stop_the_job(make):
    queue = make(9, attempts_limit=1, confirmations=0, batch_counts=lambda _: 1, failed_limit=2)
    for _ in range(3):
        fail(queue, take(queue), error="no such column")
    with pytest.raises(JobFailedError, match=r"3 pieces .* limit of 2.*no such column"):
        queue.request("a", 0.0)
    queue.drop_failed(FailedSelector(task=0))
    assert take(queue).task == 3


def test_quarantined_batches_are_listed_by_epoch(make):
    queue = make(3, attempts_limit=1, confirmations=0, batch_counts=lambda _: 1, epochs=2)
    run(queue, count=1)
    fail(queue, take(queue))
    run(queue, count=2)
    assert [list(queue.incomplete(epoch)) for epoch in range(2)] == [[(1, 2)], []]


def test_failures_of_old_epochs_are_forgotten_first(make):
    queue = make(2, attempts_limit=1, confirmations=0, batch_counts=lambda _: 1, failed_limit=3, epochs=None)
    for _ in range(20):
        assignment = take(queue)
        finish(queue, assignment) if assignment.task else fail(queue, assignment)
    assert [piece.epoch for piece in queue.failed.details] == [7, 8, 9]
    assert queue.counts().forgotten == 7


def test_a_task_with_a_failed_batch_is_assigned_again_in_the_next_epoch(make):
    queue = make(3, attempts_limit=1, confirmations=0, batch_counts=lambda _: 1, epochs=2)
    fail(queue, take(queue))
    assert queue.counts().failed == 1
    assert run(queue) == [(0, 1, 0, 1), (0, 2, 0, 1), (1, 0, 0, 1), (1, 1, 0, 1), (1, 2, 0, 1)]


# --- reopening ---


def test_reopened_tasks_have_priority(make):
    queue = make(6, epochs=2)
    run(queue, count=4)
    pending = take(queue)

    assert queue.reopen(0, [(0, 6)], {}) == 4, "neither what is pending nor what is todo"
    assert [take(queue, name).task for name in "bcde"] == [0, 1, 2, 3]
    assert queue.request("b", 0.0).assignment.task == 5
    finish(queue, pending)


def test_all_runs_of_tasks_are_reopened(make):
    queue = make(6)
    run(queue)
    assert queue.reopen(0, [(0, 2), (3, 4), (5, 6)]) == 4
    assert [task for _, task, _, _ in run(queue)] == [0, 1, 3, 5]


def test_parts_of_tasks_are_reopened(make):
    queue = make(3)
    run(queue)
    assert queue.is_done
    assert queue.reopen(0, [(2, 3)], {0: [(1, 3)], 1: [(0, 1), (3, 4)]}) == 3
    assert not queue.is_done
    assert queue.counts().todo == 3
    assert run(queue) == [(0, 0, 1, 3), (0, 1, 0, 1), (0, 1, 3, 4), (0, 2, 0, 4)]
    assert queue.is_done


def test_done_batches_of_a_partly_open_task_are_reopened(make):
    queue = make(3)
    run(queue)
    assert queue.reopen(0, [], {0: [(1, 3)], 1: [(1, 3)]}) == 2
    assert queue.reopen(0, [(0, 1)]) == 1
    assert [queue.batches(0, task).todo for task in range(3)] == [((0, 4),), ((1, 3),), ()]


def test_a_task_reopened_in_two_steps_waits_once(make):
    queue = make(6)
    run(queue)
    assert queue.reopen(0, [(1, 3)]) == 2
    fail(queue, take(queue))
    assert queue.reopen(0, [(0, 6)]) == 4, "task 1 has failed and waits, task 2 waits"
    queue.check()
    assert [task for _, task, _, _ in run(queue)] == list(range(6))


def test_a_failure_in_another_epoch_does_not_prevent_reopening_a_task(make):
    queue = make(3, epochs=2)
    run(queue, count=3)
    fail(queue, take(queue))
    assert queue.reopen(0, [(0, 1)]) == 1
    assert queue.reopen(1, [(0, 1)]) == 0, "it waits already"


def test_a_part_that_was_not_started_is_todo_in_any_case(make):
    queue = make(3)
    run(queue, count=1)
    assert queue.reopen(0, [], {1: [(0, 1)]}) == 0
    assert [queue.batches(0, task).todo for task in range(3)] == [(), ((0, 4),), ((0, 4),)]


def test_a_reopened_epoch_is_not_over_while_one_of_its_tasks_waits(make):
    queue = make(3, epochs=3)
    run(queue, count=4)
    queue.reopen(0, [(1, 3)])
    assert finish(queue, take(queue)) == Finished()
    assert finish(queue, take(queue)) == Finished((EpochFinished(0),))


def test_returned_pieces_of_the_current_epoch_are_not_reopened(make):
    queue = make(3)
    give_back(queue, take(queue))
    assert (queue.counts().reopened, queue.counts().retries) == (0, 1)


def test_an_earlier_epoch_is_reopened_and_ends_again(make):
    queue = make(3, epochs=3)
    run(queue, count=4)
    held = take(queue, "b")
    assert queue.reopen(0, [(1, 3)]) == 2
    assert queue.counts().reopened == 2

    first, second = take(queue), take(queue)
    assert (first.epoch, first.task, second.epoch, second.task) == (0, 1, 0, 2)
    assert isinstance(queue.request("b", 0.0), NoTaskNow), "epoch 1 waits for epoch 0"
    finish(queue, held, "b")
    finish(queue, first)
    assert finish(queue, second) == Finished((EpochFinished(0),))
    assert take(queue).epoch == 1


def test_reopening_undone_tasks_changes_nothing(make):
    queue = make(3)
    take(queue)
    revision = queue.revision
    assert queue.reopen(0, [(0, 3)], {}) == 0
    assert queue.revision == revision


@pytest.mark.parametrize(
    ("epoch", "tasks", "parts"),
    [
        (1, [(0, 1)], {}),
        (-1, [], {}),
        (0, [(2, 4)], {}),
        (0, [(-1, 1)], {}),
        (0, [], {3: [(0, 1)]}),
        (0, [], {-1: [(0, 1)]}),
        (0, [], {0: [(3, 5)]}),
        (0, [(0, 1)], {0: [(0, 1)]}),
    ],
)
def test_impossible_reopenings_are_refused(make, epoch, tasks, parts):
    queue = make(3)
    run(queue, count=2)
    before = queue.encode()
    with pytest.raises(UsageError):
        queue.reopen(epoch, tasks, parts)
    assert queue.encode() == before


@pytest.mark.slow
def test_a_million_reopened_tasks_need_little_space():
    settings = QueueSettings(task_count=1_000_000, batch_counts=four, epochs=2, shuffle=True, seed=1)
    queue = TaskQueue(settings)
    queue.epoch = 1
    queue.cursor = 500_000
    queue.check()

    # A pserver was restored from position 300,000 of this epoch.
    permutation = KeyedPermutation(1_000_000, key_of(1, 1))
    positions = permutation.positions_of(np.arange(1_000_000))
    lost = [(task, task + 1) for task in np.flatnonzero(positions >= 300_000).tolist()]
    assert queue.reopen(1, lost) == 200_000
    assert len(queue.encode()) < 600
    assert take(queue).position == 300_000

    # Another pserver has lost everything.
    assert queue.reopen(1, [(0, 1_000_000)]) == 300_000
    assert queue.reopen(0, [(0, 1_000_000)]) == 1_000_000
    assert len(queue.encode()) < 700
    queue.check()

    # Arbitrary tasks: a few more than requested are reopened.
    again = TaskQueue(settings)
    again.epoch = 1
    assert again.reopen(0, [(task, task + 1) for task in range(0, 1_000_000, 5000)]) == 200
    counts = again.counts()
    assert 200 < counts.reopened < 1_000_000
    assert len(again.encode()) < 4000
    again.check()


def test_gaps_of_done_tasks_between_reopened_runs_are_filled():
    runs = IntervalSet([(0, 1), (2, 3), (6, 7), (8, 9), (20, 30)])
    obstacles = IntervalSet([(1, 2)])
    assert with_gaps_filled(runs, obstacles, 5) == runs
    assert list(with_gaps_filled(runs, obstacles, 4)) == [(0, 1), (2, 3), (6, 9), (20, 30)]
    assert list(with_gaps_filled(runs, obstacles, 3)) == [(0, 1), (2, 9), (20, 30)]
    assert list(with_gaps_filled(runs, obstacles, 1)) == [(0, 1), (2, 30)]


def test_filled_gaps_spare_open_and_failed_tasks(make):
    queue = make(2000, attempts_limit=2, confirmations=0, batch_counts=lambda _: 1, epochs=2)
    run(queue, count=400)
    fail(queue, take(queue))
    fail(queue, take(queue))
    pending, failing = take(queue, "b"), take(queue, "c")
    run(queue, count=800)
    fail(queue, failing, "c")

    assert queue.reopen(0, [(task, task + 1) for task in range(0, 1200, 3)]) == 399, "402 waits already"

    queue.check()
    batches = queue.batches(0, 400), queue.batches(0, 401), queue.batches(0, 1300)
    assert (batches[0].failed, batches[1].pending, batches[2].todo) == (((0, 1),),) * 3
    assert finish(queue, pending, "b") == Finished()


# --- growth ---


def test_new_tasks_join_this_epoch_in_order_and_the_next_one_shuffled(make):
    queue = make(4, epochs=2, shuffle=True, follow=True)
    begun = run(queue, count=2)
    queue.grow(6)
    queue.grow(9)
    begun += run(queue, count=7)
    assert [task for _, task, _, _ in begun[4:]] == [4, 5, 6, 7, 8]
    assert sorted(task for _, task, _, _ in begun) == list(range(9))
    second = [task for _, task, _, _ in run(queue)]
    assert second == [KeyedPermutation(9, key_of(0, 1)).at(position) for position in range(9)]


def test_the_last_epoch_of_a_followed_dataset_waits_for_more_tasks(make):
    queue = make(0, follow=True)
    assert isinstance(queue.request("a", 0.0), NoTaskNow)
    queue.grow(1)
    run(queue)
    assert isinstance(queue.request("a", 0.0), NoTaskNow)
    queue.grow(2)
    assert run(queue) == [(0, 1, 0, 4)]
    assert queue.end_growth() == (EpochFinished(0),)
    assert queue.request("a", 0.0) == EpochsDone()
    assert queue.end_growth() == ()
    with pytest.raises(UsageError, match="before its last epoch"):
        queue.grow(3)


@pytest.mark.parametrize("begun", [0, 1])
def test_tasks_that_join_before_an_epoch_has_begun_are_shuffled_with_it(make, begun):
    queue = make(4, shuffle=True, follow=True, seed=5)
    tasks = [task for _, task, _, _ in run(queue, count=begun)]
    queue.grow(9)
    tasks += [task for _, task, _, _ in run(queue)]
    base = 4 if begun else 9
    shuffled = KeyedPermutation(base, key_of(5, 0))
    assert tasks == [*(shuffled.at(position) for position in range(base)), *range(base, 9)]


def test_a_dataset_that_is_not_followed_does_not_grow(make):
    queue = make(3)
    with pytest.raises(UsageError, match="only to a dataset that is followed"):
        queue.grow(4)


def test_an_epoch_without_tasks_waits_for_the_first_one(make):
    queue = make(0, follow=True, epochs=None)
    again = TaskQueue.decode(queue.encode(), queue.settings)
    assert (again.epoch, again.revision) == (0, 0)
    again.grow(1)
    assert run(again, count=3) == [(epoch, 0, 0, 4) for epoch in range(3)]


def test_an_empty_followed_dataset_can_end(make):
    queue = make(0, follow=True, epochs=None)
    queue.end_growth()
    assert queue.request("a", 0.0) == EpochsDone()


def test_tasks_cannot_be_removed(make):
    queue = make(3, follow=True)
    queue.grow(3)
    with pytest.raises(UsageError, match="had 3 tasks and now has 2"):
        queue.grow(2)


def grown(make, sizes):
    """Return a followed dataset that one task joins during each epoch, with the done tasks in their order."""
    queue = make(3, follow=True, epochs=None, shuffle=True)
    done = []
    for size in range(4, sizes):
        done += run(queue, count=2)
        queue.grow(size)
        done += run(queue, count=size - 2)
    return queue, done


def restored(queue, **settings):
    """Return the queue of the next master."""
    dispatch, failures = queue.encode_parts()
    return TaskQueue.decode(dispatch, QueueSettings(batch_counts=four, follow=True, epochs=None, **settings), failures)


def test_every_epoch_of_a_growing_dataset_can_be_repeated_with_its_tasks(make):
    queue, done = grown(make, 100)
    assert len(queue.encode_parts()[0]) < 1500, "the dispatch document remains small"
    again = restored(queue, task_count=99, shuffle=True)
    assert again.encode_parts() == queue.encode_parts()
    for epoch in range(queue.epoch):
        assert again.reopen(epoch, [(0, again.epoch_size(epoch))]) == epoch + 4
    assert [run(again, count=epoch + 4) for epoch in range(queue.epoch)] == [
        [each for each in done if each[0] == epoch] for epoch in range(queue.epoch)
    ]
    again.check()


def test_old_sizes_are_forgotten(make, monkeypatch):
    monkeypatch.setattr("flightedl.domain.queue.order.REMEMBERED", 20)
    queue, _ = grown(make, 100)
    assert len(queue.encode()) < 2500
    with pytest.raises(NotFoundError, match="was forgotten"):
        queue.reopen(0, [(0, 1)])
    assert queue.reopen(queue.epoch - 2, [(0, 1)]) == 1


# --- storage ---


def trainer_name(number):
    return f"trainer-{number:05d}.worker-7f9c4b5d8-xk2lp.namespace"


@pytest.mark.parametrize("trainers", [1, 64, 300])
def test_the_stored_state_of_a_million_tasks_is_small(trainers):
    """Whatever dies, the dispatch document is below 4 kB + 200 B for each live trainer."""
    settings = QueueSettings(
        task_count=1_000_000, batch_counts=lambda _: 1000, shuffle=True, epochs=None, attempts_limit=2, follow=True
    )
    queue = TaskQueue(settings)
    queue.epoch, queue.cursor = 100, 900_000
    chance = random.Random(trainers)
    largest = 0
    given = {}
    for step in range(20 * trainers):
        name = trainer_name(chance.randrange(trainers))
        answer = queue.request(name, float(step))
        if isinstance(answer, TaskGiven):
            given.setdefault(name, []).append(answer.assignment)
        held = [assignment for assignment in given.get(name, ()) if queue.is_current(name, assignment.attempt)]
        given[name] = held
        kind = chance.random()
        if kind < 0.05:
            queue.trainer_departed(name, float(step))
        elif kind < 0.5 and held:
            finish(queue, held[0], name, float(step))
        if step % trainers == 0:
            largest = max(largest, len(queue.encode_parts()[0]))
    for number in range(trainers):
        queue.trainer_departed(trainer_name(number), 1e6)
    largest = max(largest, len(queue.encode_parts()[0]))
    queue.check()
    assert largest < 4096 + 200 * trainers


def test_the_end_of_an_epoch_does_not_change_the_failures_document(make):
    queue = make(2, epochs=3)
    apart = queue.encode_parts()[1]
    run(queue, count=5)
    assert queue.encode_parts()[1] == apart


def test_a_stored_queue_shows_whether_it_is_done(make):
    def is_over_now(queue, epochs=1):
        return is_over(queue.encode_parts()[0], epochs)

    queue = make(3)
    assert not is_over_now(queue)
    run(queue)
    assert [is_over_now(queue, epochs) for epochs in (1, 2, None)] == [True, False, False]
    queue.reopen(0, [(0, 1)])
    assert not is_over_now(queue), "a complete task waits"
    held = take(queue)
    assert not is_over_now(queue), "it is pending"
    finish(queue, held)
    queue.reopen(0, [], {0: [(0, 1)]})
    assert not is_over_now(queue), "a part of a task waits"
    followed = make(0, follow=True)
    assert not is_over_now(followed, 0), "tasks may still join"


def test_failures_are_stored_separately(make):
    queue = make(500, attempts_limit=1, confirmations=0, batch_counts=lambda _: 1)
    for _ in range(300):
        fail(queue, take(queue), error="e" * 500)
    assignment = take(queue)
    dispatch, failures = queue.encode_parts()
    finish(queue, assignment)
    next_dispatch, same = queue.encode_parts()
    assert same is failures
    assert len(next_dispatch) < 500
    assert len(failures) < 100 * 400 + 300 * 20

    settings = QueueSettings(task_count=500, batch_counts=lambda _: 1, attempts_limit=1, confirmations=0)
    restored = TaskQueue.decode(next_dispatch, settings, failures)
    assert restored.failed.details == queue.failed.details
    assert len(restored.failed.details) == 100
    assert restored.counts() == queue.counts()
    fail(queue, take(queue))
    with pytest.raises(CorruptError, match="not stored together"):
        TaskQueue.decode(dispatch, settings, queue.encode_parts()[1])


def test_everything_is_stored(near_end):
    """Copies, failure counts, split and quarantined pieces, averages: the next master knows them all."""
    queue, first, original = near_end
    copy = take(queue, "fast", 120.0)
    fail(queue, first, "slow", 121.0)
    settings = QueueSettings(task_count=3, batch_counts=four)

    restored = TaskQueue.decode(queue.encode(), settings)

    assert restored.counts() == queue.counts()
    assert restored.counts().copies == 1
    assert restored.holders() == queue.holders()
    assert (restored.average_s, restored.revision, restored.epoch) == (10.0, queue.revision, 0)
    for _ in range(2):
        fail(restored, take(restored, "third", 1.0), "third", 1.0)
    assert stretch(take(restored, "third", 1.0)) == (0, 2), "its first failure was not forgotten"
    assert isinstance(finish(restored, copy, "fast", 2.0), Finished)
    assert finish(restored, original, "slow", 2.0) == AlreadyDone()
    restored.check()


def test_another_master_never_uses_the_number_of_an_attempt_again(make):
    queue = make()
    old = take(queue)
    give_back(queue, old)
    restored = TaskQueue.decode(queue.encode(), QueueSettings(task_count=3, batch_counts=four))
    again = take(restored, "b")
    assert again.task == old.task
    assert again.attempt > old.attempt
    with pytest.raises(FencedError):
        finish(restored, old, "b")
    restored.check()


def test_damaged_state_is_refused(make):
    queue = make(20, attempts_limit=1, confirmations=0, shuffle=True, epochs=3)
    run(queue, count=25)
    fail(queue, take(queue), batch=1)
    give_back(queue, take(queue))
    take(queue, "b")
    settings = QueueSettings(
        task_count=20, batch_counts=four, attempts_limit=1, confirmations=0, shuffle=True, epochs=3
    )
    good = queue.encode()
    assert TaskQueue.decode(good, settings).encode() == good
    for data in (b"", b"{}", b"[]", good[:-1], good + b" 1", good.replace(b'"cursor"', b'"cursr"')):
        with pytest.raises(CorruptError):
            TaskQueue.decode(data, settings)
    with pytest.raises(CorruptError, match="version 3"):
        TaskQueue.decode(good.replace(b'"version":4', b'"version":3'), settings)
    refused = 0
    chance = random.Random(5)
    for _ in range(300):
        index = chance.choice([number for number, byte in enumerate(good) if chr(byte).isdigit()])
        data = good[:index] + str(chance.randrange(10)).encode() + good[index + 1 :]
        try:
            TaskQueue.decode(data, settings).check()
        except (CorruptError, UsageError):
            refused += 1
    assert refused > 50


def decoded(task_count=70, **changes):
    """A queue in which all tasks of epoch 0 and all but one of epoch 1 were assigned, with other stored data."""
    settings = QueueSettings(task_count=task_count, batch_counts=four, epochs=3)
    document = {"version": 4, "seeds": [[0, None]], "revision": 1, "epoch": 1, "cursor": task_count - 1}
    document |= {"next_attempt": 500, "sizes": [[0, task_count, task_count]], "growth_ended": True}
    failures = json.dumps({"version": 4, "serial": 0}).encode()
    queue = TaskQueue.decode(json.dumps(document | changes).encode(), settings, failures)
    queue.check()
    return queue


def held(*row):
    return {"held": {"a": [0, [list(row)]]}}


@pytest.mark.parametrize(
    ("changes", "held_count"),
    [
        ({}, 0),
        ({"sizes": [[0, 68, 70], [1, 70, 70]]}, 0),
        (held(1, 68, 1, 0, 5), 1),
        (held(1, 0, 64, 0, 5), 64),
        (held(1, 68, 1, 0, 5, 1, 3), 1),
        ({"runs": [[1, 68, 69, 0]]}, 0),
        ({"parts": [[1, 68, 1, 3, 0]]}, 0),
    ],
)
def test_valid_state_is_accepted(changes, held_count):
    assert decoded(**changes).held_count("a") == held_count


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": []}, "impossible numbers of tasks"),
        ({"sizes": [[0, 70, 70], [0, 70, 70]]}, "impossible numbers of tasks"),
        ({"sizes": [[1, 70, 70], [0, 70, 70]]}, "impossible numbers of tasks"),
        ({"sizes": [[0, 71, 71], [1, 70, 70]]}, "impossible numbers of tasks"),
        ({"sizes": [[2, 70, 70]]}, "impossible numbers of tasks"),
        ({"sizes": [[0, 71, 70]]}, "impossible numbers of tasks"),
        ({"seeds": []}, "impossible seeds"),
        ({"seeds": [[1, None]]}, "impossible seeds"),
        ({"seeds": [[0, None], [0, None]]}, "impossible seeds"),
        ({"seeds": [[0, 5], [3, None]]}, "impossible seeds"),
        (held(1, 0, 0, 0, 5), "assigns 0 pieces from position 0"),
        (held(1, 0, 65, 0, 5), "assigns 65 pieces from position 0"),
        (held(2, 0, 1, 0, 5), "from position 0 to one trainer"),
        (held(1, 69, 1, 0, 5), "from position 69 to one trainer"),
        (held(1, 67, 3, 0, 5), "from position 67 to one trainer"),
        (held(2, 0, 1, 0, 5, 1, 3), "which has not been assigned"),
        (held(1, 69, 1, 0, 5, 1, 3), "which has not been assigned"),
        ({"held": {"a": [0, [[1, 0, 1, 0, 5]]], "b": [0, [[1, 1, 1, 0, 5]]]}}, "an attempt twice"),
        ({"held": {"a": [0, [[1, 0, 1, 0, 5]]], "b": [0, [[1, 0, 1, 1, 6]]]}}, "two pieces at position 0"),
        ({"runs": [[1, 5, 5, 0]]}, "an empty run"),
        ({"parts": [[2, 0, 1, 3, 0]]}, "which has not been assigned"),
        ({"parts": [[1, 69, 1, 3, 0]]}, "which has not been assigned"),
        ({"failures_serial": 1}, "not stored together"),
    ],
)
def test_impossible_state_is_refused(changes, words):
    with pytest.raises(CorruptError, match=words):
        decoded(**changes)


def test_a_followed_dataset_must_remain_followed():
    settings = QueueSettings(task_count=3, batch_counts=four, follow=True)
    data = TaskQueue(settings).encode()
    assert TaskQueue.decode(data, settings).is_growing
    with pytest.raises(UsageError, match="declare it with follow"):
        TaskQueue.decode(data, replace(settings, follow=False))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shuffle": True, "seed": 5}, "is not shuffled, but the dataset is declared as shuffled by seed 5"),
        ({"shuffle": True}, "as shuffled by seed 0"),
        ({"task_count": 2}, "files have changed"),
        ({"task_count": 4}, "files have changed"),
        ({"epochs": 1}, "epochs= must be more"),
    ],
)
def test_state_of_another_dataset_is_refused(make, changes, words):
    queue = make(3, epochs=2)
    run(queue, count=4)
    settings = QueueSettings(task_count=3, batch_counts=four, epochs=2)
    assert TaskQueue.decode(queue.encode(), settings).epoch == 1
    with pytest.raises(UsageError, match=words):
        TaskQueue.decode(queue.encode(), replace(settings, **changes))


def test_a_finished_job_can_get_more_epochs(make):
    queue = make(2)
    run(queue)
    more = TaskQueue.decode(queue.encode(), QueueSettings(task_count=2, batch_counts=four, epochs=2))
    assert run(more) == [(1, 0, 0, 4), (1, 1, 0, 4)]


def test_seeds_of_any_size_are_stored(make):
    for seed in (-1, 2**64 + 3):
        queue = make(3, seed=seed, shuffle=True)
        settings = QueueSettings(task_count=3, batch_counts=four, seed=seed, shuffle=True)
        assert TaskQueue.decode(queue.encode(), settings).encode() == queue.encode()


@pytest.mark.parametrize(
    "wrong",
    [
        {"task_count": 0},
        {"epochs": 0},
        {"attempts_limit": 0},
        {"confirmations": -1},
        {"failed_limit": -1},
        {"timeout_floor_s": 0.0},
        {"stuck_after_s": 0.0},
        {"timeout_factor": 0.0},
    ],
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(UsageError):
        QueueSettings(**({"task_count": 1, "batch_counts": four} | wrong))


def test_the_lowest_valid_settings_are_accepted():
    QueueSettings(
        task_count=1,
        batch_counts=four,
        attempts_limit=1,
        confirmations=0,
        failed_limit=0,
        timeout_floor_s=0.5,
        stuck_after_s=0.5,
    )
