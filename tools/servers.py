"""``flightedl master`` and ``flightedl pserver``: one server in this process's place.

The process replaces itself by the server, so that the variables which make Flight fast are there before it starts.
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
@click.option("--pservers", type=int, help="How many the job has; 0: none, only data; -1: as stored [1]")
@click.option("--trainers", type=int, help="How many trainers there are, for Sync(deterministic=True) [not known]")
@click.option("--attempts-limit", type=int, help="How often a task is tried before it counts as failed [5]")
@resume_option
@click.option("--recovery", type=click.Choice(["replay", "rollback"]), help="When a pserver was lost [replay]")
@master_options
def master(**options: Any) -> None:
    """Start a master: hands out tasks.

    It also watches over the job; any number may stand by. It stops on SIGTERM or Ctrl-C.
    """
    _become("flightedl.master", settings(MasterSettings, **options))


@click.command()
@server_options
@click.option("--table-memory-mb", type=int, help="MiB that rows of tables may have; 0: what is there [0]")
def pserver(**options: Any) -> None:
    """Start a parameter server: holds a part of the model.

    It takes the first free place of the job and holds that part of the model. It stops on SIGTERM or Ctrl-C.
    """
    _become("flightedl.pserver", settings(PserverSettings, **options))


def _become(module: str, values: CommonSettings) -> None:
    os.execve(sys.executable, [sys.executable, "-m", module], child_environment(values))  # noqa: S606 - no shell wanted
