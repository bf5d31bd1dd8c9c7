"""Options that several commands share. An omitted option is None; its default is in ``flightedl.config``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import click

from flightedl.config import NOTICES
from flightedl.errors import UsageError

if TYPE_CHECKING:
    from flightedl.formats.chunks import TextOptions

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A finite number in a range. Click's own ranges would accept NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


class ResumingCommand(click.Command):
    """A command with ``--resume`` and ``--resume=auto`` (``resume_option``).

    A value must be attached with ``=``, because the next word after ``--resume`` may be the script.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args.index("--") if "--" in args else len(args)
        replaced = [_RESUME_AUTO if each == "--resume=auto" else each for each in args[:own]]
        return super().parse_args(ctx, [*replaced, *args[own:]])


class ScriptCommand(ResumingCommand):
    """A command that runs ``script_or_module``, and passes unknown options after it to the script."""

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
    """Return a decorator that adds several options. ``--help`` lists them in reverse order."""
    return lambda function: reduce(lambda wrapped, option: option(wrapped), options, function)


#: ``--resume`` of a ``ResumingCommand``: None, "true" or "auto".
resume_option = together(
    click.option(_RESUME_AUTO, "resume", flag_value="auto", hidden=True),
    click.option(
        "--resume",
        "resume",
        flag_value="true",
        help="Continue from the newest checkpoint; --resume=auto starts from scratch if there is none.",
    ),
)

#: ``--etcd`` and ``--job``.
job_options = together(
    click.option("--job", metavar="NAME", help="Name of the job [FLIGHTEDL_JOB, else: default]"),
    click.option("--etcd", metavar="HOST:PORT", help="etcd to use [FLIGHTEDL_ETCD, else: 127.0.0.1:2379]"),
)
notice_option = click.option(
    "--notice",
    type=click.Choice(NOTICES),
    help="Watch for the end of this machine, and stop then as on SIGTERM [off]",
)
tls_option = click.option("--tls-dir", metavar="DIR", help="Directory with ca.pem, cert.pem and key.pem: mutual TLS")
#: Options of commands that query a running job (see ``running``).
running_job_options = together(tls_option, job_options)

#: Options about checkpoints, and about taking tasks back from trainers.
master_options = together(
    click.option("--checkpoint-increments", type=int, help="Most increments in a row; 0 disables increments [8]"),
    click.option("--checkpoint-keep-every", type=int, help="Keep every Nth checkpoint forever; 0 disables this [0]"),
    click.option("--checkpoint-keep", type=click.IntRange(min=1), help="Number of newest checkpoints to keep [3]"),
    click.option("--checkpoint-every-tasks", type=int, help="Finished tasks between checkpoints; 0 disables this [0]"),
    click.option("--checkpoint-every-s", type=float, help="Seconds between checkpoints; 0: only after epochs [60]"),
    click.option("--stuck-after-s", type=float, help="Seconds without a batch before a trainer loses its tasks [900]"),
    click.option("--task-timeout-floor-s", type=float, help="Smallest timeout of a task, in seconds [30]"),
    click.option("--task-timeout-factor", type=float, help="Timeout of a task, as a multiple of the average [5]"),
)

#: Options of masters and pservers.
server_options = together(
    click.option("--record", metavar="DIR", help="Record the server's events for `flightedl replay`"),
    click.option("--log-format", type=click.Choice(["text", "json"]), help="Format of the log [text]"),
    click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR [INFO]"),
    click.option("--insecure", is_flag=True, default=None, help="Allow listening beyond loopback without TLS"),
    click.option("--tls-dir", metavar="DIR", help="Directory with ca.pem, cert.pem and key.pem: mutual TLS"),
    click.option("--metrics-port", type=int, help="Port of the Prometheus metrics; 0 disables them [0]"),
    click.option("--health-port", type=int, help="Port of the health page; 0 disables it [0]"),
    click.option("--lease-ttl-s", type=float, help="Time to live of the server's lease, in seconds [5]"),
    click.option("--checkpoint", metavar="URL", help="Location of the checkpoints"),
    click.option("--port", type=int, help="Port to listen on; 0 chooses a free one [0]"),
    click.option("--advertise", metavar="ADDRESS", help="Address by which other processes connect [that of --bind]"),
    click.option("--bind", metavar="ADDRESS", help="Numeric address to listen on [127.0.0.1]"),
    notice_option,
    job_options,
)


def text_options() -> Decorator:
    """Return ``--types``, whose value is a tuple of (column, name of its type), and options of CSV and TSV files."""

    def parsed(_ctx: click.Context, _option: click.Parameter, text: str) -> tuple[tuple[str, str], ...]:
        parts = re.split(r",(?![^(\[]*[)\]])", text) if text else []
        pairs = [part.partition("=") for part in parts]
        if wrong := [part for part, (name, _, kind) in zip(parts, pairs, strict=True) if not name.strip() or not kind]:
            raise UsageError(f"--types {wrong[0]!r:.80} is not COLUMN=TYPE, as in zip=string")
        return tuple(sorted((name.strip(), kind.strip()) for name, _, kind in pairs))

    text = "Types of columns, such as zip=string [inferred]"
    return together(
        click.option("--types", default="", metavar="A=TYPE,B=TYPE", callback=parsed, help=text),
        click.option(
            "--names", default="", metavar="A,B1-B9", help="Columns of CSV files without a header [first line]"
        ),
        click.option("--delimiter", default="", metavar="CHARACTER", help="Between fields of CSV files [, or a tab]"),
        click.option("--null-values", multiple=True, metavar="TEXT", help="Null in all columns of CSV; repeatable."),
    )


def text_of(names: str, delimiter: str, null_values: Sequence[str]) -> TextOptions:
    r"""Return the options of CSV and TSV files. A delimiter such as ``\t`` or ``\x01`` is the character so written."""
    from flightedl.formats.chunks import TextOptions, column_names

    written = {rf"\x{number:02x}": chr(number) for number in range(32)} | {r"\t": "\t"}
    return TextOptions(column_names(names), written.get(delimiter, delimiter), tuple(null_values))


def json_option(text: str = "One JSON object on stdout.") -> Decorator:
    """Return ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)
