from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from flightedl.launch.progress import (
    Figures,
    JobConsole,
    LiveDisplay,
    PlainDisplay,
    live_view,
    make_display,
    plain_line,
)
from flightedl.messages.status import FailedPiece, ServerStatus, StatusReply, TaskCounts, TrainerStatus
from flightedl.process.host import host_facts


class StoodStill:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wall_time(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


PSERVER = ServerStatus(index=0, address="127.0.0.1:1", generation=5, state="serving")


def figures(elapsed_s: float = 3.0, trouble: str = "", **status: object) -> Figures:
    given = {
        "job": "j",
        "state": "training",
        "epoch": 0,
        "epochs": 2,
        "tasks": TaskCounts(todo=3, pending=2, done=5, total=10),
        "records": 12345,
        "records_per_s": 678.9,
        "metrics": {"loss": 0.51234},
        "pservers": [PSERVER],
        **status,
    }
    reply = StatusReply(**given)  # type: ignore[arg-type]
    return Figures(elapsed_s, reply, trainers_running=1, trainers=2, pservers=2, trouble=trouble)


def text_of(console_width: int, *renderables: object) -> str:
    console = Console(file=io.StringIO(), width=console_width, force_terminal=False)
    for each in renderables:
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plain_line_contains_all_figures() -> None:
    assert plain_line(figures()) == (
        "3 s, epoch 1/2, tasks 5/10, 12,345 records, 679 records/s, loss 0.5123, pservers 1/2, trainers 1/2"
    )


def test_the_line_counts_batches_of_local_steps() -> None:
    assert ", 679 records/s, 1,234 batches of 50 local steps, " in plain_line(figures(batches=1234, local_steps=50))


def test_the_line_says_that_the_master_has_not_answered_yet() -> None:
    none_yet = Figures(1.0, None, trainers_running=2, trainers=2, pservers=2)
    assert plain_line(none_yet) == "1 s, epoch -, pservers 0/2, trainers 2/2, waiting for the master"


def test_scripts_before_their_first_batch_are_named_instead_of_no_records() -> None:
    facts = host_facts()
    trainers = [
        TrainerStatus(trainer="a", generation=1, name="trainer-0", starting_s=26.2, facts=facts),
        TrainerStatus(trainer="b", generation=2, name="trainer-1", facts=facts),
        TrainerStatus(trainer="c", generation=3, name="trainer-2"),
        TrainerStatus(trainer="e", generation=4, starting_s=26.2, waiting_for="pserver 0", facts=facts),
    ]
    scripts = {"trainer-0": 30.0, "trainer-1": 30.0, "trainer-2": 8.0, "trainer-3": 7.0, "trainer-4": 2.0}
    shown = plain_line(replace(figures(records=0, trainers=trainers), scripts=scripts))
    assert ", trainer-0: the script has run for 30 s and has not asked for a batch, and 2 more, loss" in shown
    assert " records" not in shown
    assert "the script" not in plain_line(replace(figures(trainers=trainers), scripts=scripts)), "others train"


def test_the_reason_for_waiting_is_shown_once() -> None:
    assert plain_line(figures(waiting_for="waiting for 1 of 2 pservers")).endswith(", waiting for 1 of 2 pservers")
    assert plain_line(figures(trouble="etcd does not answer")).endswith(
        ", waiting for the master (etcd does not answer)"
    )


def test_compilation_of_kernels_has_a_progress_bar_from_the_start() -> None:
    states = ["serving", "waiting for its kernels to be compiled (3 of 21)", "waiting for the first values"]
    servers = [ServerStatus(index=i, address="a:1", generation=5, state=state) for i, state in enumerate(states)]
    given = figures(pservers=servers, tasks=TaskCounts())
    assert given.compiling == (3, 21)
    assert "compiling kernels, once on this machine (3 of 21)" in plain_line(given)
    assert "compiling kernels" in text_of(200, live_view(given, {}))
    assert "3/21" in text_of(200, live_view(given, {}))
    console = Console(file=io.StringIO(), width=300)
    PlainDisplay(console, StoodStill()).update(given)
    assert isinstance(console.file, io.StringIO)
    assert "(3 of 21)" in console.file.getvalue()
    assert figures().compiling is None


def test_alarms_are_shown() -> None:
    alarm_line = plain_line(figures(dataset_alarm="a.csv is gone", checkpoint_alarm="the store is full"))
    assert alarm_line.endswith(", ALARM checkpoints: the store is full; dataset: a.csv is gone")


def test_failed_tasks_are_counted() -> None:
    piece = FailedPiece(epoch=0, task=3, first_batch=0, end_batch=1, attempts=5, trainer="t", error="x")
    assert ", 1 failed," in plain_line(figures(failed=[piece]))


def test_the_shown_epoch_never_exceeds_the_last_one() -> None:
    assert figures(epoch=2).epoch == "2/2"
    assert figures(epoch=41, epochs=None).epoch == "42"
    assert figures(tasks=TaskCounts()).epoch == "-"


def test_plain_output_prints_a_line_every_few_seconds_and_at_each_change() -> None:
    clock, out = StoodStill(), io.StringIO()
    with PlainDisplay(Console(file=out, width=300), clock) as display:
        for second in range(12):
            clock.at = float(second)
            display.update(figures(float(second), epoch=int(second >= 7)))
        display.lines("trainer-1", ["[bold]as it is[/bold] 40 %"])
        display.event("pserver-0 ended")
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines[:4]] == [f"flightedl: {second} s" for second in (0, 5, 7)] + [
        "trainer-1 | [bold]as it is[/bold] 40 %"
    ]
    assert lines[4] == "flightedl: pserver-0 ended"


