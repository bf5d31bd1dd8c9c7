"""``flightedl autoscale``: a loop that adds trainers while they are worth it."""

from __future__ import annotations

import signal
import threading
from dataclasses import fields
from typing import Any

import click

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.domain.scaling.marginal import MarginalScaling, ScalingLimits
from flightedl.errors import UsageError
from flightedl.launch.kubernetes import scaling
from flightedl.launch.status import JobStatus

from .clusters import cluster_of, cluster_options
from .options import Number, running_job_options

_TIMEOUT_S = 5.0


@click.command()
@click.option("--min", "minimum", type=click.IntRange(min=0), default=1, show_default=True, help="Never fewer.")
@click.option("--max", "maximum", type=click.IntRange(min=1), required=True, help="Never more.")
@click.option(
    "--worth",
    type=Number(0, 1),
    default=0.5,
    show_default=True,
    help="Part of the others' average records per second that a further trainer has to bring.",
)
@click.option("--hourly-cost", type=Number(min=0), default=0.0, help="What one trainer costs in an hour.")
@click.option("--hourly-limit", type=Number(min=0), default=0.0, help="What all may cost; 0: no limit [0]")
@click.option("--settle-s", type=Number(min=0), default=30.0, show_default=True, help="Not measured at first.")
@click.option("--measure-s", type=Number(min=1), default=60.0, show_default=True, help="How long to measure.")
@click.option("--retry-s", type=Number(min=1), default=1800.0, show_default=True, help="Until tried again.")
@click.option("--every-s", type=Number(min=0.1), default=10.0, show_default=True, help="How often to look.")
@running_job_options
@cluster_options
def autoscale(*, every_s: float, etcd: str | None, job: str | None, tls_dir: str | None, **given: Any) -> None:
    """Add and remove trainers of a job as is worth it.

    Adds trainers of a job on a Kubernetes cluster while each further one brings enough, and removes those that do not;
    they hand back what they hold. Trainers whose machines are about to go are replaced before. Runs until the job has
    ended, in the cluster or from outside.
    """
    try:
        limits = ScalingLimits(**{each.name: given[each.name] for each in fields(ScalingLimits)})
    except ValueError as error:
        raise UsageError(str(error)) from None
    values = settings(CommonSettings, etcd=etcd, job=job, tls_dir=tls_dir)
    clock, stop = SystemClock(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with JobStatus(values, clock) as asked:
        scaling.run(
            cluster_of(given),
            values.job,
            lambda: asked.read(_TIMEOUT_S),
            MarginalScaling(limits),
            clock,
            stop,
            click.echo,
            every_s,
        )
