"""Count the calls that one small step makes, in the trainer's stepping thread and the pserver's serving thread.

A call is a ``call`` event of ``sys.setprofile`` in a frame of ``flightedl/``. Counts do not depend on the machine's
speed, so they can be compared between machines and while others use the processor.

    python -m benchmarks.step_calls                # calls, modules and returns to a module, median of 200 warm steps
    python -m benchmarks.step_calls --list         # the calls of one step, in their order
    python -m benchmarks.step_calls --by-module
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import flightedl
from flightedl.domain.consistency.modes import Async
from flightedl.pserver.steps.line_loop import LineLoop
from tests.client.loop_bench import Loop
from tests.client.pserver_bench import Cluster

ROOT = str(Path(flightedl.__file__).parent) + "/"
SHAPES = {"w": (64, 10), "b": (10,)}
WARM_UP, STEPS = 100, 200

Called = tuple[str, str, str]


class Calls:
    """Calls of two threads, in the order in which they were made within each thread."""

    def __init__(self) -> None:
        self.trainer: list[Called] = []
        self.pserver: list[Called] = []

    def profiler(self, calls: list[Called]) -> Callable[[FrameType, str, object], None]:
        """Return a function for ``sys.setprofile`` that appends to ``calls``."""

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(ROOT):
                calls.append((code.co_filename[len(ROOT) :], code.co_qualname, str(code.co_firstlineno)))

        return note

    @contextmanager
    def of_pservers(self) -> Iterator[None]:
        """Profile the thread that serves small steps."""
        run = LineLoop._run  # noqa: SLF001 - the thread has to do it itself

        def run_profiled(loop: LineLoop, *arguments: Any) -> None:
            sys.setprofile(self.profiler(self.pserver))
            run(loop, *arguments)

        LineLoop._run = run_profiled  # type: ignore[method-assign]  # noqa: SLF001
        try:
            yield
        finally:
            LineLoop._run = run  # type: ignore[method-assign]  # noqa: SLF001


def steps_of_calls() -> list[list[tuple[str, Called]]]:
    """The calls of each of ``STEPS`` warm steps: ("trainer" or "pserver", call)."""
    calls = Calls()
    found: list[list[tuple[str, Called]]] = []
    with calls.of_pservers(), Cluster(SHAPES, Async()) as cluster, Loop(cluster, WARM_UP + STEPS + 2) as loop:
        rng = np.random.default_rng(0)
        gradients = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        for number, _ in enumerate(loop.data):
            if number >= WARM_UP:
                if number > WARM_UP:
                    # By now, the pserver's thread waits for the next message, or is about to.
                    found.append(
                        [("trainer", call) for call in calls.trainer] + [("pserver", call) for call in calls.pserver]
                    )
                calls.trainer.clear()
                calls.pserver.clear()
                if number == WARM_UP + STEPS:
                    break
                sys.setprofile(calls.profiler(calls.trainer))
            loop.parameters.step(gradients)
        sys.setprofile(None)
    return found


def returns(step: list[tuple[str, Called]]) -> int:
    """How often a call enters a module that the thread had left before."""
    count = 0
    for side in ("trainer", "pserver"):
        seen: set[str] = set()
        last = ""
        for who, (module, _, _) in step:
            if who == side and module != last:
                count += module in seen
                seen.add(module)
                last = module
    return count


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the calls of a median step")
    parser.add_argument("--by-module", action="store_true", help="count the calls of a median step by module")
    arguments = parser.parse_args()
    steps = sorted(steps_of_calls(), key=len)
    median = steps[len(steps) // 2]
    if arguments.list:
        for who, (module, name, line) in median:
            print(f"{who} {module}:{line} {name}")
    if arguments.by_module:
        for (who, module), count in collections.Counter((who, call[0]) for who, call in median).most_common():
            print(f"{count:4} {who} {module}")
    calls = statistics.median(len(step) for step in steps)
    modules = statistics.median(len({call[0] for _, call in step}) for step in steps)
    print(
        f"{calls:.0f} calls in {modules:.0f} modules, {statistics.median(map(returns, steps)):.0f} returns to a module"
    )


if __name__ == "__main__":
    main()
