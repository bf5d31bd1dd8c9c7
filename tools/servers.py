"""``flightedl master`` and ``flightedl pserver``: one server in this process's place.

The process replaces itself by the server, so that the variables which make Flight fast are there before it starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from flightedl.config import CommonSettings, MasterSettings, PserverSettings, child_environment, settings

from .options import ResumingCommand, resume_option, server_options


@click.command(cls=ResumingCommand)
@server_options
@click.option("--pservers", type=int, help="How many the job has; 0: none, only data; -1: as stored [1]")
@click.option("--trainers", type=int, help="How many trainers there are, for Sync(deterministic=True) [not known]")
@click.option("--attempts-limit", type=int, help="How often a task is tried before it counts as failed [5]")
@resume_option
@click.option("--recovery", type=click.Choice(["replay", "rollback"]), help="When a pserver was lost [replay]")
@click.option("--task-timeout-factor", type=float, help="A task may take so many times the average of those done [5]")
@click.option("--task-timeout-floor-s", type=float, help="Seconds that a task may take whatever the average is [30]")
@click.option("--stuck-after-s", type=float, help="Seconds without a batch after which a trainer loses its work [900]")
@click.option("--checkpoint-every-s", type=float, help="Seconds between checkpoints; 0: only at epochs' ends [60]")
@click.option("--checkpoint-every-tasks", type=int, help="Finished tasks between checkpoints; 0: not by tasks [0]")
@click.option("--checkpoint-keep", type=click.IntRange(min=1), help="How many of the newest checkpoints stay [3]")
@click.option("--checkpoint-keep-every", type=int, help="Multiples of this number stay for ever; 0: none [0]")
@click.option(
    "--checkpoint-increments", type=int, help="So many in a row have only rows that have changed; 0: none [8]"
)
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
