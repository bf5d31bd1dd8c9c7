"""``flightedl autoscale``: a loop that adds and removes trainers according to the measured throughput."""

from __future__ import annotations

import signal
import threading
from dataclasses import fields
from functools import partial
from typing import Any

import click

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.domain.scaling.marginal import MarginalScaling, ScalingLimits
from flightedl.domain.scaling.pservers import PserverScaling
from flightedl.errors import UsageError
from flightedl.launch.kubernetes import scaling
from flightedl.launch.kubernetes.resizing import grow
from flightedl.launch.status import JobStatus

from .clusters import cluster_of, cluster_options
from .options import Number, running_job_options

_TIMEOUT_S = 5.0


@click.command()
@click.option("--min", "minimum", type=click.IntRange(min=0), default=1, show_default=True, help="Fewest trainers.")
@click.option("--max", "maximum", type=click.IntRange(min=1), required=True, help="Most trainers.")
@click.option(
    "--worth",
    type=Number(0, 1),
    default=0.5,
    show_default=True,
    help="Required gain of another trainer, as a fraction of the others' average records per second.",
)
@click.option(
    "--pservers-max", type=click.IntRange(min=0), default=0, help="Most pservers; 0 leaves their number unchanged [0]"
)
@click.option("--hourly-cost", type=Number(min=0), default=0.0, help="Cost of one trainer per hour.")
@click.option("--hourly-limit", type=Number(min=0), default=0.0, help="Limit for all trainers; 0 disables it [0]")
@click.option("--settle-s", type=Number(min=0), default=30.0, show_default=True, help="Seconds before measuring.")
@click.option("--measure-s", type=Number(min=1), default=60.0, show_default=True, help="Seconds to measure.")
@click.option("--retry-s", type=Number(min=1), default=1800.0, show_default=True, help="Seconds before retrying.")
@click.option("--every-s", type=Number(min=0.1), default=10.0, show_default=True, help="Polling interval in seconds.")
@running_job_options
@cluster_options
def autoscale(
    *, every_s: float, pservers_max: int, etcd: str | None, job: str | None, tls_dir: str | None, **given: Any
) -> None:
    """Scale a job's trainers according to throughput.

    Adds trainers to a job on a Kubernetes cluster as long as each new trainer increases the throughput enough, and
    removes trainers that do not. Removed trainers return their tasks. Trainers on nodes that are about to be reclaimed
    are replaced in advance. Runs until the job ends, inside or outside the cluster. With --pservers-max, doubles the
    number of pservers while they limit the throughput, as `flightedl doctor` would advise.
    """
    try:
        limits = ScalingLimits(**{each.name: given[each.name] for each in fields(ScalingLimits)})
    except ValueError as error:
        raise UsageError(str(error)) from None
    values = settings(CommonSettings, etcd=etcd, job=job, tls_dir=tls_dir)
    clock, stop = SystemClock(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    cluster = cluster_of(given)

    growing = partial(grow, cluster, values.job, clock=clock)
    pservers = scaling.PserverLoop(PserverScaling(pservers_max), growing) if pservers_max else None
    with JobStatus(values, clock) as asked:
        scaling.run(
            cluster,
            values.job,
            lambda: asked.read(_TIMEOUT_S),
            MarginalScaling(limits),
            clock,
            stop,
            click.echo,
            every_s,
            pservers,
        )
