"""Makes done tasks todo again, after the updates of some batches were lost with a pserver.

Derivation. What is done lies mostly together in *dispatch order*, whatever the order of the tasks is: everything below
the cursor but the few pieces that are open. What a checkpoint holds was done at some earlier cursor. So the difference
is a few runs of positions, however many tasks it is, and this is how it waits. Where it is not, as after a request to
reopen arbitrary tasks, the narrowest gaps between runs are reopened as well, until few enough runs are left: a batch
that is done twice is answered "already applied", so that costs time and nothing else. A gap is only filled when all
of it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.state import QueueState
from flightedl.domain.queue.values import BatchRange
from flightedl.errors import UsageError

#: Runs of reopened tasks that one epoch may have.
RUNS_LIMIT = 128

Stretches = Iterable[tuple[int, int]]


def reopen(state: QueueState, epoch: int, tasks: Stretches, parts: Mapping[int, Stretches]) -> int:
    """Reopen what is done of ``tasks`` and ``parts``, see ``TaskQueue.reopen``."""
    wanted, batches = _checked(state, epoch, tasks, parts)
    positions = state.order(epoch).positions(wanted).within(0, state.begun(epoch))
    blocked = state.incomplete_positions(epoch)
    for position in sorted(blocked):
        if position in positions:
            batches[position] = IntervalSet([(0, state.batch_count(epoch, position))])
    blocked |= batches.keys()
    positions.difference_update((position, position + 1) for position in blocked)
    never_failed = state.waiting.unfailed(epoch)
    failed = [(start, end) for place, start, end, failures in state.waiting.runs if place == epoch and failures]
    positions.difference_update((*never_failed, *failed))
    reopened = positions.size
    if positions:
        positions.update(never_failed)
        obstacles = IntervalSet.of(blocked)
        obstacles.update(failed)
        state.waiting.replace_unfailed(epoch, with_gaps_filled(positions, obstacles, RUNS_LIMIT))
        lost = state.waiting.unfailed(epoch)
        lost.difference_update(never_failed)
        state.due.setdefault(epoch, IntervalSet()).update(lost)
    for position, stretch in batches.items():
        reopened += _reopen_batches(state, epoch, position, stretch)
    if reopened:
        state.revision += 1
    return reopened


def with_gaps_filled(positions: IntervalSet, obstacles: IntervalSet, limit: int) -> IntervalSet:
    """``positions`` with the narrowest gaps filled that hold no obstacle, until there are at most ``limit`` runs.

    More are left only where obstacles are in the way.
    """
    if positions.interval_count <= limit:
        return positions
    intervals = list(positions)
    gaps = [(end, start) for (_, end), (start, _) in pairwise(intervals)]
    gaps = [gap for gap in gaps if not obstacles.overlaps(*gap)]
    gaps.sort(key=lambda gap: gap[1] - gap[0])
    filled = sorted(gaps[: positions.interval_count - limit])
    # Rebuilt in one go: filling one by one would move the list's tail each time.
    joined = dict(filled)
    merged: list[tuple[int, int]] = []
    for start, end in intervals:
        if merged and joined.get(merged[-1][1]) == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return IntervalSet(merged)


def _checked(
    state: QueueState, epoch: int, tasks: Stretches, parts: Mapping[int, Stretches]
) -> tuple[IntervalSet, dict[int, IntervalSet]]:
    """(tasks, position -> batches of begun tasks) that are meant."""
    size = state.epoch_size(epoch)
    try:
        wanted = IntervalSet(tasks)
        stretches = {task: IntervalSet(batches) for task, batches in parts.items()}
    except ValueError as error:
        raise UsageError(f"this cannot be reopened: {error}") from None
    if wanted.within(0, size) != wanted:
        raise UsageError(f"epoch {epoch + 1} has {size} tasks, so only tasks below {size} can be reopened")
    found: dict[int, IntervalSet] = {}
    for task, batches in stretches.items():
        if not 0 <= task < size or task in wanted:
            raise UsageError(
                f"task {task} cannot be reopened in part: it is not in epoch {epoch + 1}, or reopened whole"
            )
        position = state.order(epoch).position_of(task)
        count = state.batch_count(epoch, position)
        if batches.within(0, count) != batches:
            raise UsageError(f"task {task} has {count} batches, so only batches below {count} can be reopened")
        if position < state.begun(epoch):
            found[position] = batches
    return wanted, found


def _reopen_batches(state: QueueState, epoch: int, position: int, wanted: IntervalSet) -> int:
    """Reopen those of some batches of one task that are done; 1 if there are any."""
    done = wanted.copy()
    for batches in (*state.open_batches(epoch, position), *state.failed.at((epoch, position))):
        done.difference_update(batches)
    if not done:
        return 0
    count = state.batch_count(epoch, position)
    for first, end in done:
        state.waiting.put(BatchRange(epoch, position, first, end, count))
    state.due.setdefault(epoch, IntervalSet()).add(position, position + 1)
    state.finished_parts.pop((epoch, position), None)
    return 1
