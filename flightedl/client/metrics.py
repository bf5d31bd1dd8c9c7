"""What a trainer shows Prometheus, if it is asked to: counts of its loop, and where that spends its time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

from flightedl.config import TrainerSettings
from flightedl.rpc.authentication import Role, pem_files_of

if TYPE_CHECKING:
    from flightedl.process.metrics_page import Figures


@dataclass(slots=True)
class Totals:
    """What a trainer has done since its process began. Whoever changes or reads it holds its owner's lock."""

    batches: int = 0
    idle_batches: int = 0
    records: int = 0
    skipped_records: int = 0
    #: Seconds of each activity of the loop, see ``probe``.
    profile: Counter[str] = field(default_factory=Counter)
    #: The newest value of each name that was logged.
    logged: dict[str, SupportsFloat] = field(default_factory=dict)

    def spent(self, profile: Mapping[str, float]) -> None:
        """So many seconds more."""
        for what, seconds in profile.items():
            self.profile[what] += seconds  # type: ignore[assignment]


def figures(totals: Totals, slack_s: float) -> Figures:
    """Name -> figure."""
    from flightedl.process.metrics_page import Figure

    return {
        "loop_batches_total": Figure("Batches that this trainer worked through.", totals.batches),
        "loop_idle_batches_total": Figure("Those of them that gave the model no gradient.", totals.idle_batches),
        "loop_records_total": Figure("Records of its batches.", totals.records),
        "loop_skipped_records_total": Figure("Corrupt records that it passed over.", totals.skipped_records),
        "loop_seconds_total": Figure("Time of its loop, by what it did.", dict(totals.profile), "doing"),
        "logged": Figure(
            "The newest value that its script logged.", {name: float(v) for name, v in totals.logged.items()}, "name"
        ),
        "lease_slack_seconds": Figure("How long its lease is trusted without another renewal.", slack_s),
    }


def metrics_page(chosen: TrainerSettings, read: Callable[[], Figures]) -> contextlib.AbstractContextManager[object]:
    """The page, if the settings want one; closed at the end of the ``with`` block. Without it nothing listens.

    Raises:
        UsageError: the certificates cannot be read.
    """
    if not chosen.metrics_port:
        return contextlib.nullcontext()
    from flightedl.process.http_page import Answer, Asked, HttpPage, patient_page
    from flightedl.process.metrics_page import Metrics

    metrics = Metrics({"job": chosen.job, "role": "trainer", "index": chosen.process_name}, read)

    def answer(asked: Asked) -> Answer:
        return metrics.page(asked) if asked.path == "/metrics" else Answer(b"there is /metrics\n", status=404)

    tls = pem_files_of(chosen.tls_dir, Role.TRAINER)
    return patient_page(lambda: HttpPage("metrics page", chosen.bind, chosen.metrics_port, answer, tls))
