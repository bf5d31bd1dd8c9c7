"""Plants bugs in the process of a seed, and notes the calls of functions there, to aim strikes at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from tests.simulation.bugs import BUGS
from tests.simulation.cluster import Started
from tests.simulation.scheduler import Process, running
from tests.support.planting import Edit, Planted, planted

#: (role, index, place of a function) -> number of its calls in this process. See ``prepare``.
calls: Counter[tuple[str, int, str]] = Counter()
#: Called before each call that is counted, for faults that are aimed at calls.
watchers: list[Callable[[Process, str, str], None]] = []
_planted = ExitStack()


def prepare(names: Iterable[str], counted: Iterable[str]) -> None:
    """Plant bugs in this process, and count the calls of functions, for as long as it lives."""
    edits = [Edit(place, "", f"import {__name__} as _calls_; _calls_.called({place!r})") for place in counted]
    _planted.enter_context(planted([*(BUGS[name] for name in names), Planted("", tuple(edits))]))


def called(place: str) -> None:
    """Note that the running thread calls a function."""
    scheduler = running()
    if scheduler is not None and scheduler.current is not None:
        process = scheduler.current.process
        if isinstance(process, Started):
            calls[process.role, process.index, place] += 1
        for watcher in watchers:
            watcher(process, f"call {place}", "before")
