"""``flightedl replay``: replay the recorded events of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from flightedl.errors import EXIT_FAILED
from flightedl.recording.reader import recordings_in
from flightedl.recording.replay import Difference, Replayed, replay

from .options import json_option


@click.command("replay")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@json_option()
def replay_(directory: Path, as_json: bool) -> int:
    """Replay a recorded run and compare its effects.

    DIRECTORY contains a recording made by `flightedl run --record` or `fe.local(record=)`. Replays every event of every
    process and compares its effects with the recorded effects. If an effect differs, the command prints it on stderr,
    and the exit code is 1.
    """
    found = [replay(recording) for recording in recordings_in(directory)]
    differences = [each.difference for each in found if each.difference is not None]
    if as_json:
        click.echo(msgspec.json.encode({"processes": found}))
    else:
        for each in found:
            click.echo(_line(each))
        for difference in differences:
            click.echo(_difference(difference), err=True)
    return EXIT_FAILED if differences else 0


def _line(found: Replayed) -> str:
    verdict = "same effects" if found.difference is None else f"another effect at event {found.difference.number}"
    return f"{found.process}: {found.events} events, {verdict}"


def _difference(difference: Difference) -> str:
    """Return a description of a difference, for people."""
    lines = [
        f"{difference.process}, {difference.core}: event {difference.number}, at {difference.at:.3f} s, differs",
        f"  event:     {_json(difference.event)}",
        f"  effect:    number {difference.effect}",
        f"  recorded:  {_json(difference.expected)}",
        f"  now:       {_json(difference.actual)}",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in difference.trace.splitlines())])


def _json(value: Any) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()
