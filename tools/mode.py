"""``flightedl mode``: show or change the consistency mode of a running job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.errors import EXIT_FAILED, UsageError
from flightedl.launch.status import answered_within
from flightedl.messages.tasks import ModeReply, ModeRequest

from .options import Number, json_option, running_job_options
from .running import running_job

_KINDS: dict[str, type[Mode]] = {"sync": Sync, "async": Async, "bounded": Bounded}
_SLICE_S = 10.0
_WAIT_S = 2.0


@click.command()
@click.argument("kind", metavar="[sync|async|bounded]", required=False)
@click.option("--reduce", type=click.Choice(["mean", "sum"]), help="Sync, async: how gradients are combined [mean]")
@click.option("--backup", type=int, help="Sync: number of slowest trainers that a round does not wait for [0]")
@click.option("--deterministic", is_flag=True, default=None, help="Sync: sum gradients in the order of batches")
@click.option("--push-every", type=int, help="Async: batches accumulated per push [1]")
@click.option("--pull-every", type=int, help="Async: steps between pulls [1]")
@click.option("--staleness-scaled", is_flag=True, default=None, help="Async: smaller steps for older gradients")
@click.option("--staleness", type=int, help="Bounded: versions by which a trainer may lead the slowest")
@click.option("--short-pushes", is_flag=True, help="Permit --push-every to be far more than the batches of a task.")
@click.option("--timeout-s", type=Number(min=0), default=60.0, show_default=True, help="Longest wait.")
@json_option("The master's reply as one JSON object.")
@running_job_options
def mode(kind: str | None, short_pushes: bool, timeout_s: float, as_json: bool, **options: Any) -> int:
    """Show or change the consistency mode of a running job.

    Without an argument, shows the current mode. All pservers change the mode at the same round; no batch is lost or
    counted twice. The job keeps the new mode when it is resumed from a checkpoint.
    """
    given = {name: options.pop(name) for name in _settings_of_modes() if name in options}
    wanted = _wanted(kind, {name: value for name, value in given.items() if value is not None})
    clock, tagged = SystemClock(), None if wanted is None else wanted.to_json()
    with running_job(options) as job:

        def ask(left_s: float) -> ModeReply:
            wait_s = min(left_s / 2, _WAIT_S) if wanted else 0.0
            request = ModeRequest(mode=tagged, short_pushes=short_pushes, wait_s=wait_s)
            return job.change("set_mode", request, ModeReply, min(left_s, _SLICE_S))

        reply = answered_within(
            timeout_s, clock, ask, lambda reply: wanted is None or reply.is_agreed, is_reached=lambda: job.is_reached
        )
    if as_json:
        click.echo(msgspec.json.encode(reply))
    else:
        click.echo(_sentence(reply, is_change=wanted is not None))
    return 0 if reply.is_agreed or wanted is None else EXIT_FAILED


def described(tagged: Mapping[str, Any]) -> str:
    """Return a mode as a script would write it, without default values; empty if there is no mode."""
    if not tagged:
        return ""
    found = Mode.from_json(dict(tagged))
    return f"{type(found).__name__}({', '.join(_differences(found))})"


def _differences(found: Mode) -> list[str]:
    data = found.to_json()
    usual = {} if isinstance(found, Bounded) else type(found)().to_json()
    return [f"{name}={value!r}" for name, value in data.items() if name != "kind" and usual.get(name) != value]


def _settings_of_modes() -> list[str]:
    names = [name for kind in (Sync(), Async(), Bounded(0)) for name in kind.to_json() if name != "kind"]
    return list(dict.fromkeys(names))


def _wanted(kind: str | None, given: Mapping[str, Any]) -> Mode | None:
    """Return the requested mode, or None to show the current one.

    Raises:
        UsageError: the mode or one of its settings does not exist.
    """
    if kind is None:
        if given:
            raise UsageError("options need a mode: sync, async or bounded")
        return None
    found = _KINDS.get(kind.lower())
    if found is None:
        raise UsageError(f"there is no mode {kind!r:.40}: choose sync, async or bounded")
    return Mode.from_json({"kind": found.__name__, **given})


def _sentence(reply: ModeReply, *, is_change: bool) -> str:
    name = described(reply.mode)
    if reply.waiting_for and reply.round:
        return f"{name} is decided, but not yet in effect: waiting for {reply.waiting_for}"
    began = (f", since round {reply.round}" if reply.round else "") + (reply.pushes and f"; {reply.pushes}")
    return f"mode {name} on all pservers{began}" if is_change else f"mode {name}{began}"
