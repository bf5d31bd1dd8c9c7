"""How many pieces of work a trainer may hold: enough to ride through a time without a master, and nobody hoards.

Rules:

* Two, always: the one that runs and the next.
* Up to four of short ones, as long as that is no more than an equal share of all that is left of the epoch, held or
  not. A report is answered when it is stored; until then a trainer works off several tasks of a few batches, and would
  wait for the answer with only the next one in hand.
* More, as it asks, while enough is left for all others: its share is what is still todo in the epoch, over twice the
  number of trainers (guided self-scheduling). So shares shrink as the epoch goes to its end, and what is held then is
  about as much as everybody does in the same time.
* Never more than ``HOLDING_CEILING``, and never more rows than are stored in about 150 bytes. Whoever asks for few
  pieces at a time, while others ask too, gets a row for each, and soon no more until it has worked some off; whoever
  asks for many at once gets them as one row.

What a trainer asks for: after each report it should have as many pieces as it works through in ``cover_s``, the time
that a master may be away. It asks when a third of what it wants to hold is missing, and then for all of that, so that
it holds three rows at most. So it wants half as many again: two thirds of them are always there.

Not guaranteed: that a trainer gets its share; it gets as many as it asks for.
"""

from __future__ import annotations

import math

from flightedl.domain.queue.backlog import Backlog

#: A trainer may hold so many whatever is left.
HOLDING_FLOOR = 2
HOLDING_CEILING = 64
#: Of short ones, which are to last until a report is answered: about so long.
_SHORT_FLOOR = 4
_ANSWER_S = 0.1
#: With more stored numbers than those of three rows of whole tasks, a trainer gets no further row.
_NUMBERS_LIMIT = 15


def may_hold_more(backlog: Backlog, todo: int, out: int, trainer_count: int, task_s: float | None) -> bool:
    """Whether a trainer may be given one more piece.

    Args:
        backlog: What it holds.
        todo: Whole tasks of the epoch that nobody holds.
        out: Pieces that somebody holds, this trainer or another.
        trainer_count: Who shares them.
        task_s: How long a task runs; None: not known.
    """
    count = len(backlog.pieces)
    if count < HOLDING_FLOOR:
        return True
    if count < _floor(task_s) and count * trainer_count < todo + out:
        return True
    share = min(todo // (2 * trainer_count), HOLDING_CEILING)
    return count < share and backlog.number_count <= _NUMBERS_LIMIT


def _floor(task_s: float | None) -> int:
    """How many pieces a trainer may hold whatever others could do of them: the one that runs, and those behind it."""
    if task_s is None:
        return HOLDING_FLOOR
    return min(max(1 + math.ceil(_ANSWER_S / max(task_s, 1e-3)), HOLDING_FLOOR), _SHORT_FLOOR)


def wanted_count(pace_s: float | None, cover_s: float) -> int:
    """How many pieces a trainer wants to hold.

    Args:
        pace_s: From one finished piece to the next, on average; None: not known.
        cover_s: How long they should last at least; 0: only the next one has to be there.
    """
    if pace_s is None:
        return HOLDING_FLOOR
    needed = min(math.ceil(cover_s / max(pace_s, 1e-3)), HOLDING_CEILING)
    return min(max(math.ceil(1.5 * needed), HOLDING_FLOOR), HOLDING_CEILING)


def count_to_ask_for(wanted: int, held: int) -> int:
    """How many pieces a trainer asks for; 0: too few are missing."""
    missing = wanted - held
    return missing if missing >= math.ceil(wanted / 3) else 0
