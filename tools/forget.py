"""``flightedl forget``: delete a job's state in etcd, so that it can start from scratch."""

from __future__ import annotations

import click

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.launch import former
from flightedl.launch.naming import liveness_of


@click.command()
@click.argument("job")
@click.option("--etcd", metavar="HOST:PORT", help="etcd to use [FLIGHTEDL_ETCD, else: 127.0.0.1:2379]")
@click.option("--yes", is_flag=True, help="Skip the confirmation, even if the job has not finished.")
def forget(job: str, etcd: str | None, yes: bool) -> None:
    """Delete the state of a stopped job from etcd.

    A new job with this name then starts from scratch. Checkpoints are kept. As long as they exist, a job with the same
    name and checkpoint URL requires --resume.
    """
    chosen = settings(CommonSettings, job=job, etcd=etcd)
    with liveness_of(
        chosen, SystemClock(), lambda sentence: click.echo(f"flightedl: {sentence}", err=True)
    ) as liveness:
        liveness.require_ended()
        known = former.former_job(liveness.coordinator, liveness.keys)
        if known is not None and known.finished_epochs is None and not yes:
            click.confirm(f"job {job} has not finished: delete its progress?", abort=True)
        former.forget(liveness.coordinator, liveness.keys)
    click.echo(f"job {job} is forgotten")
