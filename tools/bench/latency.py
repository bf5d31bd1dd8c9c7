"""``flightedl bench latency``: steps and rounds of small models, compared with the floor, gloo and bare Flight.

Each result is a ratio to a reference, with a limit. The two sides are measured in turn. Ratios can be compared between
machines; times cannot.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from flightedl.process.importing import require

from .dense import STANDARD, compare, default_steps, flightedl_side
from .floor import COUNT, floor_side
from .modules import all_reduce, gloo_side
from .sides import Side, busy_cores, measuring, print_json, print_table, ratio, say, take_turns
from .trainer import Workload

_SMALL_MB = 4 * COUNT / (1 << 20)
_STEPS, _FLOOR_STEPS = 400, 2000
_CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and its limit, which is a minimum if ``is_at_least``, otherwise a maximum."""

    what: str
    ours: str
    other: str
    value: float
    limit: float
    is_at_least: bool = False

    @property
    def is_met(self) -> bool:
        """True if the value is within its limit."""
        return self.value >= self.limit if self.is_at_least else self.value <= self.limit

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.is_at_least else '≤'} {self.limit:g}"


def by_floor(what: str, times: Sequence[Sequence[float]], limit: float) -> Bar:
    """Compare a step with the same step of the floor."""
    ours_s, floor_s = map(statistics.median, times)
    value = ratio(times[0], times[1])
    return Bar(
        f"{what}: x of the floor's time", f"{1e3 * ours_s:.3f} ms", f"floor {1e3 * floor_s:.3f} ms", value, limit
    )


def when_busy(what: str, ours: Side, turns: int, limit: float) -> Bar:
    """Compare a step on a busy machine, with a busy loop on each core, to a step on the idle machine."""
    quiet, busy = [], []
    for _ in range(turns):
        quiet.append(ours.run(_STEPS))
        with busy_cores():
            busy.append(ours.run(_STEPS))
    texts = f"{1e3 * statistics.median(busy):.3f} ms", f"without {1e3 * statistics.median(quiet):.3f} ms"
    return Bar(f"{what}, a busy loop on each core: x of the time without", *texts, ratio(busy, quiet), limit)


def sync_steps(directory: Path, turns: int) -> list[Bar]:
    """Measure a round of two trainers in sync mode."""
    what = f"{COUNT} parameters, sync, 2 trainers"
    with (
        flightedl_side(Workload(mb=_SMALL_MB, trainers=2, mode="sync"), directory) as ours,
        floor_side("line", 2, is_sync=True) as floor,
        contextlib.ExitStack() as stack,
    ):
        gloo = gloo_side(all_reduce, COUNT, 2, stack)
        gloo.wait_until_ready()
        times = take_turns([ours, floor, gloo], turns, [_STEPS, _FLOOR_STEPS, _STEPS])
        busy = when_busy(what, ours, turns, 1.1)
    texts = [f"{1 / statistics.median(each):,.0f} steps/s" for each in times]
    faster = ratio(times[2], times[0])
    return [
        by_floor(what, times[:2], 2.5),
        Bar(f"{what}: x of the other's steps/s", texts[0], f"gloo all-reduce {texts[2]}", faster, 2, True),
        busy,
    ]


def async_steps(directory: Path, turns: int) -> list[Bar]:
    """Measure a step of one trainer on the same host as the pserver."""
    what = f"{COUNT} parameters, async, 1 trainer"
    with flightedl_side(Workload(mb=_SMALL_MB), directory) as ours, floor_side("line") as floor:
        times = take_turns([ours, floor], turns, [_STEPS, _FLOOR_STEPS])
        return [by_floor(what, times, 2), when_busy(what, ours, turns, 1)]


def tcp_steps(directory: Path, turns: int) -> list[Bar]:
    """Measure the same step over TCP, compared with the same values in Flight's metadata."""
    with flightedl_side(Workload(mb=_SMALL_MB, path="tcp"), directory) as ours, floor_side("flight") as floor:
        times = take_turns([ours, floor], turns, [_STEPS, _STEPS])
    return [by_floor(f"{COUNT} parameters, async, by TCP", times, 1.5)]


def many_clients(directory: Path, turns: int) -> list[Bar]:
    """Measure one pserver's messages per second with four trainers, and its processor time per message."""
    found = []
    for path, kind, steps in (("auto", "line", 4 * _FLOOR_STEPS), ("tcp", "flight", _FLOOR_STEPS)):
        workload = Workload(mb=_SMALL_MB, trainers=_CLIENTS, path=path)
        with flightedl_side(workload, directory) as ours, floor_side(kind, _CLIENTS) as floor:
            take_turns([ours, floor], turns, [_STEPS, steps])
            mine, least = ours.measured(), floor.measured()
        what = f"{_CLIENTS} trainers, {'by TCP' if path == 'tcp' else 'one host'}"
        texts = f"{mine.steps_per_s:,.0f}/s", f"floor {least.steps_per_s:,.0f}/s"
        rate = mine.steps_per_s / least.steps_per_s
        found.append(Bar(f"{what}, messages/s: x of the floor's", *texts, rate, 0.35, True))
        used = f"{1e6 * mine.server_cpu_s:.0f} us", f"floor {1e6 * least.server_cpu_s:.0f} us"
        cpu = mine.server_cpu_s / max(least.server_cpu_s, 1e-9)
        found.append(Bar(f"{what}, pserver's processor time per message: x of the floor's", *used, cpu, 3))
    return found


def many_parameters(directory: Path, turns: int) -> list[Bar]:
    """Measure a model with a thousand small parameters."""
    workload = STANDARD["tiny"]
    found = compare(workload, turns=turns, steps=default_steps(workload), directory=directory)
    texts = f"{1e3 * found.flightedl.step_s:.2f} ms", f"bare Flight {1e3 * found.bare.step_s:.2f} ms"
    return [Bar("1,000 parameters of 1,000, async: x of the other's speed", *texts, found.ratio[0], 0.85, True)]


MEASURES: dict[str, Callable[[Path, int], list[Bar]]] = {
    "sync": sync_steps,
    "async": async_steps,
    "tcp": tcp_steps,
    "clients": many_clients,
    "many": many_parameters,
}


@click.command()
@click.argument("measures", nargs=-1, type=click.Choice(list(MEASURES)))
@measuring(turns=5)
def latency(*, measures: Sequence[str], turns: int, wants_json: bool) -> None:
    """Compare steps and rounds of small models with the floor, gloo and bare Flight.

    Runs the given MEASURES, or all of them. "sync" requires PyTorch, because it uses gloo.
    """
    found: list[Bar] = []
    if "sync" in (measures or MEASURES):
        require("torch", "the measure sync", "torch")
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        for name in measures or MEASURES:
            say(name)
            found += MEASURES[name](Path(directory), turns)
    if wants_json:
        print_json([asdict(bar) | {"is_met": bar.is_met} for bar in found])
        return
    columns = ("figure", "flightedl", "other side", "ratio", "limit", "met")
    rows = [
        (bar.what, bar.ours, bar.other, f"{bar.value:.2f}", bar.wanted, "yes" if bar.is_met else "no") for bar in found
    ]
    print_table("small models, medians of alternated runs", columns, rows, left=(0, 2, 5))
