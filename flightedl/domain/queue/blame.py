"""Attribution of failures to the piece, the trainer, the script, or none of them.

Rules, in which k is ``attempts_limit``, and "k different batches" are at least two:

* Trainers are told apart by a *name* that outlives their process (``TasksTicket.witness``). However often a name fails
  at a piece, it is one *witness*, and only from its k-th failure on. If the name is unknown, the number of failures
  alone decides (see ``bisection``).
* A piece is convicted by two witnesses, by one that has processed something else since its k-th failure, or by one
  that has processed anything in this job once ``stand_still_s`` have passed. If the decoder calls it corrupt, it needs
  no witness. The store may fail for any piece, so two witnesses do not suffice for its errors.
* A trainer that fails k times with nothing done between is *in doubt*: it waits between attempts. Something is done
  between two failures if a piece is finished, or if the second is not at its piece's first batch.
* Failures of a trainer in doubt convict no piece if they occurred at k different batches, or, for errors of the store,
  at different tasks. After ``stand_still_s`` the trainer has to end, alone. If this is so for every trainer, the queue
  *stands still*, and after ``stand_still_s`` the job ends with nothing set aside.
* If the user's code has raised the same error in every trainer, at k different batches with nothing done between, the
  script is at fault, and the job ends at once.

Trainers that have died count until ``stand_still_s`` have passed. Only witnesses against suspect pieces are stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from flightedl.domain.queue.values import BatchRange, Failure
from flightedl.errors import JobFailedError, TrainerFailedError

#: Faults, other than those of the user's code and of the machine.
STORE, DECODER, LOST = "store", "decoder", "lost"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
#: Idle trainers ask more often than this.
_PRESENT_S = 10.0
_NAMES_LIMIT = 1_000

#: (epoch, position, first batch) of a piece, or (epoch, position, batch).
Place = tuple[int, int, int]
#: Stored witness: (name, failures, 0 or 1 if it has processed anything in this job or 2 if since its k-th failure).
Testimony = tuple[str, int, int]


@dataclass(slots=True)
class _Trainer:
    """The trainers with one name."""

    #: Number of times that they have processed something, and the time of their last request.
    done: int = 0
    asked_at: float = -math.inf
    #: Failures since they last processed something, and the batches at which they failed.
    failures: int = 0
    batches: set[Place] = field(default_factory=set)
    last: Failure = field(default_factory=lambda: Failure(""))
    since_s: float = 0.0
    not_before: float = 0.0
    #: True if these failures may convict pieces.
    is_believed: bool = True
    #: Id of the process that has to end; empty if none has to.
    ended: str = ""

    def acquit(self) -> None:
        self.failures, self.batches, self.not_before, self.is_believed, self.ended = 0, set(), 0.0, True, ""

    def succeed(self) -> None:
        self.done += 1
        self.acquit()


@dataclass(slots=True)
class Suspicion:
    """The failures at one piece."""

    #: Name -> (number of failures, ``done`` of the trainer at its k-th failure).
    names: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Time of the first k-th failure that this master knows.
    since_s: float | None = None


class Blame:
    """Failures of one queue.

    Args:
        limit: The number k.
        stand_still_s: Seconds for which trainers may fail with nothing done before they, or the job, have to end.
    """

    __slots__ = ("_limit", "_stand_still_s", "_suspicions", "_trainers", "_various", "broken", "names")

    def __init__(self, limit: int, stand_still_s: float) -> None:
        self._limit = limit
        #: Number of different batches at which failures show that no single batch is at fault.
        self._various = max(limit, 2)
        self._stand_still_s = stand_still_s
        #: Id of each live trainer that has asked for work -> its name.
        self.names: dict[str, str] = {}
        self._trainers: dict[str, _Trainer] = {}
        self._suspicions: dict[Place, Suspicion] = {}
        #: Reason why the job has to end; empty if it may continue.
        self.broken = ""

    # trainers

    def asked(self, trainer: str, name: str, now: float) -> tuple[float, Collection[Place]]:
        """Return the seconds for which a trainer that asks for work has to wait, and the batches at which it failed.

        Raises:
            JobFailedError: the job has to end.
            TrainerFailedError: this trainer has to end.
        """
        if self.broken:
            raise JobFailedError(self.broken)
        self.meet(trainer, name, now)
        if (known := self._of(trainer)) is None:
            return 0.0, ()
        if known.ended and known.ended != trainer:
            known.acquit()
        if known.ended:
            raise TrainerFailedError(
                f"this trainer ({name}) has failed {known.failures} times in a row, and processed nothing for "
                f"{self._stand_still_s:g} s (stand_still_s): {known.last.error}"
            )
        return max(known.not_before - now, 0.0), known.batches

    def meet(self, trainer: str, name: str, now: float) -> None:
        """Record the name of a trainer that asks for work or reports some; empty if it is unknown."""
        if name:
            self.names[trainer] = name
            self._trainers.setdefault(name, _Trainer()).asked_at = now
        if len(self._trainers) > _NAMES_LIMIT:
            del self._trainers[min(self._trainers, key=lambda each: self._trainers[each].asked_at)]

    def _of(self, trainer: str) -> _Trainer | None:
        return self._trainers.get(self.names.get(trainer, ""))

    def succeeded(self, trainer: str) -> None:
        if (known := self._of(trainer)) is not None:
            known.succeed()

    @property
    def in_doubt(self) -> dict[str, str]:
        """Name -> last error, for the names that have failed since they last processed something."""
        return {name: each.last.error for name, each in self._trainers.items() if each.failures}

    @property
    def ended(self) -> list[str]:
        """Names of the trainers that have to end."""
        return [name for name, each in self._trainers.items() if each.ended]

    def waits_for(self, trainer: str = "") -> str:
        """Return why no trainer gets work, or why this trainer gets none; empty if there is no such reason."""
        known, asking = self._of(trainer), self._asking()
        if asking and not any(each.is_believed for each in asking):
            return f"the data: {max(asking, key=lambda each: each.since_s).last.error}"
        if known is None or known.failures < self._limit:
            return ""
        return f"a new attempt, because this trainer has failed {known.failures} times in a row: {known.last.error}"

    def _asking(self) -> list[_Trainer]:
        live = set(self.names.values())
        since = max((each.asked_at for each in self._trainers.values()), default=0.0) - self._stand_still_s
        return [each for name, each in self._trainers.items() if name in live or each.asked_at >= since]

    # pieces

    def failed(self, trainer: str, piece: BatchRange, failure: Failure, now: float) -> bool:
        """Record a failure. Return False if the failure does not count against the piece."""
        known = self._of(trainer)
        if known is None or failure.fault == DECODER:
            return True
        if failure.fault != LOST and not self._note(known, trainer, piece, failure, now):
            return False
        name, names = self.names[trainer], self._suspicions.setdefault(_place(piece), Suspicion()).names
        if name not in names and len(names) >= self._limit:
            del names[min(names, key=lambda each: names[each][0])]
        failures, done = names.get(name, (0, 0))
        names[name] = failures + 1, known.done if failures < self._limit else done
        return True

    def _note(self, known: _Trainer, trainer: str, piece: BatchRange, failure: Failure, now: float) -> bool:
        """Record a failure of a trainer. Return True if the failure also counts against the piece."""
        batch = piece.first_batch if failure.batch is None else failure.batch
        if batch > piece.first_batch:
            known.succeed()
        known.since_s = known.since_s if known.failures else now
        known.failures += 1
        known.last = failure
        known.batches.add((piece.epoch, piece.position, batch))
        over_at, excess = known.since_s + self._stand_still_s, known.failures - self._limit
        if excess >= 0:
            tasks = {each[:2] for each in known.batches}
            known.is_believed = len(tasks) < 2 if failure.fault == STORE else len(known.batches) < self._various
            pause_s = _FIRST_PAUSE_S * (1.0 if known.is_believed else 2.0 ** min(excess, 10))
            known.not_before = now + min(pause_s, _LONGEST_PAUSE_S, max(over_at - now, _FIRST_PAUSE_S))
            # If the piece may be convicted, this is decided first.
            known.ended = trainer if now >= over_at and not (known.is_believed and known.done) else ""
        self._look_at_job(failure, now)
        return excess <= 0 or known.is_believed

    def _look_at_job(self, failure: Failure, now: float) -> None:
        asking = self._asking()
        batches = set().union(*(each.batches for each in asking))
        is_script = all(each.failures and each.last.fault == "code" for each in asking)
        if is_script and len({each.last.place for each in asking}) == 1 and len(batches) >= self._various:
            self.broken = (
                f"the script raised the same error at the first {len(batches)} batches, in every trainer: "
                f"{failure.error} ({failure.place})"
            )
        elif self.waits_for() and all(now - each.since_s >= self._stand_still_s for each in asking):
            self.broken = (
                f"no trainer has processed anything for {self._stand_still_s:g} s (stand_still_s); no batch was set "
                f"aside, so repair the cause and continue with --resume: {failure.error}"
            )

    def convicts(self, piece: BatchRange, fault: str, now: float) -> bool:
        """True if the failures at a piece suffice to set it aside."""
        suspicion = self._suspicions.get(_place(piece))
        if fault == DECODER or suspicion is None:
            return True
        witnesses = {name: since for name, (failures, since) in suspicion.names.items() if failures >= self._limit}
        if witnesses and suspicion.since_s is None:
            suspicion.since_s = now
        has_waited = suspicion.since_s is not None and now - suspicion.since_s >= self._stand_still_s
        done = {name: self._trainers[name].done for name in witnesses if name in self._trainers}
        is_convicted = len(witnesses) > 1 and fault != STORE
        return is_convicted or any(count > (0 if has_waited else witnesses[name]) for name, count in done.items())

    def leaves(self, piece: BatchRange, trainer: str, holders: Collection[str], now: float) -> bool:
        """True if a trainer is a witness against a suspect piece, and another trainer, which is none, can try it."""
        names = self._suspicions.get(_place(piece), Suspicion()).names
        if names.get(self.names.get(trainer, ""), (0, 0))[0] < self._limit:
            return False
        others = {name: other in holders for other, name in self.names.items() if name in self._trainers}
        return any(
            max(names.get(name, (0, 0))[0], self._trainers[name].failures) < self._limit
            and (is_holder or now - self._trainers[name].asked_at <= _PRESENT_S)
            for name, is_holder in others.items()
        )

    def take(self, piece: BatchRange, *, is_set_aside: bool = False) -> Suspicion:
        """Forget and return the failures at a piece. If it was set aside, acquit the trainers that failed at it."""
        found = self._suspicions.pop(_place(piece), Suspicion())
        for name in found.names.keys() & self._trainers.keys() if is_set_aside else ():
            self._trainers[name].acquit()
        return found

    def put(self, piece: BatchRange, found: Suspicion) -> None:
        """Attribute failures to a piece, or to a part of a piece."""
        if found.names:
            self._suspicions[_place(piece)] = Suspicion(dict(found.names), found.since_s)

    # storage

    def rows(self, pieces: Iterable[BatchRange]) -> list[tuple[Place, list[Testimony]]]:
        """Return the witnesses against these pieces in their stored form."""
        found: list[tuple[Place, list[Testimony]]] = []
        for place in map(_place, pieces):
            names = self._suspicions[place].names if place in self._suspicions else {}
            done = {name: self._trainers[name].done if name in self._trainers else 0 for name in names}
            if names:
                found.append((place, [(n, count, (done[n] > 0) + (done[n] > at)) for n, (count, at) in names.items()]))
        return found

    def restore(self, rows: Iterable[tuple[Place, list[Testimony]]]) -> None:
        for place, testimonies in rows:
            self._suspicions[place] = Suspicion({name: (count, int(at == 1)) for name, count, at in testimonies})
            self._trainers.update((name, _Trainer(int(progress > 0))) for name, _, progress in testimonies)


def _place(piece: BatchRange) -> Place:
    return piece.epoch, piece.position, piece.first_batch
