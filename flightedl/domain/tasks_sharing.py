"""How many pieces of work a trainer may hold: enough to ride through a time without a master, and nobody hoards.

Rules:

* Two, always: the one that runs and the next.
* More, as it asks, while enough is left for all others: its share is what is still todo in the epoch, over twice the
  number of trainers (guided self-scheduling). So shares shrink as the epoch goes to its end, and what is held then is
  about as much as everybody does in the same time.
* Never more than ``HOLDING_CEILING``, and never more rows than are stored in about 150 bytes. Whoever asks for few
  pieces at a time, while others ask too, gets a row for each, and soon no more until it has worked some off; whoever
  asks for many at once gets them as one row.

Not guaranteed: that a trainer gets its share; it gets as many as it asks for.
"""

from __future__ import annotations

from flightedl.domain.tasks_lines import Line

#: A trainer may hold so many whatever is left.
HOLDING_FLOOR = 2
HOLDING_CEILING = 64
#: With more stored numbers than those of three rows of whole tasks, a trainer gets no further row.
_NUMBERS_LIMIT = 15


def may_hold_more(line: Line, todo: int, trainer_count: int) -> bool:
    """Whether a trainer may be given one more piece.

    Args:
        line: What it holds.
        todo: Whole tasks of the epoch that nobody holds.
        trainer_count: Who shares them.
    """
    count = len(line.pieces)
    if count < HOLDING_FLOOR:
        return True
    share = min(todo // (2 * trainer_count), HOLDING_CEILING)
    return count < share and line.number_count <= _NUMBERS_LIMIT
