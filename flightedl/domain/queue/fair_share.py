"""Number of pieces that a trainer may hold: enough to continue without a master for a while, without hoarding.

A trainer may always hold two pieces: the running one and the next. It may hold

* up to four short pieces, if that is at most an equal share of the epoch's remaining tasks, assigned or not. The master
  answers a report only when it is stored. Until then a trainer finishes several short tasks, and with only one task in
  reserve it would wait for the answer;
* more, if it asks for them, up to its share: the epoch's unassigned tasks divided by twice the number of trainers
  (guided self-scheduling). Shares shrink toward the end of the epoch, so that all trainers finish at about the same
  time;
* at most ``HOLDING_CEILING`` pieces, and at most as many rows as fit into about 150 stored bytes. A trainer that asks
  for a few pieces at a time gets a row for each request, and soon has to finish some pieces first. Many pieces
  requested together are one row.

A trainer requests enough pieces to last for ``cover_s``, the time for which a master may be down, after each report. It
requests all missing pieces as soon as a third is missing, so it holds at most three rows. As two thirds are always
present, the number of pieces that it wants is one and a half times the number that it needs.

Not guaranteed: that a trainer gets its share. It gets no more than it requests.
"""

from __future__ import annotations

import math

from flightedl.domain.queue.backlog import Backlog

#: Number of pieces that a trainer may always hold.
HOLDING_FLOOR = 2
HOLDING_CEILING = 64
#: Number of short pieces that a trainer may hold, so that they last until a report is answered.
_SHORT_FLOOR = 4
#: Typical seconds until a report is answered.
_ANSWER_S = 0.1
#: A backlog with more stored numbers than three rows of complete tasks gets no further row.
_NUMBERS_LIMIT = 15


def may_hold_more(backlog: Backlog, todo: int, out: int, trainer_count: int, task_s: float | None) -> bool:
    """True if a trainer may get one more piece.

    Args:
        backlog: The trainer's pieces.
        todo: Number of the epoch's complete tasks that are not assigned.
        out: Number of assigned pieces of all trainers.
        trainer_count: Number of trainers that share the tasks.
        task_s: Average seconds per task; None if unknown.
    """
    count = len(backlog.pieces)
    if count < HOLDING_FLOOR:
        return True
    if count < _floor(task_s) and count * trainer_count < todo + out:
        return True
    share = min(todo // (2 * trainer_count), HOLDING_CEILING)
    return count < share and backlog.number_count <= _NUMBERS_LIMIT


def _floor(task_s: float | None) -> int:
    """Return how many pieces a trainer may hold regardless of its share, including the running one."""
    if task_s is None:
        return HOLDING_FLOOR
    return min(max(1 + math.ceil(_ANSWER_S / max(task_s, 1e-3)), HOLDING_FLOOR), _SHORT_FLOOR)


def wanted_count(pace_s: float | None, cover_s: float) -> int:
    """Return how many pieces a trainer should hold.

    Args:
        pace_s: Average seconds between two finished pieces; None if unknown.
        cover_s: Seconds for which the pieces should last; 0 if only the next piece is needed.
    """
    if pace_s is None:
        return HOLDING_FLOOR
    needed = min(math.ceil(cover_s / max(pace_s, 1e-3)), HOLDING_CEILING)
    return min(max(math.ceil(1.5 * needed), HOLDING_FLOOR), HOLDING_CEILING)


def count_to_ask_for(wanted: int, held: int) -> int:
    """Return how many pieces a trainer should request; 0 if fewer than a third are missing."""
    missing = wanted - held
    return missing if missing >= math.ceil(wanted / 3) else 0
