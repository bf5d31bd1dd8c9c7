"""``flightedl prove``: check a script's exactly-once accounting under kills and freezes."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import click
import msgspec

from flightedl.errors import EXIT_FAILED
from flightedl.launch.forking import fork_server
from flightedl.launch.policy import Role

from .options import ScriptCommand, json_option

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def _seconds(_ctx: click.Context, _option: click.Parameter, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{text!r} is not a duration: use seconds, or for example 90s, 5m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]


def _roles(_ctx: click.Context, _option: click.Parameter, text: str) -> tuple[Role, ...]:
    names = dict.fromkeys(text.split(","))
    if unknown := [name for name in names if name not in list(Role)]:
        raise click.BadParameter(f"{unknown[0]!r} is no kind of process: choose from {', '.join(Role)}.")
    return tuple(map(Role, names))


@click.command(cls=ScriptCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("script_or_module")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--trainers", type=click.IntRange(min=1), default=2, show_default=True, help="Number of trainers.")
@click.option("--pservers", type=click.IntRange(min=1), default=2, show_default=True, help="Number of pservers.")
@click.option(
    "--faults",
    callback=_roles,
    metavar="ROLES",
    default="trainer,pserver,master",
    show_default=True,
    help="Processes to kill and freeze; etcd is possible, too, if its version keeps acknowledged writes.",
)
@click.option(
    "--budget", callback=_seconds, metavar="TIME", default="5m", show_default=True, help="Time for all runs together."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the first disturbed run [random]")
@click.option("--metric", default="", help="Logged value whose end is compared [loss, else the first by name]")
@click.option("--output", metavar="DIR", type=click.Path(path_type=Path), help="For logs and recordings [runs/NAME]")
@json_option()
def prove(
    script_or_module: str,
    arguments: tuple[str, ...],
    faults: tuple[Role, ...],
    budget: float,
    seed: int | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Prove that a script counts every batch exactly once.

    Runs SCRIPT_OR_MODULE with the ARGUMENTS as a job on this machine: first without faults, to measure how long it
    takes and how much its final loss varies, then repeatedly with kills (SIGKILL) and freezes (SIGSTOP) at random
    moments, until the time is over. After each run, the recordings of all processes show how often each batch counted.
    Put `--` before arguments that look like options of this command.

    Exit codes: 0 proved; 1 not proved, with the seed that repeats the failure; 2 the script fails without any fault, or
    takes too long; 130 stopped by Ctrl-C.
    """
    with fork_server(given["trainers"]) as forks:
        from flightedl.launch.prove import ProofOptions, prove

        options = ProofOptions(
            target=script_or_module,
            arguments=arguments,
            roles=faults,
            budget_s=budget,
            seed=secrets.randbelow(1_000_000) if seed is None else seed,
            **given,
        )
        proof = prove(options, lambda line: click.echo(line, err=as_json), forks)
    if as_json:
        click.echo(msgspec.json.encode(proof))
    else:
        for warning in proof.warnings:
            click.secho(f"warning: {warning}", fg="yellow")
        click.secho(proof.verdict, fg="green" if proof.is_proved else "red")
        if not proof.is_proved:
            repeat = "" if proof.seed is None else f"repeat it with --seed {proof.seed}; "
            click.echo(f"{repeat}recordings and logs are in {proof.directory}")
    return 0 if proof.is_proved else EXIT_FAILED
