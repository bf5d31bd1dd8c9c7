"""Choice of the number of trainers, based on their marginal throughput.

Additional trainers increase throughput until something else becomes the bottleneck: the pservers, the store, the
network, or the slowest trainer of a round. Therefore two numbers of trainers, ``lower`` and ``upper``, are compared by
their throughputs ``R(lower)`` and ``R(upper)``, in records per second. The additional trainers are worth their cost if

    (R(upper) - R(lower)) / (upper - lower)  >=  worth * R(lower) / lower

that is, if each of them adds at least the fraction ``worth`` of the other trainers' average throughput. A trial changes
the number, measures, compares, and then keeps the new number or returns to the old one:

* **Up** by half of the current number. If the new number is not worth its cost, it becomes a *ceiling*, and the next
  trial goes halfway to it. A ceiling expires after ``retry_s``, because conditions change; then one more trainer is
  tried.
* **Down** when the average throughput falls below ``worth`` times the best average, minus a margin, because the last
  trainers then add even less. If the reason is that all trainers have become slower, the trial shows this, and the
  number returns to the old one.

Throughput is measured for ``measure_s``, beginning ``settle_s`` after the number of trainers has reached its target,
because new trainers must load first. Any disturbance, such as a trainer that starts or stops or a job that waits,
restarts the measurement. If a user changes the number, the user's number becomes the new target; 0 pauses the job.

Trainers that are going to be removed are replaced in advance, within the limits.

If throughputs differ by less than the noise of the measurements, the best number may not be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Factor applied to ``worth``, so that noise alone does not start a trial with fewer trainers.
_MARGIN = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Limits on the number of trainers, and parameters of the trials."""

    minimum: int = 1
    maximum: int = 10
    #: Minimum throughput of an additional trainer, as a fraction (0 to 1) of the other trainers' average.
    worth: float = 0.5
    #: Cost of one trainer per hour.
    hourly_cost: float = 0.0
    #: Maximum cost of all trainers per hour; 0 for no limit.
    hourly_limit: float = 0.0
    #: Seconds from a change of the number to the beginning of the measurement.
    settle_s: float = 30.0
    #: Seconds of a measurement.
    measure_s: float = 60.0
    #: Seconds until a ceiling expires.
    retry_s: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(f"minimum {self.minimum} and maximum {self.maximum} must satisfy 0 <= minimum <= maximum")
        if not 0 <= self.worth <= 1:
            raise ValueError(f"worth is {self.worth}, but must be between 0 and 1")
        if self.hourly_limit and self.hourly_cost <= 0:
            raise ValueError("hourly_limit requires hourly_cost, the cost of one trainer")

    @property
    def most(self) -> int:
        """Maximum number of trainers within the cost limit, but at least the minimum number."""
        if not self.hourly_limit:
            return self.maximum
        # Compensate for rounding errors in quotients that should be integers.
        payable = int(self.hourly_limit / self.hourly_cost + 1e-9)
        return max(self.minimum, min(self.maximum, payable))


@dataclass(frozen=True, slots=True)
class Seen:
    """Observation of a job."""

    #: Number of records in all tasks finished since the job started.
    records: int
    #: Number of registered trainers.
    running: int
    #: Number of trainers that the cluster has been asked to run.
    wanted: int
    #: Number of trainers that are going to be removed.
    leaving: int = 0
    #: Number of tasks that are not done; None if unknown.
    tasks_left: int | None = None
    #: True if there are tasks that trainers can get at the moment.
    is_training: bool = True


@dataclass(frozen=True, slots=True)
class Wish:
    """Desired number of trainers, and the reason."""

    trainers: int
    reason: str


@dataclass(slots=True)
class MarginalScaling:
    """State between two observations."""

    limits: ScalingLimits
    #: Desired number of trainers without replacements; None before the first observation.
    target: int | None = None
    #: Last requested number, with replacements.
    _asked: int | None = None
    #: Time at which the measurement may begin.
    _settled_at: float | None = None
    #: (start of the measurement, number of records at that time).
    _begun: tuple[float, int] | None = None
    #: During a trial: (previous number of trainers, throughput with that number); None otherwise.
    _trial: tuple[int, float] | None = None
    #: (number of trainers that was not worth its cost, time at which this was found).
    _ceiling: tuple[int, float] | None = None
    #: Highest average throughput per trainer.
    _best: float = field(default=0.0)

    def look(self, seen: Seen, now: float) -> Wish:
        if not seen.wanted and self.limits.minimum:
            # Only users set the number to 0.
            self.target = None
            return Wish(0, "the job was paused by hand")
        if self.target is None or seen.wanted != self._asked:
            self._adopt(seen.wanted)
        assert self.target is not None, "it was adopted"
        if seen.leaving:
            self._disturb()
            return self._wish(min(self.target + seen.leaving, self.limits.most), "trainers are about to be removed")
        if not seen.is_training:
            self._disturb()
            return self._wish(self.target, "there are no tasks to train now")
        if seen.running != self.target:
            self._disturb()
            return self._wish(self.target, "waiting for the number of trainers to reach its target")
        rate = self._measured(seen, now)
        if rate is None:
            return self._wish(self.target, "measuring the throughput")
        reason = self._judge(rate, seen, now)
        self.check()
        return self._wish(self.target, reason)

    def check(self) -> None:
        assert self.target is None or self.limits.minimum <= self.target <= self.limits.most, "outside of the limits"
        assert self._trial is None or self._trial[0] != self.target, "a trial changes the number"

    def _adopt(self, wanted: int) -> None:
        """Adopt a number of trainers that this class did not choose."""
        self.target = max(self.limits.minimum, min(wanted, self.limits.most))
        self._trial = self._ceiling = None
        self._disturb()

    def _disturb(self) -> None:
        self._settled_at = self._begun = None

    def _wish(self, trainers: int, reason: str) -> Wish:
        self._asked = trainers
        return Wish(trainers, reason)

    def _measured(self, seen: Seen, now: float) -> float | None:
        """Return the throughput in records per second, or None if the measurement is not complete."""
        if self._settled_at is None:
            self._settled_at = now + self.limits.settle_s
        if now < self._settled_at:
            return None
        # After a takeover, the master counts from the stored state, which may be older than the last observation.
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
                return f"{count} trainers process {rate:.0f} records/s, {other} processed {other_rate:.0f}: reverting"
        average = rate / count if count else 0.0
        self._best = max(self._best, average)
        if count > max(self.limits.minimum, 1) and average < _MARGIN * self.limits.worth * self._best:
            fewer = max(self.limits.minimum, 1, count - max(1, count // 4))
            reason = f"a trainer processes {average:.0f} records/s; the best average was {self._best:.0f}"
            return self._try(fewer, rate, reason)
        more = self._next_up(count, seen.tasks_left, now)
        if more == count:
            return f"{count} trainers process {rate:.0f} records/s"
        return self._try(more, rate, f"{count} trainers process {rate:.0f} records/s: trying more")

    def _is_preferred(self, count: int, rate: float, other: int, other_rate: float, now: float) -> bool:
        """True if the number on trial is better than the previous one."""
        (lower, low), (upper, high) = sorted([(count, rate), (other, other_rate)])
        is_worth = lower == 0 or (high - low) / (upper - lower) >= self.limits.worth * low / lower
        if is_worth:
            # From now on, compare averages with the throughput that is possible at present.
            self._best = low / lower if lower else 0.0
        else:
            self._ceiling = upper, now
        return (count == upper) == is_worth

    def _next_up(self, count: int, tasks_left: int | None, now: float) -> int:
        """Return the next number to try, or ``count`` if no number is worth trying."""
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
