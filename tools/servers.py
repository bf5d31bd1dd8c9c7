"""``flightedl master`` and ``flightedl pserver``: replace this process with a server.

The process replaces itself with the server, so that the environment variables that make Flight fast are set before
Flight is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from flightedl.config import CommonSettings, MasterSettings, PserverSettings, child_environment, settings

from .options import ResumingCommand, master_options, resume_option, server_options


@click.command(cls=ResumingCommand)
@server_options
@click.option("--pservers", type=int, help="Number of pservers; 0: only data; -1: as stored [1]")
@click.option("--trainers", type=int, help="Number of trainers, for Sync(deterministic=True) [unknown]")
@click.option("--attempts-limit", type=int, help="Attempts before a task counts as failed [5]")
@resume_option
@click.option("--recovery", type=click.Choice(["replay", "rollback"]), help="After the loss of a pserver [replay]")
@master_options
def master(**options: Any) -> None:
    """Start a master, which hands out tasks.

    A master also supervises the job. If several masters run, one leads and the others stand by. Stops on SIGTERM or
    Ctrl-C.
    """
    _become("flightedl.master", settings(MasterSettings, **options))


@click.command()
@server_options
@click.option("--table-memory-mb", type=int, help="MiB for rows of tables; 0: available memory [0]")
@click.option("--standby", is_flag=True, default=None, help="Follow a pserver if no index is free.")
@click.option("--standby-lag-s", type=float, help="Seconds between the copies of a standby [1]")
def pserver(**options: Any) -> None:
    """Start a parameter server, which holds a part of the model.

    A pserver claims the job's first free pserver index, or waits as a spare until an index becomes free. With
    --standby, it instead keeps a copy of one pserver's blocks, and takes them over if this pserver dies. Stops on
    SIGTERM or Ctrl-C.
    """
    _become("flightedl.pserver", settings(PserverSettings, **options))


def _become(module: str, values: CommonSettings) -> None:
    os.execve(sys.executable, [sys.executable, "-m", module], child_environment(values))  # noqa: S606 - no shell wanted
