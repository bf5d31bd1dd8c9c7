"""``flightedl run``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flightedl.config import INTEGRITIES, SAME_HOST
from flightedl.launch.forking import fork_server

from .options import ScriptCommand, master_options, notice_option, resume_option, tls_option


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that resumes from this command's checkpoints. ``arguments`` excludes the program."""
    if not arguments or "run" not in arguments:
        return ""
    at = list(arguments).index("run") + 1
    more = [] if {"--resume", "--resume=auto"} & set(arguments) else ["--resume"]
    return shlex.join(["flightedl", *arguments[:at], *more, *arguments[at:]])


@click.command(cls=ScriptCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("script_or_module")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--trainers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of trainers.")
@click.option("--pservers", type=click.IntRange(min=0), help="Pservers; 0: only data [1; 0 with --nproc-per-node]")
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    help="Start N ranks of one group, as torchrun does, and restart all of them when one dies.",
)
@click.option("--checkpoint", metavar="URL", help="Location of the checkpoints [no checkpoints]")
@master_options
@click.option("--data-moved", metavar="OLD=NEW", help="The files below OLD were copied to NEW, which may be the same.")
@click.option("--table-memory-mb", type=int, help="MiB for rows on each pserver; 0: available memory [0]")
@resume_option
@click.option(
    "--standby/--no-standby",
    default=None,
    help="Run a standby master and a spare pserver, which take over at once [on with --checkpoint]",
)
@click.option(
    "--standby-pservers",
    type=click.IntRange(min=0),
    default=0,
    help="Pservers that each copy the blocks of one pserver, and take over without loading a checkpoint [0]",
)
@click.option("--standby-lag-s", type=float, help="Seconds between the copies of a standby pserver [1]")
@click.option(
    "--recovery",
    type=click.Choice(["replay", "rollback"]),
    help="After the loss of a pserver: repeat its lost batches, or reset all pservers to one checkpoint [replay]",
)
@click.option("--job", metavar="NAME", help="Name of the job [the script's name]")
@click.option("--output", metavar="DIR", type=click.Path(path_type=Path), help="For results and logs [runs/NAME]")
@click.option("--etcd", metavar="HOST:PORT", help="Use this running etcd [start one for the job]")
@click.option("--lease-ttl-s", type=float, help="Seconds after which a silent process counts as dead [5]")
@notice_option
@tls_option
@click.option(
    "--integrity",
    type=click.Choice(INTEGRITIES),
    help="Checksums of values in messages: only if nothing else protects them, always, or never [auto]",
)
@click.option(
    "--same-host",
    type=click.Choice(SAME_HOST),
    help="Exchange values between processes of one host and user in shared memory if available, or never [auto]",
)
@click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR [INFO]")
@click.option("--page/--no-page", default=True, help="Serve the job's web page on this machine [page]")
@click.option("--tensorboard", is_flag=True, default=None, help="Also write job.log to TensorBoard files.")
@click.option("--record", metavar="DIR", type=click.Path(path_type=Path), help="Record the run for `flightedl replay`")
def run(
    script_or_module: str,
    arguments: tuple[str, ...],
    trainers: int,
    nproc_per_node: int | None,
    pservers: int | None,
    checkpoint: str | None,
    **given: Any,
) -> int:
    """Run a whole job on this machine: servers and trainers.

    Starts etcd, a master, pservers and trainers, each in its own process, and replaces processes that die. Every
    trainer runs SCRIPT_OR_MODULE (the path of a script, or the dotted name of a module) with the ARGUMENTS. Put `--`
    before arguments that look like options of this command.

    Exit codes: 0 done, or stopped by job.stop(); 1 the script crashed; 2 the command, script or data must be changed,
    or the script ended normally but left work unfinished; 3 the job cannot continue; 4 done, but tasks failed or the
    last checkpoint was not written; 130 stopped by Ctrl-C; 141 stopped because the reader of the output ended.
    """
    if nproc_per_node and (trainers > 1 or pservers):
        raise click.UsageError(
            "the ranks of --nproc-per-node train a model of their own: omit --pservers and --trainers"
        )
    trainers = nproc_per_node or trainers
    if pservers is None:
        pservers = 0 if nproc_per_node else 1
    with fork_server(trainers) as forks:
        # Imported here, so that these imports run in parallel with those of the fork server.
        from flightedl.formats.dataset_spec import moved_folders
        from flightedl.launch.progress import JobConsole
        from flightedl.launch.run import RunOptions, run_job

        moved_folders(given.get("data_moved") or "")  # The processes of the job would only reject it when they start.
        options = RunOptions(
            target=script_or_module,
            arguments=arguments,
            trainers=trainers,
            is_group=nproc_per_node is not None,
            pservers=pservers,
            checkpoint=checkpoint,
            **{name: given.pop(name) for name in ("job", "standby", "standby_pservers", "output", "etcd", "page")},
            resume_command=resume_command(sys.argv[1:]) if checkpoint else "",
            forks=forks,
            more={name: value for name, value in given.items() if value is not None},
        )
        return run_job(options, JobConsole(highlight=False))
