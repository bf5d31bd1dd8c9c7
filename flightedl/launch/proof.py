"""Verdict of a proof: the results of its runs, and what follows from them. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from flightedl.recording.account import Account

#: Number of runs without faults from which the band is computed.
BAND_RUNS = 3
#: Half-width of the band in standard deviations of these runs: that of the interval which contains the value of another
#: such run with a probability of 99%, by Student's distribution with two degrees of freedom.
_BAND_DEVIATIONS = 9.925 * (1 + 1 / BAND_RUNS) ** 0.5
#: Minimum half-width of the band, as a fraction of the mean.
_LEAST_BAND = 0.01


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    #: None for an undisturbed run.
    seed: int | None
    seconds: float
    exit_code: int
    reason: str
    strikes: dict[str, int]
    account: Account | None
    #: Final value of the metric that is compared; None if the script logs none.
    final: float | None

    @property
    def is_exact(self) -> bool:
        """True if the run ended normally and every batch counted exactly once."""
        return self.exit_code == 0 and self.account is not None and self.account.is_exact

    @property
    def what_failed(self) -> str:
        """Reason why some batches did not count exactly once."""
        findings = {} if self.account is None else self.account.findings
        # A run that did not end has not counted all batches yet.
        found = [text for kind, text in findings.items() if not (self.exit_code and kind == "lost")]
        return "; ".join([*found, *([self.reason] if self.exit_code else [])]) or "nothing was recorded"

    @property
    def is_miscounted(self) -> bool:
        """True if a batch counted that should not have, which is an error even if the run did not end."""
        return self.account is not None and bool(self.account.double or self.account.foreign or self.account.stray)


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict and the facts on which it is based. ``flightedl prove --json`` prints it."""

    is_proved: bool
    verdict: str
    #: Seed of the run that failed, or of the first run with faults; None if a run without faults failed.
    seed: int | None
    expected: int
    lost: int
    double: int
    strikes: dict[str, int]
    #: Name of the compared metric, and its band over the runs without faults.
    metric: str
    band: tuple[float, float] | None
    warnings: list[str]
    #: Median duration of the runs without faults, divided by that of the runs with faults.
    goodput: float
    #: Directory of the logs, and of the recordings of a run that failed.
    directory: str
    runs: list[Run]


def proof_of(directory: str, metric: str, undisturbed: Sequence[Run], disturbed: Sequence[Run]) -> Proof:
    """Return the verdict on all runs."""
    runs = [*undisturbed, *disturbed]
    accounts = [run.account for run in runs if run.account is not None]
    expected, lost, double = (sum(getattr(each, name) for each in accounts) for name in ("expected", "lost", "double"))
    struck = sum((Counter(run.strikes) for run in disturbed), Counter[str]())
    band = band_of([run.final for run in undisturbed if run.final is not None])
    warnings = [
        f"with seed {run.seed}, the final {metric} is {run.final:.4g}, outside {band[0]:.4g} to {band[1]:.4g}"
        for run in disturbed
        if band is not None and run.final is not None and not band[0] <= run.final <= band[1]
    ]
    failed = next((run for run in runs if not run.is_exact), None)
    if failed is None and not struck:
        verdict = "not proved: the script ended before any process was struck; give it more data"
    elif failed is None:
        verdict = (
            f"proved: {counted(struck)} in {len(disturbed)} runs of {expected // len(runs)} batches: 0 lost, 0 double"
        )
    else:
        where = "without being disturbed" if failed.seed is None else f"with seed {failed.seed}"
        verdict = f"not proved: {where}, {failed.what_failed}"
    return Proof(
        is_proved=failed is None and bool(struck),
        verdict=verdict,
        seed=failed.seed if failed is not None else disturbed[0].seed,
        expected=expected,
        lost=lost,
        double=double,
        strikes=dict(sorted(struck.items())),
        metric=metric,
        directory=directory,
        band=band,
        warnings=warnings,
        goodput=typical_seconds(undisturbed) / typical_seconds(disturbed) if disturbed else 1.0,
        runs=runs,
    )


def band_of(finals: Sequence[float]) -> tuple[float, float] | None:
    """Return the range in which the final value of another run is expected; None if there are too few runs."""
    if len(finals) < BAND_RUNS:
        return None
    mean = statistics.fmean(finals)
    more = max(_BAND_DEVIATIONS * statistics.stdev(finals), _LEAST_BAND * abs(mean))
    return mean - more, mean + more


def typical_seconds(runs: Sequence[Run]) -> float:
    """Return the runs' median duration. The first run of a script is often slower, because its kernels are compiled."""
    return statistics.median(run.seconds for run in runs)


def counted(strikes: Mapping[str, int]) -> str:
    """Return the numbers of strikes as text."""
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(strikes.items())) or "no strikes"
