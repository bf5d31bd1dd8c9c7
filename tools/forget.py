"""``flightedl forget``: let a job be begun again from nothing."""

from __future__ import annotations

import contextlib

import click

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import CommonSettings, settings
from flightedl.coordination.keys import JobKeys
from flightedl.launch import former
from flightedl.launch.liveness import Liveness
from flightedl.launch.status import is_master_answering, tool_connector


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
    keys, clock = JobKeys(chosen.job), SystemClock()
    connector = tool_connector(chosen.tls_dir)
    with contextlib.closing(EtcdCoordinator(EtcdAccess.of(chosen), clock=clock)) as coordinator:
        Liveness(
            coordinator,
            keys,
            clock,
            lambda record: is_master_answering(record, job, connector),
            lambda sentence: click.echo(f"flightedl: {sentence}", err=True),
        ).require_gone()
        known = former.former_job(coordinator, keys)
        if known is not None and known.finished_epochs is None and not yes:
            click.confirm(f"job {job} has not finished: forget where it stands?", abort=True)
        former.forget(coordinator, keys)
    click.echo(f"job {job} is forgotten")
