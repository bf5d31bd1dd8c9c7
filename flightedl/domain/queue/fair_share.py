"""Limit on the pieces that a trainer holds: enough to keep working while the master is briefly down, but no more.

A trainer may always hold two pieces: the running piece and the next one. These rules allow it to hold more:

* up to four short pieces, but no more than an equal share of the epoch's remaining tasks, both assigned and unassigned.
  The master answers a report only after it has stored it. In the meantime a trainer can finish several short tasks, so
  one task in reserve would not be enough;
* more pieces, if it requests them, up to its share: the epoch's unassigned tasks divided by twice the number of
  trainers (guided self-scheduling). Shares shrink toward the end of the epoch, so that all trainers finish at about the
  same time;
* at most ``HOLDING_CEILING`` pieces, and at most as many rows as fit into about 150 bytes in storage. Each request adds
  a row, so a trainer that requests only a few pieces at a time soon has to finish some of them before it gets more.
  Pieces requested together form a single row, however many there are.

After each report, a trainer aims for enough pieces to last for ``cover_s``, the time for which a master may be down. It
requests more pieces once a third of that number is missing, so it holds at most three rows. Because a third may be
missing at any time, the trainer aims for one and a half times as many pieces as it needs.

A trainer may get less than its share. It never gets more pieces than it requests.
"""

from __future__ import annotations

import math

from flightedl.domain.queue.backlog import Backlog

#: Number of pieces that a trainer may always hold, whatever its share.
HOLDING_FLOOR = 2
HOLDING_CEILING = 64
#: Number of short pieces that a trainer may hold, so that it does not run out of work before its report is answered.
_SHORT_FLOOR = 4
#: Usual time, in seconds, between a report and its reply.
_ANSWER_S = 0.1
#: A backlog gets no more rows once it takes up more integers in storage than three rows of complete tasks do.
_NUMBERS_LIMIT = 15


def may_hold_more(backlog: Backlog, todo: int, out: int, trainer_count: int, task_s: float | None) -> bool:
    """True if a trainer may get another piece.

    Args:
        backlog: The trainer's pieces.
        todo: Number of the epoch's complete tasks that are not assigned.
        out: Number of pieces assigned to all trainers.
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
    """Return how many pieces a trainer may hold regardless of its share, including the running piece."""
    if task_s is None:
        return HOLDING_FLOOR
    return min(max(1 + math.ceil(_ANSWER_S / max(task_s, 1e-3)), HOLDING_FLOOR), _SHORT_FLOOR)


def wanted_count(pace_s: float | None, cover_s: float) -> int:
    """Return the number of pieces that a trainer should aim to hold.

    Args:
        pace_s: Average seconds between two finished pieces; None if unknown.
        cover_s: Seconds for which the pieces should last; 0 if only the next piece is needed.
    """
    if pace_s is None:
        return HOLDING_FLOOR
    needed = min(math.ceil(cover_s / max(pace_s, 1e-3)), HOLDING_CEILING)
    return min(max(math.ceil(1.5 * needed), HOLDING_FLOOR), HOLDING_CEILING)


def count_to_ask_for(wanted: int, held: int) -> int:
    """Return how many pieces a trainer should request now; 0 if fewer than a third of its pieces are missing."""
    missing = wanted - held
    return missing if missing >= math.ceil(wanted / 3) else 0
