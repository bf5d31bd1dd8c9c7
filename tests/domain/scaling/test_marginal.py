"""The number of trainers: single decisions, and hours of jobs with known curves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from flightedl.domain.scaling.marginal import MarginalScaling, ScalingLimits, Seen

LIMITS = ScalingLimits(minimum=1, maximum=40)
#: Function of (number of trainers, seconds) to records per second.
Curve = Callable[[int, float], float]


def saturating(of_one: float, of_all: float) -> Curve:
    """Return the curve of trainers that share a limited resource."""
    return lambda count, _now: 1 / (1 / (of_one * count) + 1 / of_all) if count else 0.0


def best(curve: Curve, limits: ScalingLimits, now: float = 0.0) -> int:
    """Return the first number above which another trainer adds too little."""
    count = max(limits.minimum, 1)
    while count < limits.most:
        gained = curve(count + 1, now) - curve(count, now)
        if gained < limits.worth * curve(count, now) / count:
            break
        count += 1
    return count


@dataclass
class SimulatedJob:
    """A job whose throughput follows a curve, on a cluster that starts a trainer in 20 s and removes some."""

    curve: Curve
    scaling: MarginalScaling
    wanted: int = 2
    noise: float = 0.02
    seed: int = 0
    #: Times in seconds at which a trainer gets a notice; it is gone 60 s later.
    notices: tuple[float, ...] = ()
    now: float = 0.0
    records: float = 0.0
    counts: list[tuple[float, int]] = field(default_factory=list)
    _ready: list[float] = field(default_factory=list)
    _leaving: list[float] = field(default_factory=list)

    def run(self, until_s: float, step_s: float = 10.0) -> None:
        chance = random.Random(self.seed)
        while self.now < until_s:
            self.now += step_s
            self._leaving += [self.now + 60 for at in self.notices if self.now - step_s < at <= self.now]
            gone = [at for at in self._leaving if at <= self.now]
            self._leaving = [at for at in self._leaving if at > self.now]
            self._ready = self._ready[len(gone) :]
            self._ready += [self.now + 20] * (self.wanted - len(self._ready))
            self._ready = sorted(self._ready)[: self.wanted]
            running = sum(at <= self.now for at in self._ready)
            self.records += self.curve(running, self.now) * step_s * (1 + chance.gauss(0, self.noise))
            seen = Seen(int(self.records), running, self.wanted, len(self._leaving))
            wish = self.scaling.look(seen, self.now)
            assert wish.trainers <= self.scaling.limits.most
            if wish.trainers != self.wanted:
                self.counts.append((self.now, wish.trainers))
            self.wanted = wish.trainers

    def changes_after(self, now: float) -> list[int]:
        return [count for at, count in self.counts if at > now]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("of_one", "of_all"), [(100, 300), (100, 1000), (100, 4000), (100, 1e9), (100, 80)])
def test_it_finds_the_number_that_is_worth_it_and_keeps_it(of_one: float, of_all: float, seed: int) -> None:
    curve = saturating(of_one, of_all)
    job = SimulatedJob(curve, MarginalScaling(LIMITS), seed=seed)
    job.run(3600)
    wanted = best(curve, LIMITS)
    assert abs(job.scaling.target - wanted) <= max(2, wanted // 3), f"{wanted} would be best: {job.counts}"
    settled = len(job.counts)
    job.run(3 * 3600)
    assert len(job.counts) - settled <= 24, f"more than one change in five minutes, with trials: {job.counts}"


def test_the_cost_never_exceeds_its_limit() -> None:
    limits = replace(LIMITS, hourly_cost=0.3, hourly_limit=2.1)
    assert limits.most == 7
    job = SimulatedJob(saturating(100, 1e9), MarginalScaling(limits), wanted=20)
    job.run(3600)
    assert job.scaling.target == 7
    assert max(count for _, count in job.counts) == 7


def test_the_minimum_is_kept_even_if_it_costs_too_much() -> None:
    assert replace(LIMITS, minimum=3, hourly_cost=1.0, hourly_limit=2.0).most == 3


def test_trainers_are_removed_when_something_else_becomes_the_bottleneck() -> None:
    def curve(count: int, now: float) -> float:
        return min(count * 100.0, 4000.0 if now < 4000 else 500.0)

    job = SimulatedJob(curve, MarginalScaling(LIMITS))
    job.run(4000)
    assert job.scaling.target >= 30
    job.run(12000)
    assert job.scaling.target <= 13, "5 can do it, and each of 13 does 40 % of what it could"


def test_a_job_whose_trainers_all_become_slower_keeps_them() -> None:
    def curve(count: int, now: float) -> float:
        return count * (100.0 if now < 4000 else 30.0)

    limits = replace(LIMITS, maximum=10)
    job = SimulatedJob(curve, MarginalScaling(limits))
    job.run(4000)
    assert job.scaling.target == 10
    job.run(8000)
    assert job.scaling.target == 10


def test_leaving_trainers_are_replaced_and_disturb_the_measurement() -> None:
    limits = replace(LIMITS, maximum=12)
    job = SimulatedJob(saturating(100, 1e9), MarginalScaling(limits), notices=(1500.0, 1500.0, 2400.0))
    job.run(1400)
    before = job.scaling.target
    assert before is not None
    job.run(1510)
    assert job.wanted == min(before + 2, 12), "two are replaced before they are gone"
    job.run(5000)
    assert (job.scaling.target, job.wanted) == (12, 12)


def look(scaling: MarginalScaling, now: float, **more: object) -> int:
    seen = Seen(records=int(100 * now), running=4, wanted=4)
    return scaling.look(replace(seen, **more), now).trainers  # type: ignore[arg-type]


def test_nothing_is_decided_before_all_trainers_are_present_and_measured() -> None:
    scaling = MarginalScaling(LIMITS)
    assert look(scaling, 0, running=3) == 4
    assert look(scaling, 100) == 4
    assert look(scaling, 131) == 4, "settled, measured from here"
    assert look(scaling, 160, is_training=False) == 4, "so the measurement starts again"
    assert look(scaling, 192) == 4
    assert look(scaling, 225) == 4
    assert look(scaling, 286) == 6


def test_there_are_no_more_trainers_than_tasks_left() -> None:
    scaling = MarginalScaling(LIMITS)
    for now in (0, 31, 92):
        found = look(scaling, now, tasks_left=5)
    assert found == 5
    for now in (100, 131, 192):
        found = look(scaling, now, running=5, wanted=5, tasks_left=3)
    assert found == 4, "reverted, since a fifth adds nothing"


def test_a_number_set_by_a_person_is_the_new_start_within_the_limits() -> None:
    scaling = MarginalScaling(replace(LIMITS, maximum=10))
    assert look(scaling, 0) == 4
    assert look(scaling, 10, wanted=8) == 8
    assert look(scaling, 20, wanted=1) == 1
    assert look(scaling, 30, wanted=50) == 10


def test_zero_trainers_pause_the_job_until_a_person_sets_another_number() -> None:
    scaling = MarginalScaling(LIMITS)
    assert look(scaling, 0) == 4
    assert look(scaling, 10, wanted=0, running=4, leaving=1) == 0
    assert look(scaling, 20, wanted=0, running=0) == 0
    assert look(scaling, 30, wanted=4, running=0) == 4


def test_a_master_that_counts_fewer_records_restarts_the_measurement() -> None:
    scaling = MarginalScaling(LIMITS)
    look(scaling, 0)
    look(scaling, 31)
    assert look(scaling, 80, records=0) == 4
    assert look(scaling, 100, records=0) == 4


MEASURED = "measuring the throughput"


class Measured:
    """A job with a given throughput for each measurement."""

    def __init__(self, limits: ScalingLimits, wanted: int) -> None:
        self.scaling = MarginalScaling(limits)
        self.wanted = wanted
        self.now = 0.0
        self.records = 0

    def at(self, rate: float) -> int:
        """Return the wanted number of trainers after these throughputs were measured."""
        reason = MEASURED
        while reason == MEASURED:
            self.now += 30
            self.records += int(30 * rate)
            reason, wanted = self._look()
        self.wanted = wanted
        return wanted

    def _look(self) -> tuple[str, int]:
        wish = self.scaling.look(Seen(self.records, self.wanted, self.wanted), self.now)
        return wish.reason, wish.trainers


def test_a_trainer_that_adds_exactly_the_minimum_is_kept() -> None:
    job = Measured(LIMITS, 2)
    assert job.at(200) == 3
    assert job.at(250) == 4, "50 is half of 100"
    assert job.at(290) == 3, "40 is less than half of 83"


def test_an_average_exactly_at_the_margin_is_accepted() -> None:
    job = Measured(replace(LIMITS, maximum=4), 4)
    assert job.at(400) == 4
    assert job.at(160) == 4, "40 each is 0.8 of a half of 100"
    assert job.at(156) == 3


def test_numbers_below_the_minimum_are_not_tried() -> None:
    job = Measured(replace(LIMITS, minimum=4, maximum=4), 4)
    assert [job.at(400), job.at(40)] == [4, 4]


def test_zero_trainers_become_one() -> None:
    job = Measured(replace(LIMITS, minimum=0), 0)
    assert job.at(0) == 1
    assert job.at(0) == 2, "one is better than none, whatever it does"


def test_a_ceiling_is_retried_after_its_time() -> None:
    job = Measured(replace(LIMITS, retry_s=240), 2)
    assert job.at(200) == 3
    assert job.at(210) == 2
    found_at = job.now
    wanted = {}
    while job.wanted == 2:
        job.at(200)
        wanted[job.now - found_at] = job.wanted
    assert wanted == {120: 2, 180: 2, 240: 3}


@pytest.mark.parametrize(
    "wrong",
    [{"minimum": 5, "maximum": 4}, {"minimum": -1}, {"worth": 1.5}, {"worth": -0.5}, {"hourly_limit": 1.0}],
    ids=str,
)
def test_invalid_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|requires|required"):
        replace(LIMITS, **wrong)


@pytest.mark.parametrize("right", [{"minimum": 0}, {"minimum": 40}, {"worth": 0.0}, {"worth": 1.0}], ids=str)
def test_extreme_limits_are_accepted(right: dict[str, float]) -> None:
    assert replace(LIMITS, **right).most == 40
