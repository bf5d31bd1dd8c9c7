"""``flightedl events``."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from flightedl.adapters.clock import SystemClock
from flightedl.errors import FlightedlError
from flightedl.launch.status import JobStatus
from flightedl.messages.base import encode
from flightedl.messages.status import EventsReply, EventsRequest, JobEvent
from flightedl.ports import Clock

from .options import json_option, running_job_options
from .running import running_job

_TIMEOUT_S = 5.0
_WAIT_S = 10.0
_RETRY_S = 1.0


@click.command()
@running_job_options
@click.option("--follow", is_flag=True, help="Continue with new events until Ctrl-C, also after a takeover.")
@json_option("One JSON object for each event.")
def events(follow: bool, as_json: bool, **options: Any) -> None:
    """Show the events of a running job, oldest first.

    Events report processes that join or leave, rounds that wait, epochs, checkpoints, failed work, and rejected
    requests. The master keeps the newest events. Events from before its takeover are in the previous master's log.
    """
    clock = SystemClock()
    with running_job(options) as job:
        for event in _followed(job, clock) if follow else _asked(job, EventsRequest()).events:
            click.echo(msgspec.json.encode(event) if as_json else line(event))


def _asked(job: JobStatus, request: EventsRequest) -> EventsReply:
    return job.ask("events", encode(request), EventsReply, request.wait_s + _TIMEOUT_S)


def _followed(job: JobStatus, clock: Clock) -> Iterator[JobEvent]:
    """Yield every event once, even if another master takes over."""
    request = EventsRequest()
    trouble = ""
    while True:
        try:
            reply = _asked(job, request)
        except FlightedlError as error:
            if str(error) != trouble:
                trouble = str(error)
                click.echo(f"flightedl: {trouble}; retrying", err=True)
            clock.sleep(_RETRY_S)
            continue
        trouble = ""
        yield from reply.events
        after = reply.events[-1].number if reply.events else request.after
        request = EventsRequest(after=after, generation=reply.generation, wait_s=_WAIT_S)


def line(event: JobEvent) -> str:
    """Return a description of an event in one line."""
    at = dt.datetime.fromtimestamp(event.at, dt.UTC).astimezone()
    mark = "!" if event.is_warning else " "
    return f"{at:%Y-%m-%d %H:%M:%S} {mark} {event.kind:<18} {event.text}"
