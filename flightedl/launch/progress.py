"""Display of a running job: live on a terminal, as plain lines elsewhere.

Rules:

* Lines of trainers are printed unchanged after ``trainer-1 |``, above the live display. A line of the form ``title: 40
  %`` becomes a bar in the live display instead.
* Plain output has a line of figures every few seconds, and whenever the epoch or the reason for waiting changes.
* Waiting is normal when a job starts, so it is shown only after ten seconds.
* If the reader of the output closes its end, as ``head`` does, the job is stopped (:class:`JobConsole`).
* The display decides nothing. It only turns :class:`Figures` into text.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flightedl.launch.failed import alarms_of
from flightedl.messages.status import StatusReply
from flightedl.ports import Clock

_PLAIN_EVERY_S = 5.0
_QUIET_S = 10.0
#: Maximum number of tables to list. If there are more, only their total is shown.
_TABLES_SHOWN = 3
#: Text in a pserver's state (see ``PserverService.status``).
_COMPILING = re.compile(r"kernels to be compiled \((\d+) of (\d+)\)")
_PERCENT_LINE = re.compile(r"(?P<title>\S.{0,80}?): +(?P<percent>\d{1,3}) ?%")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures about a running job, from the master's status and the launcher."""

    elapsed_s: float
    #: None until the master has been reached.
    status: StatusReply | None
    trainers_running: int
    trainers: int
    pservers: int
    #: Why the status is missing or outdated.
    trouble: str = ""
    #: Name of a trainer -> seconds for which its process has run.
    scripts: Mapping[str, float] = field(default_factory=dict)

    @property
    def waiting_for(self) -> str:
        """Description of what the job is waiting for; empty while it trains."""
        if self.status is None or self.trouble:
            return f"the master ({self.trouble})" if self.trouble else "the master"
        return self.status.waiting_for

    @property
    def compiling(self) -> tuple[int, int] | None:
        """Number of kernels that the slowest pserver has compiled, and the total; None if no pserver is compiling."""
        states = () if self.status is None else (pserver.state for pserver in self.status.pservers)
        found = [match for state in states if (match := _COMPILING.search(state))]
        return min(((int(each[1]), int(each[2])) for each in found), default=None)

    @property
    def is_starting(self) -> bool:
        """True if the job has only just been started, so that there is no work yet."""
        status = self.status
        if self.compiling:
            return False
        return self.elapsed_s < _QUIET_S and (status is None or not (status.tasks.total or status.evaluations))

    @property
    def epoch(self) -> str:
        """Current epoch, counted from one, and number of epochs, for example ``1/2``."""
        if self.status is None or self.status.tasks.total == 0:
            return "-"
        last = self.status.epochs
        number = self.status.epoch + 1
        return f"{number}" if last is None else f"{min(number, last)}/{last}"

    @property
    def alarm(self) -> str:
        """Problems that do not stop the job; empty if there are none."""
        if self.status is None:
            return ""
        return "; ".join(alarms_of(self.status))

    @property
    def texts(self) -> tuple[str, ...]:
        """Rate, metrics and processes, each as a short text."""
        found: list[str] = []
        if self.status is not None:
            starting = [] if self.status.records else self.status.starting(self.scripts)
            if starting:
                others = f", and {len(starting) - 1} more" if len(starting) > 1 else ""
                found.append(starting[0] + others)
            else:
                found += [f"{self.status.records:,} records", f"{self.status.records_per_s:,.0f} records/s"]
                if self.status.local_steps > 1:
                    found.append(f"{self.status.batches:,} batches of {self.status.local_steps} local steps")
            found += [f"{name} {value:.4g}" for name, value in sorted(self.status.metrics.items())]
            found += [
                f"{each.name} {each.tasks.done}/{each.tasks.total} tasks"
                for each in self.status.evaluations
                if not each.is_done
            ]
            found += _tables_of(self.status)
            if self.status.tasks.failed or self.status.failed:
                found.append(f"{max(self.status.tasks.failed, len(self.status.failed))} failed")
        if self.compiling:
            done, total = self.compiling
            found.append(f"compiling kernels, once on this machine ({done} of {total})")
        there = 0 if self.status is None else len(self.status.pservers)
        found.append(f"pservers {there}/{self.pservers}")
        found.append(f"trainers {self.trainers_running}/{self.trainers}")
        return tuple(found)


def _tables_of(status: StatusReply) -> list[str]:
    if len(status.tables) > _TABLES_SHOWN:
        return [f"{sum(table.rows for table in status.tables):,} rows in {len(status.tables)} tables"]
    return [f"{table.name} {table.rows:,} rows" for table in status.tables]


class JobConsole(Console):
    """A console that reports, once, that its output has been closed by the reader. After that, it prints nothing.

    Otherwise, rich would end the thread that prints. If that thread also reads a trainer's pipe, the pipe would fill
    up, and the trainer would block forever.
    """

    #: Called from the thread that notices that the output is closed.
    on_closed: Callable[[], None] = staticmethod(lambda: None)

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:  # The disk is full, for example. The job must not depend on it.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"flightedl: the job goes on without output: {error}\n")
                sys.stderr.flush()
            self._end_output()

    def on_broken_pipe(self) -> None:
        if not self.quiet:
            self._end_output()
            self.on_closed()

    def _end_output(self) -> None:
        self.quiet = True
        # The interpreter flushes buffered output when it exits.
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - the name of a device, not a path
            os.dup2(nowhere.fileno(), (sys.stderr if self.stderr else sys.stdout).fileno())


