"""Options that several commands share. Their defaults are in ``flightedl.config``: an option not given is None."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


class Number(click.FloatRange):
    """A finite number: click's own ranges let NaN and infinity pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


class ResumingCommand(click.Command):
    """A command with ``--resume`` and ``--resume=auto`` (``resume_option``).

    The value needs the ``=``: what follows a plain ``--resume`` may be a script.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args.index("--") if "--" in args else len(args)
        replaced = [_RESUME_AUTO if each == "--resume=auto" else each for each in args[:own]]
        return super().parse_args(ctx, [*replaced, *args[own:]])


class ScriptCommand(ResumingCommand):
    """A command that runs ``script_or_module`` and passes options that it does not know to the script after them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        target = ctx.params["script_or_module"] or ""
        if target.startswith("-"):
            name = target.partition("=")[0]
            known = [option for parameter in self.params for option in parameter.opts if option.startswith("--")]
            raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known, 1), ctx=ctx)
        return left


_RESUME_AUTO = "--resume-auto"


def resume_option(function: Command) -> Command:
    """``--resume``, for a ``ResumingCommand``. Its value is None, "true" or "auto"."""
    says = "Go on from the newest checkpoint at the URL, also of other --pservers; --resume=auto: if there is one."
    function = click.option(_RESUME_AUTO, "resume", flag_value="auto", hidden=True)(function)
    return click.option("--resume", "resume", flag_value="true", help=says)(function)


def job_options(function: Command) -> Command:
    """``--etcd`` and ``--job``."""
    for option in (
        click.option("--job", metavar="NAME", help="Name of the job [FLIGHTEDL_JOB, else: default]"),
        click.option("--etcd", metavar="HOST:PORT", help="etcd to use [FLIGHTEDL_ETCD, else: 127.0.0.1:2379]"),
    ):
        function = option(function)
    return function


def server_options(function: Command) -> Command:
    """Options of masters and pservers."""
    for option in (
        click.option("--record", metavar="DIR", help="Record what happens to it, for `flightedl replay`"),
        click.option("--log-format", type=click.Choice(["text", "json"]), help="How its log is written [text]"),
        click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR [INFO]"),
        click.option("--insecure", is_flag=True, default=None, help="Allow to listen beyond loopback without TLS"),
        click.option("--tls-dir", metavar="DIR", help="Directory of `flightedl certs`: mutual TLS"),
        click.option("--metrics-port", type=int, help="Port of the Prometheus page; 0: none [0]"),
        click.option("--health-port", type=int, help="Port of the health page, for probes; 0: none [0]"),
        click.option("--lease-ttl-s", type=float, help="Time to live of this server's lease, in seconds [5]"),
        click.option("--checkpoint", metavar="URL", help="Where checkpoints go"),
        click.option("--port", type=int, help="Port to listen on; 0: a free one [0]"),
        click.option("--advertise", metavar="ADDRESS", help="Address that the others are told [the bound one]"),
        click.option("--bind", metavar="ADDRESS", help="Numeric address to listen on [127.0.0.1]"),
    ):
        function = option(function)
    return job_options(function)
