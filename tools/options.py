"""Options that several commands share. Their defaults are in ``flightedl.config``: an option not given is None."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


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


def together(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options. The help shows the last one first."""
    return lambda function: reduce(lambda wrapped, option: option(wrapped), options, function)


#: ``--resume``, for a ``ResumingCommand``. Its value is None, "true" or "auto".
resume_option = together(
    click.option(_RESUME_AUTO, "resume", flag_value="auto", hidden=True),
    click.option(
        "--resume",
        "resume",
        flag_value="true",
        help="Go on from the newest checkpoint at the URL, also of other --pservers; --resume=auto: if there is one.",
    ),
)

#: ``--etcd`` and ``--job``.
job_options = together(
    click.option("--job", metavar="NAME", help="Name of the job [FLIGHTEDL_JOB, else: default]"),
    click.option("--etcd", metavar="HOST:PORT", help="etcd to use [FLIGHTEDL_ETCD, else: 127.0.0.1:2379]"),
)
tls_option = click.option("--tls-dir", metavar="DIR", help="Directory with ca.pem, cert.pem and key.pem: mutual TLS")
#: Options of commands that ask a running job, see ``running``.
running_job_options = together(tls_option, job_options)

#: When a master makes checkpoints, and gives tasks to others.
master_options = together(
    click.option(
        "--checkpoint-increments", type=int, help="So many in a row have only rows that have changed; 0: none [8]"
    ),
    click.option("--checkpoint-keep-every", type=int, help="Multiples of this number stay for ever; 0: none [0]"),
    click.option("--checkpoint-keep", type=click.IntRange(min=1), help="How many of the newest checkpoints stay [3]"),
    click.option("--checkpoint-every-tasks", type=int, help="Finished tasks between checkpoints; 0: not by tasks [0]"),
    click.option("--checkpoint-every-s", type=float, help="Seconds between checkpoints; 0: only at epochs' ends [60]"),
    click.option(
        "--stuck-after-s", type=float, help="Seconds without a batch after which a trainer loses its work [900]"
    ),
    click.option(
        "--task-timeout-floor-s", type=float, help="Seconds that a task may take whatever the average is [30]"
    ),
    click.option(
        "--task-timeout-factor", type=float, help="A task may take so many times the average of those done [5]"
    ),
)

#: Options of masters and pservers.
server_options = together(
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
    job_options,
)


def json_option(says: str = "One JSON object on stdout.") -> Decorator:
    """Return ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=says)
