"""Repeats done tasks whose updates were lost with a pserver.

Reopened tasks are stored as runs of positions. There are usually few runs, because done tasks are contiguous in
*dispatch order*: all tasks below the cursor are done, except for a few open ones. A checkpoint contains the tasks that
were done at an earlier position of the cursor, so the tasks to reopen also form few runs, however many they are.

If there are more runs than the limit, for example because arbitrary tasks were reopened, the narrowest gaps between the
runs are reopened as well. This costs only time, because pservers answer repeated batches with "already applied". A gap
can be filled only if all of its tasks are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.state import QueueState
from flightedl.domain.queue.values import BatchRange
from flightedl.errors import UsageError

#: Maximum number of runs of reopened tasks in an epoch.
RUNS_LIMIT = 128

Stretches = Iterable[tuple[int, int]]


def reopen(state: QueueState, epoch: int, tasks: Stretches, parts: Mapping[int, Stretches]) -> int:
    """Reopen the done batches of ``tasks`` and ``parts`` (see ``TaskQueue.reopen``)."""
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
    """Return ``positions`` after filling the narrowest gaps, so that at most ``limit`` runs remain.

    Gaps that contain obstacles are not filled, so the result may have more than ``limit`` runs.
    """
    if positions.interval_count <= limit:
        return positions
    intervals = list(positions)
    gaps = [(end, start) for (_, end), (start, _) in pairwise(intervals)]
    gaps = [gap for gap in gaps if not obstacles.overlaps(*gap)]
    gaps.sort(key=lambda gap: gap[1] - gap[0])
    filled = sorted(gaps[: positions.interval_count - limit])
    # Rebuild the list once, because filling the gaps separately would move the rest of the list for each gap.
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
    """Validate the arguments of ``reopen``. Return (tasks, position -> batches) for tasks that have been assigned."""
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
                f"task {task} cannot be reopened in part: it is not in epoch {epoch + 1}, or is reopened completely"
            )
        position = state.order(epoch).position_of(task)
        count = state.batch_count(epoch, position)
        if batches.within(0, count) != batches:
            raise UsageError(f"task {task} has {count} batches, so only batches below {count} can be reopened")
        if position < state.begun(epoch):
            found[position] = batches
    return wanted, found


def _reopen_batches(state: QueueState, epoch: int, position: int, wanted: IntervalSet) -> int:
    """Reopen a task's batches that are done and in ``wanted``. Return 1 if there are any, otherwise 0."""
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
