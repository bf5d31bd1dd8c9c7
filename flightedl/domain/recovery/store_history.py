"""Detects an etcd that was restored from an older state.

Generations are revisions of etcd, and higher generations count as newer. If etcd is restored from an older backup, or
lost and recreated, its revisions continue from a lower number. A new process then looks older than the one that it
replaces, and a late report of a lost process looks current. Therefore:

* A process permanently stops using a store that belongs to another cluster, or that answers with a lower revision than
  one that the process has seen before (``Witness``).
* A master starts only if the stored state is at least as new as the newest checkpoint that refers to this store
  (``older_than``).
* A job that is resumed on such a store begins a new *life*. In life L, all processes of the job add L * 2**32 to the
  store's revisions. Generations, elections and conditions from different lives thus remain comparable, and earlier
  lives count as older.

A process does not detect an older store if the store's revision has grown beyond all revisions that the process has
seen before the process asks again. This can happen if the backup is only a few writes old. The process's writes still
require its own key.

A state that lacks only the completion of the newest checkpoint is not detected either. If the previous checkpoint has
been deleted, pservers then find no checkpoint, and the job fails. It can be continued with ``forget`` and then
``--resume``.
"""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.marks import sometimes

#: Revisions per life. Few stores need more during a job, and a member id has room for hundreds of lives. A store with
#: more revisions uses several lives (see ``life_after``).
LIFE_REVISIONS = 1 << 32

_WHY = "it was restored from an older backup, or lost and recreated"


@dataclass(frozen=True, slots=True)
class Sighting:
    """An observation of a store.

    Attributes:
        cluster: The id of its cluster, 16 hex digits.
        revision: Its revision, or a lower revision.
    """

    cluster: str
    revision: int


def rollback_reason(seen: Sighting, now: Sighting) -> str:
    """Return why the store as observed ``now`` does not continue the store ``seen`` before; empty if it does."""
    if now.cluster != seen.cluster:
        return f"etcd has cluster id {now.cluster}, but had {seen.cluster} before: {_WHY}"
    if now.revision < seen.revision:
        return f"etcd is at revision {now.revision}, but was at {seen.revision} before: {_WHY}"
    return ""


class Witness:
    """One process's observations of its store. Once the store fails to continue them, it is rejected permanently."""

    def __init__(self) -> None:
        #: The observation with the highest revision; None before the first one.
        self.seen: Sighting | None = None
        #: Why the store does not continue the observed one; empty if it does.
        self.broken_because = ""

    def saw(self, before: Sighting | None, now: Sighting, *, is_current: bool = True) -> str:
        """Record an answer of the store, and return ``broken_because``.

        Args:
            before: ``seen`` at the time of the request, because answers may arrive in any order.
            now: Observation from the answer.
            is_current: True if the answer is not older than the request, so a lower revision is significant.
        """
        if before is not None and not self.broken_because:
            known = before if is_current else Sighting(before.cluster, 0)
            self.broken_because = rollback_reason(known, now)
        if not self.broken_because and (self.seen is None or now.revision > self.seen.revision):
            self.seen = now
        return self.broken_because


@dataclass(frozen=True, slots=True)
class GoOn:
    """The job continues in its current life."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The job must not continue from the stored state, for this reason."""

    why: str


@dataclass(frozen=True, slots=True)
class BeginLife:
    """The stored state must be deleted. The job then continues from its newest checkpoint, in a new life.

    Attributes:
        life: Number of the new life.
        why: Reason why the stored state is invalid; empty if there is none.
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
    """Decide if a master that has acquired the lock may use the job's stored state.

    Args:
        present: The current store, with a revision that includes all lives of the job.
        life: Number of the current life.
        begun_on: Cluster on which the life began; empty if unknown.
        next_number: As in ``older_than``; None if there is no stored state.
        newest_number: As in ``older_than``.
        newest: As in ``older_than``.
        resume: True if the job should continue from its newest checkpoint.
    """
    why = "" if next_number is None else older_than(present, begun_on, next_number, newest_number, newest)
    if why and not (resume and newest_number):
        sometimes("the state of an etcd that went back was refused")
        return Refuse(why)
    has_fallen_behind = newest is not None and resume and next_number is None and needs_new_life(present, newest)
    if why or has_fallen_behind or begun_on not in {"", present.cluster}:
        sometimes("a job began a new life")
        return BeginLife(life_after(life, newest), why)
    return GoOn()


def older_than(present: Sighting, begun_on: str, next_number: int, newest_number: int, newest: Sighting | None) -> str:
    """Return why a job's stored state is invalid or older than its newest checkpoint; empty if it is usable.

    Args:
        present: The current store, with a revision that includes all lives of the job.
        begun_on: Cluster on which the state was created; empty if unknown.
        next_number: Number of the next checkpoint, from the stored state. It is increased there before that checkpoint
            begins.
        newest_number: Number of the newest complete checkpoint; 0 if there is none.
        newest: The store as seen by the master that wrote this checkpoint; None if unknown.
    """
    if begun_on and begun_on != present.cluster:
        return f"etcd has cluster id {present.cluster}, but this job's state belongs to cluster {begun_on}: {_WHY}"
    if newest_number >= next_number:
        return f"etcd expects checkpoint {next_number} next, but checkpoint {newest_number} is already complete: {_WHY}"
    if newest is not None and present.revision < newest.revision:
        return (
            f"etcd is at revision {present.revision}, but was at {newest.revision} "
            f"when checkpoint {newest_number} was written: {_WHY}"
        )
    return ""


def needs_new_life(present: Sighting, newest: Sighting) -> bool:
    """True if a job resumed from a checkpoint must begin a new life to be newer than all earlier states."""
    return life_of(present.revision) <= life_of(newest.revision) and bool(rollback_reason(newest, present))


def life_of(revision: int) -> int:
    """Return the life to which a revision of a job belongs."""
    return revision // LIFE_REVISIONS


def life_after(life: int, newest: Sighting | None) -> int:
    """Return a life that is later than the stored life and the newest checkpoint's life."""
    return max(life, 0 if newest is None else life_of(newest.revision)) + 1