class Display:
    """Display of a running job. Thread-safe."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def lines(self, name: str, texts: Sequence[str]) -> None:
        """Show lines of a trainer's output."""
        _print(self._console, *(f"{name} | {text}" for text in texts))

    def event(self, text: str) -> None:
        """Show a message from the launcher."""
        _print(self._console, f"flightedl: {text}")

    def update(self, figures: Figures) -> None:
        """Show the latest figures."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PlainDisplay(Display):
    """A display that prints plain lines, for pipes, files and dumb terminals."""

    def __init__(self, console: Console, clock: Clock) -> None:
        super().__init__(console)
        self._clock = clock
        self._shown_at: float | None = None
        self._shown: tuple[str, ...] = ("", "", "")

    def update(self, figures: Figures) -> None:
        if figures.is_starting and not figures.alarm:
            return
        now = self._clock.now()
        key = (figures.epoch, figures.waiting_for, figures.alarm)
        is_due = self._shown_at is None or now - self._shown_at >= _PLAIN_EVERY_S
        if is_due or key != self._shown:
            self._shown_at, self._shown = now, key
            self.event(plain_line(figures))


def plain_line(figures: Figures) -> str:
    """Return all figures as one line."""
    parts: list[str] = [f"{figures.elapsed_s:.0f} s", f"epoch {figures.epoch}"]
    if figures.status is not None and figures.status.tasks.total:
        parts.append(f"tasks {figures.status.tasks.done}/{figures.status.tasks.total}")
    parts.extend(figures.texts)
    if figures.waiting_for:
        parts.append(f"waiting for {_without_prefix(figures.waiting_for)}")
    if figures.alarm:
        parts.append(f"ALARM {figures.alarm}")
    return ", ".join(parts)


class LiveDisplay(Display):
    """A display that is redrawn at the bottom of the terminal, and removed when the job ends."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, transient=True, refresh_per_second=8)
        self._lock = threading.Lock()
        self._figures: Figures | None = None
        self._steps: dict[tuple[str, str], int] = {}

    def lines(self, name: str, texts: Sequence[str]) -> None:
        if shown := [text for text in texts if not self._is_step(name, text)]:
            super().lines(name, shown)

    def _is_step(self, name: str, text: str) -> bool:
        """True if a line created or moved a bar. The last line of a bar removes the bar and is printed."""
        match = _PERCENT_LINE.fullmatch(text.strip())
        if match is None:
            return False
        key, percent = (name, match["title"]), int(match["percent"])
        with self._lock:
            if percent >= 100:
                self._steps.pop(key, None)
            else:
                self._steps[key] = percent
        self._redraw()
        return percent < 100

    def update(self, figures: Figures) -> None:
        with self._lock:
            self._figures = figures
        self._redraw()

    def _redraw(self) -> None:
        with self._lock:
            steps, figures = dict(self._steps), self._figures
        self._live.update(live_view(figures, steps))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def live_view(figures: Figures | None, steps: dict[tuple[str, str], int]) -> RenderableType:
    """Return the live display: bars, figures, and the reason for waiting."""
    bars = Table.grid(padding=(0, 1))
    for (name, title), percent in steps.items():
        bars.add_row(f"{name} {title}", ProgressBar(total=100, completed=percent, width=40), f"{percent} %")
    rows: list[RenderableType] = [bars]
    if figures is not None:
        if figures.compiling:
            done, total = figures.compiling
            bars.add_row("compiling kernels", ProgressBar(total=total, completed=done, width=40), f"{done}/{total}")
        if figures.status is not None and figures.status.tasks.total:
            tasks = figures.status.tasks
            bar = ProgressBar(total=tasks.total, completed=tasks.done + tasks.failed, width=40)
            bars.add_row(f"epoch {figures.epoch}", bar, f"{tasks.done}/{tasks.total} tasks, {figures.elapsed_s:.0f} s")
        rows.append(Text("  ".join(figures.texts), style="dim"))
        if figures.is_starting:
            rows.append(Text("starting", style="dim"))
        elif figures.waiting_for:
            rows.append(Text(f"waiting for {_without_prefix(figures.waiting_for)}", style="yellow"))
        if figures.alarm:
            rows.append(Text(figures.alarm, style="red"))
    return Group(*rows)


def make_display(console: Console, clock: Clock) -> Display:
    """Return the kind of display that suits the console."""
    return (
        LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(console, clock)
    )


def _without_prefix(text: str) -> str:
    return text.removeprefix("waiting for ")


def _print(console: Console, *lines: str) -> None:
    """Print lines with their colors. Printing many lines in one call takes hardly longer than printing one line."""
    has_colors = any("\x1b" in line for line in lines)
    text = Text("\n").join(map(Text.from_ansi, lines)) if has_colors else Text("\n".join(lines))
    console.print(text, soft_wrap=True)
