"""``flightedl forget``: let a job be begun again from nothing."""

from __future__ import annotations

import click

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.launch import former
from flightedl.launch.naming import liveness_of


@click.command()
@click.argument("job")
@click.option("--etcd", metavar="HOST:PORT", help="etcd to use [FLIGHTEDL_ETCD, else: 127.0.0.1:2379]")
@click.option("--yes", is_flag=True, help="Do not ask, also where the job has not finished.")
def forget(job: str, etcd: str | None, yes: bool) -> None:
    """Remove what etcd keeps of a job that does not run any more.

    A job of the same name begins from nothing then. Checkpoints stay where they are: as long as there are some, a job
    of the same name at the same URL asks for --resume.
    """
    chosen = settings(CommonSettings, job=job, etcd=etcd)
    with liveness_of(
        chosen, SystemClock(), lambda sentence: click.echo(f"flightedl: {sentence}", err=True)
    ) as liveness:
        liveness.require_gone()
        known = former.former_job(liveness.coordinator, liveness.keys)
        if known is not None and known.finished_epochs is None and not yes:
            click.confirm(f"job {job} has not finished: forget where it stands?", abort=True)
        former.forget(liveness.coordinator, liveness.keys)
    click.echo(f"job {job} is forgotten")
