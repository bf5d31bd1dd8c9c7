"""Whether a store that numbers its changes (etcd) is still the one that was seen, or has gone back.

Generations are revisions of etcd, and whoever has the higher one counts as newer. An etcd that is restored from an
older backup, or lost and begun again, counts again from a lower revision: a new process would look older than the one
that it replaces, and a late report of a lost process like the word of a newer one. So:

1. Whoever has seen a store never goes on with one of another cluster, nor with one that answers from a lower revision
   than had been seen when it was asked. That is final for the process (``Witness``).
2. A master begins only on a state that is as new as the newest checkpoint that names it (``older_than``).
3. When a job is resumed on such a store, its revisions go on in a new *life*: life L counts from L * 2**32. All
   processes of the job add that to what the store says, so generations, elections and conditions compare as before,
   and nothing of an earlier life is ever taken for something newer.

Not guaranteed: that a store is recognized which has overtaken, before it is asked, all that a process had seen; from a
backup that is only some writes old that is possible. What such a process then writes still names its own key. Nor that
a state is recognized as older which has forgotten only that its newest checkpoint is complete: where the one before was
swept by then, the job ends because no pserver finds a checkpoint, and goes on after ``forget`` with ``--resume``.
"""

from __future__ import annotations

from dataclasses import dataclass

#: More changes than most stores make while a job is trained, and few enough that the ids of members have room for
#: hundreds of lives. A store that makes more uses up several lives, see ``life_after``.
LIFE_REVISIONS = 1 << 32

_WHY = "it was restored from an older backup, or lost and begun again"


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen of a store at one time.

    Attributes:
        cluster: Its cluster's id, 16 hex digits.
        revision: Its revision, or a lower one.
    """

    cluster: str
    revision: int


def went_back(seen: Sighting, now: Sighting) -> str:
    """Why a store seen ``now`` does not go on from what was seen of it before; empty: it does."""
    if now.cluster != seen.cluster:
        return f"etcd is of cluster {now.cluster}, but cluster {seen.cluster} was seen before: {_WHY}"
    if now.revision < seen.revision:
        return f"etcd is at revision {now.revision}, but {seen.revision} was seen before: {_WHY}"
    return ""


class Witness:
    """What one process has seen of its store, and whether that still holds. Once it does not, it never does again."""

    def __init__(self) -> None:
        #: The highest that was seen; None: nothing yet.
        self.seen: Sighting | None = None
        #: Why the store is not the one that was seen; empty: it is.
        self.broken_because = ""

    def saw(self, before: Sighting | None, now: Sighting, *, is_current: bool = True) -> str:
        """An answer came; returns ``broken_because``.

        Args:
            before: ``seen`` at the time of the question: answers of several questions may come in any order.
            now: What the answer says.
            is_current: The answer is not older than the question, so that its revision proves something.
        """
        if before is not None and not self.broken_because:
            known = before if is_current else Sighting(before.cluster, 0)
            self.broken_because = went_back(known, now)
        if not self.broken_because and (self.seen is None or now.revision > self.seen.revision):
            self.seen = now
        return self.broken_because


@dataclass(frozen=True, slots=True)
class GoOn:
    """The job goes on in its present life."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nobody may go on from what the store says of the job; says why."""

    why: str


@dataclass(frozen=True, slots=True)
class BeginLife:
    """What the store says of the job is deleted, and it goes on from its newest checkpoint, in another life.

    Attributes:
        life: Its number.
        why: What the stored state is not to be trusted for; empty: there is none.
    """

    life: int
    why: str


def judge(
    present: Sighting,
    life: int,
    begun_on: str,
    next_number: int | None,
    newest_number: int,
    newest: Sighting | None,
    *,
    resume: bool,
) -> GoOn | Refuse | BeginLife:
    """What a master does that has the lock, before it reads anything of the job's state.

    Args:
        present: The store now; its revision counts all lives of the job.
        life: The present one.
        begun_on: The cluster on which it was begun; empty: not known.
        next_number: Of the stored state, see ``older_than``; None: there is no state of the job.
        newest_number: Likewise.
        newest: Likewise.
        resume: Whether the job is to go on from its newest checkpoint.
    """
    why = "" if next_number is None else older_than(present, begun_on, next_number, newest_number, newest)
    if why and not (resume and newest_number):
        return Refuse(why)
    has_fallen_behind = newest is not None and resume and next_number is None and is_behind(present, newest)
    if why or has_fallen_behind or begun_on not in {"", present.cluster}:
        return BeginLife(life_after(life, newest), why)
    return GoOn()


def older_than(present: Sighting, begun_on: str, next_number: int, newest_number: int, newest: Sighting | None) -> str:
    """Why the stored state of a job is older than its newest checkpoint, or not to be trusted; empty: it is neither.

    Args:
        present: The store now; its revision counts all lives of the job.
        begun_on: The cluster on which the state was begun; empty: not known.
        next_number: Of the stored state: it rises durably before a checkpoint of the number is begun.
        newest_number: Of the newest checkpoint that is complete; 0: there is none.
        newest: The store as the master saw it that wrote this checkpoint; None: not known.
    """
    if begun_on and begun_on != present.cluster:
        return f"etcd is of cluster {present.cluster}, but this job's state is of cluster {begun_on}: {_WHY}"
    if newest_number >= next_number:
        return f"etcd knows of no checkpoint from {next_number} on, but checkpoint {newest_number} is complete: {_WHY}"
    if newest is not None and present.revision < newest.revision:
        return (
            f"etcd is at revision {present.revision}, but was at {newest.revision} "
            f"when checkpoint {newest_number} was made: {_WHY}"
        )
    return ""


def is_behind(present: Sighting, newest: Sighting) -> bool:
    """Whether a job that is resumed from a checkpoint has to begin another life, to be newer than all before it."""
    return life_of(present.revision) <= life_of(newest.revision) and bool(went_back(newest, present))


def life_of(revision: int) -> int:
    """The life in which a job's revision lies."""
    return revision // LIFE_REVISIONS


def life_after(life: int, newest: Sighting | None) -> int:
    """A life later than the stored one, and than that of the newest checkpoint."""
    return max(life, 0 if newest is None else life_of(newest.revision)) + 1
