"""The ``flightedl`` command.

Rules:

* Subcommands are imported when they are first used, so that ``flightedl --help`` is fast.
* Only this module converts errors to messages. A :class:`FlightedlError` becomes one red line and an exit code: 2 if
  the user must change something, such as a name that does not exist, 3 if the job cannot continue, otherwise 1. Ctrl-C
  exits with 130. Any other exception is a bug, whose traceback is shown. ``--debug`` shows all tracebacks.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import click

from flightedl.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_START_AGAIN,
    EXIT_USAGE,
    FlightedlError,
    NotFoundError,
    exit_code_of,
)

from .lazy import LazyGroup

#: Name -> (module, attribute, one line of help). The help is here, so that listing the commands imports none of them.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("flightedl_tools.run", "run", "Run a whole job on this machine: servers and trainers."),
    "status": ("flightedl_tools.status", "status", "Show the status of a running job."),
    "top": ("flightedl_tools.top", "top", "Watch a running job in this terminal."),
    "events": ("flightedl_tools.events", "events", "Show the events of a running job, oldest first."),
    "plot": ("flightedl_tools.plot", "plot", "Draw the values that scripts logged in one or more runs."),
    "doctor": ("flightedl_tools.doctor", "doctor", "Report what is wrong with a job, and what to do about it."),
    "master": ("flightedl_tools.servers", "master", "Start a master, which hands out tasks."),
    "pserver": ("flightedl_tools.servers", "pserver", "Start a parameter server, which holds a part of the model."),
    "checkpoint": ("flightedl_tools.checkpoint", "checkpoint", "List, save, verify, restore and export checkpoints."),
    "model": ("flightedl_tools.model", "model", "Read the parameters and tables of a running job."),
    "table": ("flightedl_tools.table", "table", "Import rows of other programs into tables, and export them."),
    "follow": ("flightedl_tools.follow", "follow", "Keep a copy of a running job's model in files."),
    "serve": ("flightedl_tools.follow", "serve", "Serve lookups in a copy of a running job's model."),
    "data": ("flightedl_tools.data", "data", "Serve data to ranks that torchrun or another launcher starts."),
    "dataset": ("flightedl_tools.dataset", "dataset", "Index, inspect, convert or split training data."),
    "mode": ("flightedl_tools.mode", "mode", "Show or change the consistency mode of a running job."),
    "tasks": ("flightedl_tools.tasks", "tasks", "List, retry or drop failed tasks."),
    "submit": ("flightedl_tools.submit", "submit", "Run a whole job on a Kubernetes cluster."),
    "jobs": ("flightedl_tools.clusters", "jobs", "List the jobs of a cluster's namespace."),
    "logs": ("flightedl_tools.clusters", "logs", "Print the output of a job on a cluster."),
    "scale": ("flightedl_tools.scaling", "scale", "Change the number of trainers or pservers of a running job."),
    "autoscale": ("flightedl_tools.autoscale", "autoscale", "Scale a job's trainers according to throughput."),
    "cancel": ("flightedl_tools.clusters", "cancel", "Stop a job on a cluster and remove its objects."),
    "certs": ("flightedl_tools.certs", "certs", "Create and renew the certificates of a job."),
    "prove": ("flightedl_tools.prove", "prove", "Prove that a script counts every batch exactly once."),
    "replay": ("flightedl_tools.replay", "replay_", "Replay a recorded run and compare its effects."),
    "forget": ("flightedl_tools.forget", "forget", "Delete the state of a stopped job from etcd."),
    "bench": ("flightedl_tools.bench", "bench", "Measure on this machine."),
}

#: Title -> names of its commands, in the order of ``flightedl --help``.
SECTIONS = {
    "Run and watch": ("run", "status", "top", "events", "plot", "doctor", "tasks", "mode", "scale", "autoscale"),
    "Data": ("dataset", "data"),
    "Checkpoints and models": ("checkpoint", "model", "table", "follow", "serve"),
    "Clusters": ("submit", "jobs", "logs", "cancel", "certs"),
    "Servers": ("master", "pserver", "forget"),
    "Development": ("prove", "replay", "bench"),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="flightedl")
@click.option("--debug", is_flag=True, help="Show the traceback of every error.")
def command(debug: bool) -> None:
    """Elastic deep-learning training on Apache Arrow Flight: exactly once under any crash."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may lack characters that paths, errors and trainers' output contain.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run_command_line(sys.argv[1:] if arguments is None else list(arguments)))


def run_command_line(arguments: list[str]) -> int:
    """Run the command line, and return its exit code."""
    try:
        result = command.main(args=arguments, prog_name="flightedl", standalone_mode=False)
    except FlightedlError as error:
        if _wants_debug(arguments):
            raise
        click.secho(f"flightedl: {error}", fg="red", err=True)
        if isinstance(error, NotFoundError):
            return EXIT_USAGE
        code = exit_code_of(error)
        return EXIT_FAILED if code == EXIT_START_AGAIN else code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _wants_debug(arguments: Sequence[str]) -> bool:
    """True if ``--debug`` precedes the subcommand."""
    for argument in arguments:
        if argument == "--debug":
            return True
        if not argument.startswith("-"):
            return False
    return False


if __name__ == "__main__":
    main()