def test_a_start_is_silent_for_ten_seconds_and_then_names_the_reason() -> None:
    clock, out = StoodStill(), io.StringIO()
    with PlainDisplay(Console(file=out, width=300), clock) as display:
        for second in range(13):
            clock.at = float(second)
            status = (
                None
                if second < 5
                else figures(
                    tasks=TaskCounts(), records=1, records_per_s=2.0, metrics={}, pservers=[], waiting_for="trainers"
                ).status
            )
            display.update(Figures(float(second), status, trainers_running=2, trainers=2, pservers=2))
    assert out.getvalue().splitlines() == [
        "flightedl: 10 s, epoch -, 1 records, 2 records/s, pservers 0/2, trainers 2/2, waiting for trainers"
    ]
    starting = Figures(3.0, None, trainers_running=2, trainers=2, pservers=2)
    assert "starting" in text_of(120, live_view(starting, {}))
    assert "waiting" not in text_of(120, live_view(starting, {}))


def test_the_live_display_shows_bars_and_prints_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with LiveDisplay(console) as display:
        display.lines("trainer-0", ["an ordinary line"])
        display.lines("trainer-0", ["flights: 40 %"])
        display.update(figures())
        assert set(display._steps) == {("trainer-0", "flights")}
        display.lines("trainer-0", ["flights: 100 %"])
        assert display._steps == {}
        assert "flights" not in text_of(120, display._live.renderable), "the bar disappears with the last line"
    assert "trainer-0 | an ordinary line" in out.getvalue()
    assert "trainer-0 | flights: 100 %" in out.getvalue()
    assert "trainer-0 | flights: 40 %" not in out.getvalue()


@pytest.mark.parametrize("in_color", [False, True])
def test_lines_that_arrive_together_are_shown_unchanged(in_color: bool) -> None:
    out = io.StringIO()
    with PlainDisplay(
        Console(file=out, width=20, no_color=not in_color, force_terminal=in_color), StoodStill()
    ) as display:
        display.lines("trainer-0", ["\x1b[31mred", "[b]no markup[/b], and as long as it is", "", "last"])
    shown = out.getvalue()
    assert ("\x1b[31m" in shown) is in_color
    plain = re.sub(r"\x1b\[\d*m", "", shown)
    assert (
        plain == "trainer-0 | red\ntrainer-0 | [b]no markup[/b], and as long as it is\ntrainer-0 | \ntrainer-0 | last\n"
    )


def test_the_live_view_shows_all_figures() -> None:
    shown = text_of(120, live_view(figures(waiting_for="1 of 2 pservers"), {("trainer-0", "flights"): 40}))
    assert "trainer-0 flights" in shown
    assert "5/10 tasks, 3 s" in shown
    assert "loss 0.5123" in shown
    assert "waiting for 1 of 2 pservers" in shown
    assert live_view(None, {}) is not None


def test_the_display_depends_on_the_console() -> None:
    clock = StoodStill()
    assert isinstance(make_display(Console(file=io.StringIO()), clock), PlainDisplay)
    assert isinstance(make_display(Console(file=io.StringIO(), force_terminal=True), clock), LiveDisplay)


def test_a_console_without_a_reader_reports_it_once_and_stops_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        console, closed = JobConsole(), []
        console.on_closed = lambda: closed.append(1)
        display = PlainDisplay(console, StoodStill())
        display.lines("trainer-0", ["before"])
        assert os.read(reading, 100) == b"trainer-0 | before\n"
        os.close(reading)
        display.lines("trainer-0", ["after"])
        display.event("the end")
    assert closed == [1]


def test_a_full_disk_ends_the_output_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as output:  # noqa: PTH123 - a device
        monkeypatch.setattr(sys, "stdout", output)
        console, closed = JobConsole(), []
        console.on_closed = lambda: closed.append(1)
        display = PlainDisplay(console, StoodStill())
        for _ in range(2):
            display.lines("trainer-0", ["a line"])
    assert not closed
    assert capsys.readouterr().err.count("the job goes on without output: [Errno 28]") == 1
