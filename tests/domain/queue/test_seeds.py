"""Seeds of epochs if a resumed job gets another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flightedl.domain.queue.permutation import KeyedPermutation, key_of
from flightedl.domain.queue.seeds import EpochSeeds
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven
from flightedl.errors import CorruptError, UsageError

TASKS = 20
SETTINGS = QueueSettings(
    task_count=TASKS, batch_counts=lambda _: 2, epochs=3, seed=1, shuffle=True, is_deduplicated=False
)


def do(queue: TaskQueue, count: int = 10**9) -> list[tuple[int, int]]:
    """Let one trainer do up to ``count`` tasks; return (epoch, task) of each."""
    done: list[tuple[int, int]] = []
    while len(done) < count and isinstance(answer := queue.request("a", 0.0), TaskGiven):
        given = answer.assignment
        queue.finish("a", given.epoch, given.position, given.attempt, 0.0)
        queue.check()
        done.append((given.epoch, given.task))
    return done


def resumed(queue: TaskQueue, **changes: object) -> TaskQueue:
    """Return the queue that continues from the stored one, with a changed declaration."""
    return TaskQueue.decode(queue.encode(), replace(SETTINGS, **changes), may_reseed=True)  # type: ignore[arg-type]


def order_by(seed: int | None, epoch: int, first: int = 0, end: int = TASKS) -> list[tuple[int, int]]:
    """Return the tasks at these positions."""
    if seed is None:
        return [(epoch, task) for task in range(first, end)]
    permutation = KeyedPermutation(TASKS, key_of(seed, epoch))
    return [(epoch, permutation.at(position)) for position in range(first, end)]


# the seeds alone


def test_a_seed_is_valid_until_the_next_one() -> None:
    seeds = EpochSeeds([(0, 1)])
    seeds.change(3, None)
    seeds.change(5, 2)
    assert [seeds.find(epoch) for epoch in range(8)] == [1, 1, 1, None, None, 2, 2, 2]
    assert (seeds.rows, seeds.last) == ([(0, 1), (3, None), (5, 2)], 2)


def test_a_seed_that_was_never_used_is_forgotten() -> None:
    seeds = EpochSeeds([(0, 1)])
    seeds.change(3, 2)
    seeds.change(3, 4)
    assert seeds.rows == [(0, 1), (3, 4)]
    seeds.change(3, 1)
    assert seeds.rows == [(0, 1)]
    seeds.change(0, None)
    assert seeds.rows == [(0, None)]


# the queue


def test_a_running_epoch_keeps_its_seed_and_the_next_one_has_the_new_one() -> None:
    queue = TaskQueue(SETTINGS)
    assert do(queue, 7) == order_by(1, 0, 0, 7)
    queue = resumed(queue, seed=2)
    assert [queue.seed_of(epoch) for epoch in range(4)] == [1, 2, 2, 2]
    assert do(queue) == order_by(1, 0, 7) + order_by(2, 1) + order_by(2, 2)


@pytest.mark.parametrize("done", [0, TASKS, 3 * TASKS])
def test_an_epoch_that_has_not_begun_has_the_new_seed_at_once(done: int) -> None:
    queue = TaskQueue(SETTINGS)
    do(queue, done)
    queue = resumed(queue, seed=2, epochs=4)
    first = done // TASKS
    assert do(queue) == [each for epoch in range(first, 4) for each in order_by(2, epoch)]


def test_an_epoch_with_an_assigned_task_has_begun() -> None:
    queue = TaskQueue(SETTINGS)
    assert isinstance(queue.request("gone", 0.0), TaskGiven)
    queue = resumed(queue, seed=2)
    queue.trainer_departed("gone", 0.0, is_graceful=True)
    assert do(queue, TASKS) == order_by(1, 0)


@pytest.mark.parametrize(("before", "now"), [(None, 5), (5, None)])
def test_shuffling_may_begin_and_end(before: int | None, now: int | None) -> None:
    queue = TaskQueue(replace(SETTINGS, seed=before or 0, shuffle=before is not None))
    do(queue, 3)
    queue = resumed(queue, seed=now or 0, shuffle=now is not None)
    assert do(queue) == order_by(before, 0, 3) + order_by(now, 1) + order_by(now, 2)


def test_seeds_may_change_again_and_survive_a_takeover() -> None:
    queue = TaskQueue(SETTINGS)
    do(queue, 1)
    queue = resumed(queue, seed=2)
    do(queue, TASKS)
    queue = resumed(queue, seed=3)
    again = TaskQueue.decode(queue.encode(), replace(SETTINGS, seed=3))
    assert [again.seed_of(epoch) for epoch in range(3)] == [1, 2, 3]
    assert do(again) == do(queue) == order_by(2, 1, 1) + order_by(3, 2)


def test_a_repeated_epoch_keeps_its_seed() -> None:
    """Tasks keep their positions, so the right ones are reopened."""
    queue = TaskQueue(SETTINGS)
    do(queue, TASKS + 3)
    queue = resumed(queue, seed=2)
    do(queue, TASKS)
    assert queue.epoch == 2
    for epoch, seed in ((0, 1), (1, 1), (2, 2)):
        handed_out = order_by(seed, epoch, 0, 3)
        assert queue.reopen(epoch, sorted((task, task + 1) for _, task in handed_out)) == 3
        assert do(queue, 3) == handed_out
    assert do(queue) == order_by(2, 2, 3)


def test_the_same_seed_changes_nothing() -> None:
    queue = TaskQueue(SETTINGS)
    do(queue, 30)
    assert resumed(queue).encode() == queue.encode()
    assert resumed(queue, seed=1 + 2**64).encode() == queue.encode(), "seeds are taken modulo 2**64"


def test_the_same_history_gives_the_same_order() -> None:
    def history() -> list[tuple[int, int]]:
        queue = TaskQueue(SETTINGS)
        done = do(queue, 13)
        queue = resumed(queue, seed=2)
        done += do(queue, 13)
        queue = resumed(queue, seed=3)
        return done + do(queue)

    assert history() == history()
    assert sorted(history()) == [(epoch, task) for epoch in range(3) for task in range(TASKS)]


def test_a_takeover_must_not_change_the_seed() -> None:
    queue = TaskQueue(SETTINGS)
    do(queue, 3)
    again = resumed(queue, seed=2)
    for settings in (SETTINGS, replace(SETTINGS, seed=3), replace(SETTINGS, seed=2, shuffle=False)):
        with pytest.raises(UsageError, match="is shuffled by seed 2, but the dataset is declared as"):
            TaskQueue.decode(again.encode(), settings)


@pytest.mark.parametrize("seeds", [[], [[1, 5]], [[0, 1], [0, 2]], [[0, 1], [2, 5]], [[0, 1], [1, 2], [1, 3]]])
def test_impossible_seeds_are_refused(seeds: list[list[int]]) -> None:
    document = json.loads(TaskQueue(SETTINGS).encode())
    document["dispatch"]["seeds"] = seeds
    with pytest.raises(CorruptError, match="impossible seeds"):
        TaskQueue.decode(json.dumps(document).encode(), SETTINGS, may_reseed=True)
