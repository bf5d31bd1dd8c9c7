"""Combines a pserver's answers for its buckets, because a trainer treats all rows of a pserver as one block.

A pserver answers separately for ranges of buckets. Usually it has one range, or several if their histories differ. The
combined answer names a single block, whose number is that of the pserver's first bucket. Its outcome is

* "too late" or "not a member" if any range gives this answer;
* the batches that the ranges already have, if a range rejected a sum;
* in all other cases, "applied" with the lowest version, once all ranges have answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flightedl.domain.trainer.transfers import Answer
from flightedl.messages.parameters import Outcome

_TOO_LATE = (Outcome.NOT_MEMBER, Outcome.STALE)


def joined_answers(answers: Iterable[Answer], buckets: range) -> list[Answer]:
    """Return a pserver's answers with a single block that represents all of its buckets.

    Args:
        answers: As received.
        buckets: All buckets of the pserver, as positions of the plan.
    """
    found: list[Answer] = []
    of_buckets: list[Answer] = []
    for answer in answers:
        (of_buckets if answer.begin in buckets else found).append(answer)
    return found + _joined(of_buckets, buckets) if of_buckets else found


def _joined(answers: Sequence[Answer], buckets: range) -> list[Answer]:
    block, after, count = buckets.start, buckets.start + 1, len(buckets)
    outcomes = {answer.outcome for answer in answers} - {Outcome.NONE}
    with_outcome = sum(answer.end - answer.begin for answer in answers if answer.outcome != Outcome.NONE)
    versions = {(answer.begin, answer.end): answer.version for answer in answers if answer.version is not None}
    version = min(versions.values()) if sum(end - begin for begin, end in versions) == count else None
    if late := [outcome for outcome in _TOO_LATE if outcome in outcomes]:
        return [Answer(block, after, late[0])]
    if Outcome.PARTLY_APPLIED in outcomes:
        having = sorted({answer.having for answer in answers if answer.outcome == Outcome.PARTLY_APPLIED})
        return [Answer(block, after, Outcome.PARTLY_APPLIED, None, bits) for bits in having if with_outcome == count]
    if with_outcome == count:
        has_new = Outcome.ACCEPTED in outcomes
        return [Answer(block, after, Outcome.ACCEPTED if has_new else Outcome.ALREADY_APPLIED, version)]
    return [] if version is None or with_outcome else [Answer(block, after, Outcome.NONE, version)]
