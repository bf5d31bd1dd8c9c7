"""``flightedl top``."""

from __future__ import annotations

import datetime as dt
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flightedl.adapters.clock import SystemClock
from flightedl.domain.diagnosis.profile import in_words
from flightedl.errors import FlightedlError
from flightedl.launch.status import JobStatus
from flightedl.master.history import progress_of
from flightedl.messages.base import encode
from flightedl.messages.status import EventsReply, EventsRequest, JobEvent, StatusReply

from .options import running_job_options
from .running import running_job
from .status import facts, processes

_TIMEOUT_S = 3.0
_EVERY_S = 1.0
_EVENTS = 8
_RATES = 60
_BARS = " ▁▂▃▄▅▆▇█"


@click.command()
@running_job_options
def top(**options: Any) -> None:
    """Watch a running job in this terminal.

    Shows progress, throughput, waiting rounds, all processes and the newest events, and refreshes them every second
    until Ctrl-C. If the output is not a terminal, prints them once.
    """
    clock = SystemClock()
    console = Console(highlight=False)
    view = View()
    with running_job(options) as job:
        # An error in the first query ends the command. After later errors, the view shows the error and retries.
        view.ask(job)
        if not console.is_terminal:
            console.print(view.screen())
            return
        with Live(view.screen(), console=console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    clock.sleep(_EVERY_S)
                    view.refresh(job)
                    live.update(view.screen(), refresh=True)
            except KeyboardInterrupt:
                return


class View:
    """A terminal view of the master's latest replies."""

    def __init__(self) -> None:
        self._status: StatusReply | None = None
        self._trouble = ""
        self._request = EventsRequest()
        self._events: deque[JobEvent] = deque(maxlen=_EVENTS)
        self._rates: deque[float] = deque(maxlen=_RATES)

    def refresh(self, job: JobStatus) -> None:
        """Query the master again. If this fails, keep the last replies and show the error."""
        try:
            self.ask(job)
        except FlightedlError as error:
            self._trouble = str(error)

    def ask(self, job: JobStatus) -> None:
        """Query the master. Raises the same errors as ``JobStatus.ask``."""
        self.take(job.read(_TIMEOUT_S), job.ask("events", encode(self._request), EventsReply, _TIMEOUT_S))

    def take(self, status: StatusReply, news: EventsReply) -> None:
        self._status, self._trouble = status, ""
        self._rates.append(status.records_per_s)
        self._events.extend(news.events)
        after = news.events[-1].number if news.events else self._request.after
        self._request = EventsRequest(after=after, generation=news.generation)

    def screen(self) -> RenderableType:
        status = self._status
        parts: list[RenderableType] = [Text(self._trouble, style="red")] if self._trouble else []
        if status is None:
            return Group(*parts)
        # Without colors, nothing else would mark the end of the bar's line.
        parts.append(Padding(ProgressBar(total=1.0, completed=progress_of(status)), 0))
        parts += [Text(f"{name:<12} {value}", overflow="ellipsis", no_wrap=True) for name, value in facts(status)]
        parts.append(Text(f"{'throughput':<12} {sparkline(self._rates)}", style="cyan"))
        if rounds := list(waits(status)):
            parts += [Text(), Text("waiting rounds", style="bold"), *(Text(line, style="yellow") for line in rounds)]
        parts += [Text(), processes(status), Text()]
        if spent := list(times(status)):
            parts += [Text("where their time goes", style="bold"), *map(Text, spent), Text()]
        parts.append(self._newest())
        return Group(*parts)

    def _newest(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("when", "event", "newest last"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for event in self._events:
            at = dt.datetime.fromtimestamp(event.at, dt.UTC).astimezone()
            style = "yellow" if event.is_warning else ""
            table.add_row(f"{at:%H:%M:%S}", event.kind, Text(event.text), style=style)
        return table


def waits(status: StatusReply) -> Iterable[str]:
    """Yield a line for each waiting round that names the trainers it is waiting for."""
    names = {trainer.trainer: trainer.name or trainer.trainer for trainer in status.trainers}
    for server in status.pservers:
        if server.waits_for and server.waits_s >= _EVERY_S:
            members = ", ".join(names.get(each, each) for each in server.waits_for)
            yield f"round {server.waits_at} of {server.name} has waited {server.waits_s:.0f} s for {members}"


def times(status: StatusReply) -> Iterable[str]:
    """Yield a line for each trainer, with the profile of its loop and the staleness of its gradients."""
    for trainer in status.trainers:
        stale = "" if trainer.staleness is None else f", staleness {trainer.staleness:.1f}"
        if spent := in_words(trainer.profile):
            yield f"{trainer.name or trainer.trainer}: {spent}{stale}"


def sparkline(values: Sequence[float]) -> str:
    """Return a plot of one line, scaled from 0 to the highest value."""
    highest = max(values, default=0.0) or 1.0
    return "".join(_BARS[round(value / highest * (len(_BARS) - 1))] for value in values)
