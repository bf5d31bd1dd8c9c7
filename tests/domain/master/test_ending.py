"""A stopped job: begun tasks are completed before the end, or the job reports that they are not."""

from __future__ import annotations

import pytest

from flightedl.domain.master import events
from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.ending import ALONE_S
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import UsageError
from flightedl.messages.control import AppliedReply, AppliedRequest
from flightedl.messages.tasks import StopRequest

from .test_core import PSERVER, A, B, Bench


def stopped_after_a_loss() -> Bench:
    """One of four tasks was done when the pserver restarted without it; then a trainer stops the job."""
    bench = Bench(tasks=4)
    bench.serve()
    bench.finish(bench.take())
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    bench.now += 1.0
    bench.serve(PSERVER + 1)
    bench.call(StopRequest(trainer="a", generation=A, reason="a test"))
    return bench


def queue_of(bench: Bench) -> TaskQueue:
    assert bench.core.work is not None
    return bench.core.work.queue


def test_a_stopped_job_repeats_lost_tasks() -> None:
    bench = stopped_after_a_loss()
    again = bench.take("b", B)
    assert bench.reply(bench.ask()).outcome == "none_now", "no new task is begun"
    bench.finish(again, by=PSERVER + 1, trainer="b", generation=B)
    bench.now += 1.0
    bench.serve(PSERVER + 1, done={0: bytes([1 << again.task])})
    assert bench.reply(bench.ask()).outcome == "epochs_done"


def test_the_successor_of_a_stopped_job_repeats_lost_tasks() -> None:
    queue = queue_of(stopped_after_a_loss())
    successor = TaskQueue.decode(queue.encode(), queue.settings)
    successor.stop()
    given = successor.request("b", 0.0)
    assert isinstance(given, TaskGiven)
    successor.finish("b", 0, given.assignment.position, given.assignment.attempt, 1.0)
    assert successor.is_over


def test_a_stopped_job_that_no_trainer_finishes_names_its_tasks() -> None:
    bench = stopped_after_a_loss()
    ((epoch, task),) = queue_of(bench).unfinished(5)
    bench.see({}, {0: PSERVER + 1})
    bench.now += ALONE_S - 0.1
    bench.apply(events.TimePassed())
    assert not bench.core.ending.unfinished
    bench.now += 0.2
    bench.apply(events.TimePassed())
    assert f"tasks {task} of epoch {epoch + 1}" in bench.core.ending.unfinished
    # A trainer that only waits for the end learns of it; one that asks for tasks gets them.
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    assert isinstance(bench.reply(bench.ask(want=0)), UsageError)
    assert bench.take().task == task
    assert not bench.core.ending.unfinished


def test_a_stopped_job_waits_for_its_pservers() -> None:
    bench = Bench(tasks=4)
    bench.serve()
    bench.finish(bench.take())
    bench.call(StopRequest(trainer="a", generation=A, reason="a test"))
    bench.see({}, {})
    assert not bench.core.ending.may_end
    bench.now += ALONE_S + 0.1
    bench.apply(events.TimePassed())
    assert "some pservers have been missing" in bench.core.ending.unfinished


def test_a_job_that_is_not_stopped_waits_for_trainers() -> None:
    bench = Bench(tasks=4)
    bench.now += 10 * ALONE_S
    bench.apply(events.TimePassed())
    assert not bench.core.ending.unfinished


ALL_OF_1 = AppliedSummary(done={0: b"\x02"})


@pytest.mark.parametrize(
    ("one", "other", "torn"),
    [
        (ALL_OF_1, ALL_OF_1, []),
        (ALL_OF_1, AppliedSummary(), [1]),
        (ALL_OF_1, AppliedSummary(parts={0: {1: b"\x01"}}), [1]),
        (AppliedSummary(parts={0: {2: b"\x01"}}), AppliedSummary(parts={0: {2: b"\x01"}}), []),
        (AppliedSummary(parts={0: {2: b"\x01"}}), AppliedSummary(parts={0: {2: b"\x03"}}), [2]),
        (AppliedSummary(parts={0: {2: b"\x01"}}), AppliedSummary(), [2]),
        (AppliedSummary(parts={0: {2: b""}}), AppliedSummary(parts={0: {2: b""}}), [2]),
        (AppliedSummary(parts={0: {2: b"\x01"}}), AppliedSummary(has_blocks=False), []),
    ],
)
def test_a_task_that_only_some_blocks_have_applied_is_claimed(
    one: AppliedSummary, other: AppliedSummary, torn: list[int]
) -> None:
    pservers, queue = Pservers(2, "replay", None, Outbox()), TaskQueue(QueueSettings(4, lambda _: 2))
    for _ in range(3):
        queue.request("a", 0.0, 4, generation=A)
    queue.trainer_departed("a", 0.0, is_graceful=True)
    queue.stop()
    assert queue.is_over, "nothing was done, so nothing was lost"
    for index in range(2):
        pservers.seen(index, PSERVER)
        pservers.answered(index, PSERVER, None, AppliedReply(summary=AppliedSummary().encode()), queue)
    pservers.begin_audit(queue, is_last=True)
    for index, summary in enumerate((one, other)):
        _, audit = pservers.must_be_audited(index, PSERVER)
        pservers.answered(index, PSERVER, audit, AppliedReply(summary=summary.encode()), queue)
    assert queue.unfinished(5) == [(0, task) for task in torn]
    assert queue.is_over == pservers.is_audited(queue) == (not torn)
    queue.check()


def test_a_model_that_is_initialized_again_starts_with_the_first_epoch() -> None:
    bench = Bench(tasks=2, epochs=2)
    bench.serve()
    bench.finish(bench.take())
    bench.finish(bench.take())
    assert queue_of(bench).epoch == 1
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    bench.now += 1.0
    lost = AppliedReply(summary=AppliedSummary().encode(), lacks_election=5)
    bench.apply(events.Answered(0, PSERVER + 1, AppliedRequest(plan_hash=""), lost))
    assert bench.take().epoch == 0, "even before a pserver has answered"
