"""Sums over trainers' reports: records, rates, and means of metrics. Pure; time is an argument."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import RaisedError
from flightedl.messages.tasks import REPORT_EVERY_S, FailedTask, LogRequest

_WINDOW_S = 10.0
#: Errors of the script are kept for this many seconds. Less frequent errors are harmless.
_RAISED_S = 600.0
_RAISED_LIMIT = 1_000
#: Maximum number of reports per second from all trainers together.
_REPORTS_PER_S = 200.0
#: Maximum seconds between two reports from a trainer. It is less than the time after which a trainer counts as stuck.
_RARELY_S = 5.0


def report_every_s(trainers: int) -> float:
    """Return the interval in seconds between two reports from a trainer. It limits the load on the master."""
    return min(max(REPORT_EVERY_S, trainers / _REPORTS_PER_S), _RARELY_S)


@dataclass(slots=True)
class TrainerProgress:
    """Reports of one trainer."""

    host: str = ""
    pid: int = 0
    records: int = 0
    waiting_for: str = ""
    heard_at: float = 0.0
    batch_s: float = 0.0
    facts: HostFacts | None = None
    profile: Counter[str] = field(default_factory=Counter)
    doing: str = ""
    starting_s: float = 0.0
    #: As in ``LogRequest``.
    model: str = ""
    #: True if the stack traces of the trainer's threads were requested.
    wants_stacks: bool = False
    #: The last reported stacks.
    stacks: str = ""


@dataclass(slots=True)
class JobProgress:
    """Sums over all trainers, both in total and over the last few seconds."""

    batches: int = 0
    #: Number of batches without a gradient for the declared model.
    idle_batches: int = 0
    #: Maximum number of trainers that trained separate models at the same time; None if any trainer shares its model.
    _own_models: int | None = 0
    skipped_records: int = 0
    #: Seconds that the loops of all current and former trainers spent in each activity.
    profile: Counter[str] = field(default_factory=Counter)
    trainers: dict[str, TrainerProgress] = field(default_factory=dict)
    #: Trainers that have finished a batch since the previous call of ``take_progressed``.
    _progressed: set[str] = field(default_factory=set)
    _recent: deque[tuple[float, int, dict[str, tuple[float, float]]]] = field(default_factory=deque)
    _first: float | None = None
    #: (time, name of the trainer, report) of each error raised by the script, oldest first.
    _raised: deque[tuple[float, str, FailedTask]] = field(default_factory=lambda: deque(maxlen=_RAISED_LIMIT))

    def add(self, report: LogRequest, now: float) -> None:
        trainer = self.trainers.setdefault(report.trainer, TrainerProgress())
        if report.batches or report.batch_s < now - trainer.heard_at:
            self._progressed.add(report.trainer)
        trainer.host, trainer.pid, trainer.waiting_for = report.host, report.pid, report.waiting_for
        trainer.heard_at, trainer.batch_s, trainer.facts = now, report.batch_s, report.facts
        trainer.doing, trainer.model, trainer.starting_s = report.doing, report.model, report.starting_s
        own_models = sum(each.model == "own" for each in self.trainers.values())
        if report.model == "common":
            self._own_models = None
        elif self._own_models is not None:
            self._own_models = max(self._own_models, own_models)
        for what, seconds in report.profile.items():
            trainer.profile[what] += seconds  # type: ignore[assignment]
            self.profile[what] += seconds  # type: ignore[assignment]
        if report.stacks:
            trainer.stacks, trainer.wants_stacks = report.stacks, False
        trainer.records += report.records
        self.batches += report.batches
        self.idle_batches += report.idle_batches
        self.skipped_records += report.skipped_records
        if self._first is None:
            self._first = now
        if report.records or report.metrics:
            self._recent.append((now, report.records, dict(report.metrics)))
        self._forget(now)

    @property
    def own_models(self) -> int:
        return self._own_models or 0

    def failed(self, reports: Iterable[FailedTask], now: float, witness: str = "") -> None:
        """Record a trainer's reports of failed work. Errors raised by the script are kept for some time."""
        self._raised.extend((now, witness, report) for report in reports if report.place)

    def raised(self, now: float) -> list[RaisedError]:
        while self._raised and self._raised[0][0] < now - _RAISED_S:
            self._raised.popleft()
        #: Location in the script -> batch -> attempts. A repeated report has the same attempt as the first one.
        attempts: dict[str, dict[tuple[int, int, int | None], set[int]]] = {}
        newest: dict[str, str] = {}
        names: dict[str, set[str]] = {}
        for _, witness, report in self._raised:
            names.setdefault(report.place, set()).add(witness)
            batch = report.epoch, report.position, report.batch
            attempts.setdefault(report.place, {}).setdefault(batch, set()).add(report.attempt)
            newest[report.place] = report.error
        return [
            RaisedError(
                place=place,
                error=newest[place],
                batches=len(batches),
                repeated=sum(len(tries) > 1 for tries in batches.values()),
                trainers=len(names[place]),
            )
            for place, batches in attempts.items()
        ]

    def gone(self, trainer: str) -> None:
        self.trainers.pop(trainer, None)
        self._progressed.discard(trainer)

    def take_progressed(self) -> tuple[str, ...]:
        progressed, self._progressed = self._progressed, set()
        return tuple(progressed)

    def records_per_s(self, now: float) -> float:
        self._forget(now)
        if self._first is None:
            return 0.0
        span = min(_WINDOW_S, max(now - self._first, 1.0))
        return sum(records for _, records, _ in self._recent) / span

    def metrics(self, now: float) -> dict[str, float]:
        """Return weighted means over the last few seconds. If there are none, return the last known means."""
        if len(self._recent) > 1:
            self._forget(now)
        totals: dict[str, tuple[float, float]] = {}
        for _, _, metrics in self._recent:
            for name, (total, weight) in metrics.items():
                known = totals.get(name, (0.0, 0.0))
                totals[name] = (known[0] + total, known[1] + weight)
        return {name: total / weight for name, (total, weight) in sorted(totals.items()) if weight}

    def _forget(self, now: float) -> None:
        while len(self._recent) > 1 and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
