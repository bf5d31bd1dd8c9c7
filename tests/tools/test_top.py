"""Display of `flightedl top`."""

from __future__ import annotations

import io

from rich.console import Console

from flightedl.messages.status import (
    EventsReply,
    JobEvent,
    ServerStatus,
    StatusReply,
    TaskCounts,
    TrainerStatus,
)
from flightedl_tools.top import View, sparkline


def shown(view: View) -> str:
    out = io.StringIO()
    Console(file=out, width=160, highlight=False).print(view.screen())
    return out.getvalue()


def news(*numbers: int) -> EventsReply:
    events = [JobEvent(number=n, at=0.0, kind="epoch_done", text=f"epoch is done [epoch]={n}") for n in numbers]
    return EventsReply(generation=3, events=events)


def status(records_per_s: float = 10.0) -> StatusReply:
    waiting = ServerStatus(
        index=1, address="h:1", generation=2, state="serving", waits_for=["t-1"], waits_at=7, waits_s=12.0
    )
    return StatusReply(
        job="demo",
        state="training",
        epochs=2,
        tasks=TaskCounts(done=5, total=10),
        records_per_s=records_per_s,
        pservers=[waiting],
        pservers_desired=2,
        trainers=[
            TrainerStatus(
                trainer="t-1",
                name="trainer-0",
                generation=1,
                holding=2,
                profile={"wait": 3.0, "script": 1.0},
                staleness=2.0,
            )
        ],
    )


def test_top_shows_waiting_trainers_all_processes_and_the_newest_events() -> None:
    view = View()
    view.take(status(), news(1, 2))
    view.take(status(5.0), news(3))
    assert "trainer-0: 25% in the script, 75% waiting for others in the round, staleness 2.0" in shown(view)
    text = shown(view)
    assert "round 7 of pserver-1 has waited 12 s for trainer-0" in text
    assert "pserver-0" in text
    assert "missing" in text
    assert "epoch is done [epoch]=3" in text
    assert view._request.after == 3
    assert "█▄" in text or "█▅" in text


def test_only_the_newest_events_are_kept() -> None:
    view = View()
    view.take(status(), news(*range(1, 30)))
    assert "[epoch]=29" in shown(view)
    assert "[epoch]=2\n" not in shown(view)


def test_a_curve_fits_into_one_line() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "  "
    assert sparkline([0, 4, 8]) == " ▄█"


def test_the_progress_bar_has_a_line_of_its_own_without_colors() -> None:
    view = View()
    view.take(status(), news(1))
    bar, after = shown(view).splitlines()[:2]
    assert set(bar.strip()) == {"━"}
    assert after.startswith("job ")
