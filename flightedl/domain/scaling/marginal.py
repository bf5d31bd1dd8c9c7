"""How many trainers to have, by what the last ones have brought.

Theory of operation. More trainers bring more records per second until something else is the limit: the pservers, the
store, the network, the slowest trainer of a round. So counts are compared in pairs: of ``lower`` trainers, which
together did ``R(lower)`` records per second, and ``upper``, which did ``R(upper)``, the further ones are worth having
if

    (R(upper) - R(lower)) / (upper - lower)  >=  worth * R(lower) / lower

that is, if each of them brings at least the part ``worth`` of what those before bring on average. A trial goes to
another count, measures there, compares, and stays or goes back:

* **Up** by half of what is there. When that was not worth it, the count is a *ceiling*, and what lies between is
  halved. A ceiling is forgotten after ``retry_s``, since things change: that is how often, at most, one trainer more is
  tried.
* **Down** when the average falls below ``worth`` of the best (with a margin): then the last ones bring still less. If
  all have become slower, the comparison shows it, and the trial goes back.

A rate is what is done in ``measure_s``, from ``settle_s`` after the trainers are those that are wanted: new ones load
first. Whatever disturbs it (a trainer comes or goes, the job waits) begins it again, so that nothing is concluded from
a disturbance. That somebody else has changed the count is taken as a wish, and measured from there; 0 is a pause.

Trainers that are about to be taken away are replaced before they are gone, as far as the limits allow.

Not promised: the best count where rates differ by less than their noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Below ``worth`` by so much, so that a trial down is not begun by noise.
_MARGIN = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """What may be had, and what is worth having."""

    minimum: int = 1
    maximum: int = 10
    #: A further trainer has to bring this part of what the others bring on average, 0 to 1.
    worth: float = 0.5
    #: What a trainer costs in an hour, and what all may cost; 0: without a limit.
    hourly_cost: float = 0.0
    hourly_limit: float = 0.0
    #: After a change, until it is measured; for how long; until a ceiling is tried again.
    settle_s: float = 30.0
    measure_s: float = 60.0
    retry_s: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(f"minimum is {self.minimum} and maximum {self.maximum}, but has to be at least that")
        if not 0 <= self.worth <= 1:
            raise ValueError(f"worth is {self.worth}, but has to be from 0 to 1")
        if self.hourly_limit and self.hourly_cost <= 0:
            raise ValueError("a limit of the cost needs what one trainer costs")

    @property
    def most(self) -> int:
        """The maximum, or what may be paid; never below the minimum."""
        if not self.hourly_limit:
            return self.maximum
        # Of a quotient that is a whole number but for its rounding.
        payable = int(self.hourly_limit / self.hourly_cost + 1e-9)
        return max(self.minimum, min(self.maximum, payable))


@dataclass(frozen=True, slots=True)
class Seen:
    """How the job stands."""

    #: Records of all finished tasks, ever.
    records: int
    #: Trainers that are registered, and that the cluster was told to have.
    running: int
    wanted: int
    #: Trainers that somebody is about to take away.
    leaving: int = 0
    #: Tasks that are not done; None: not known.
    tasks_left: int | None = None
    #: Whether there is something to do for trainers now.
    is_training: bool = True


@dataclass(frozen=True, slots=True)
class Wish:
    """How many trainers there should be, and why."""

    trainers: int
    reason: str


@dataclass(slots=True)
class MarginalScaling:
    """Decides from one look at the job to the next."""

    limits: ScalingLimits
    #: What it wants beside replacements; None: it has not looked yet.
    target: int | None = None
    #: What was asked for last, replacements included.
    _asked: int | None = None
    #: From when on rates mean something; when the measurement began, and the records then.
    _settled_at: float | None = None
    _begun: tuple[float, int] | None = None
    #: While a trial is under way: the count that it comes from, and the rate there.
    _trial: tuple[int, float] | None = None
    #: A count that was not worth it, and when that was found.
    _ceiling: tuple[int, float] | None = None
    #: The best average rate of a trainer.
    _best: float = field(default=0.0)

    def look(self, seen: Seen, now: float) -> Wish:
        if not seen.wanted and self.limits.minimum:
            # Nobody but a person wants none.
            self.target = None
            return Wish(0, "somebody has paused it")
        if self.target is None or seen.wanted != self._asked:
            self._adopt(seen.wanted)
        assert self.target is not None, "it was adopted"
        if seen.leaving:
            self._disturb()
            return self._wish(min(self.target + seen.leaving, self.limits.most), "some are about to be taken away")
        if not seen.is_training:
            self._disturb()
            return self._wish(self.target, "there is nothing to train now")
        if seen.running != self.target:
            self._disturb()
            return self._wish(self.target, "not all of them are there")
        rate = self._measured(seen, now)
        if rate is None:
            return self._wish(self.target, "it is being measured what they bring")
        reason = self._judge(rate, seen, now)
        self.check()
        return self._wish(self.target, reason)

    def check(self) -> None:
        assert self.target is None or self.limits.minimum <= self.target <= self.limits.most, "within the limits"
        assert self._trial is None or self._trial[0] != self.target, "a trial is of another count"

    def _adopt(self, wanted: int) -> None:
        """Somebody, or nobody yet, has said how many: begin from there."""
        self.target = max(self.limits.minimum, min(wanted, self.limits.most))
        self._trial = self._ceiling = None
        self._disturb()

    def _disturb(self) -> None:
        self._settled_at = self._begun = None

    def _wish(self, trainers: int, reason: str) -> Wish:
        self._asked = trainers
        return Wish(trainers, reason)

    def _measured(self, seen: Seen, now: float) -> float | None:
        """Records per second, once they were counted for long enough."""
        if self._settled_at is None:
            self._settled_at = now + self.limits.settle_s
        if now < self._settled_at:
            return None
        # A master that has taken over counts what is stored, which may be less.
        if self._begun is None or seen.records < self._begun[1]:
            self._begun = now, seen.records
        begun_at, records = self._begun
        if now - begun_at < self.limits.measure_s:
            return None
        self._begun = now, seen.records
        return (seen.records - records) / (now - begun_at)

    def _judge(self, rate: float, seen: Seen, now: float) -> str:
        assert self.target is not None, "something was measured"
        count = self.target
        if self._trial is not None:
            other, other_rate = self._trial
            self._trial = None
            if not self._is_preferred(count, rate, other, other_rate, now):
                self._go(other)
                return f"{count} trainers do {rate:.0f} records/s, {other} do {other_rate:.0f}: back"
        average = rate / count if count else 0.0
        self._best = max(self._best, average)
        if count > max(self.limits.minimum, 1) and average < _MARGIN * self.limits.worth * self._best:
            fewer = max(self.limits.minimum, 1, count - max(1, count // 4))
            return self._try(fewer, rate, f"each does {average:.0f} records/s, the best average was {self._best:.0f}")
        more = self._next_up(count, seen.tasks_left, now)
        if more == count:
            return f"{count} trainers do {rate:.0f} records/s"
        return self._try(more, rate, f"{count} trainers do {rate:.0f} records/s: more are tried")

    def _is_preferred(self, count: int, rate: float, other: int, other_rate: float, now: float) -> bool:
        """Whether the count that was tried is better than the one before it."""
        (lower, low), (upper, high) = sorted([(count, rate), (other, other_rate)])
        is_worth = lower == 0 or (high - low) / (upper - lower) >= self.limits.worth * low / lower
        if is_worth:
            # What the others bring has to be measured against what is possible now.
            self._best = low / lower if lower else 0.0
        else:
            self._ceiling = upper, now
        return (count == upper) == is_worth

    def _next_up(self, count: int, tasks_left: int | None, now: float) -> int:
        """The next count to try; the same one: none."""
        step = max(1, count // 2)
        if self._ceiling is not None:
            ceiling, found_at = self._ceiling
            if now - found_at >= self.limits.retry_s:
                self._ceiling, step = None, 1
            else:
                step = min(step, max(1, (ceiling - count) // 2), ceiling - 1 - count)
        most = self.limits.most if tasks_left is None else min(self.limits.most, tasks_left)
        return max(count, min(count + step, most))

    def _try(self, count: int, rate: float, reason: str) -> str:
        assert self.target is not None, "something was measured"
        self._trial = self.target, rate
        self._go(count)
        return reason

    def _go(self, count: int) -> None:
        self.target = count
        self._disturb()
