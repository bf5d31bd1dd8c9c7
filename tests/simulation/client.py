"""Runs seeds from tests. The only module of the new simulation that pytest imports.

The simulation needs a process of its own, in which the fakes were there before the product. Each worker of pytest has
one such process, which forks a child for each seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Ran:
    """What a seed did. See ``runs.Outcome``."""

    seed: int
    trace: str
    problems: list[str]
    virtual_s: float
    processor_s: float
    switches: int
    messages: int
    strikes: int
    mode: str
    marks: dict[str, int] = field(repr=False)
    log: list[str] = field(repr=False)

    @property
    def is_good(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    def require_good(self) -> None:
        """Fail with everything that is needed to repeat the seed."""
        assert self.is_good, "\n".join(
            [
                f"python -m tests.simulation --seed {self.seed} (Python {sys.version.split()[0]})",
                *self.problems,
                *self.log[-30:],
            ]
        )


class Simulation:
    """A warm process that runs seeds."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        for name in [name for name in environment if name.startswith(("FLIGHTEDL_", "PYTEST_", "COV_"))]:
            del environment[name]
        command = [sys.executable, "-m", "tests.simulation.server"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, seeds: Iterable[int], **wanted: Any) -> Iterator[Ran]:
        """Run seeds one after the other. ``wanted`` are fields of ``scenario.Wanted``."""
        for seed in seeds:
            yield self._run({"seed": seed, "wanted": wanted})

    def record(self, seed: int, directory: Path, **wanted: Any) -> None:
        """Run a seed, and record it in a directory, which must exist."""
        self._run({"seed": seed, "wanted": wanted, "more": {"record": str(directory)}}).require_good()

    def timeline(self, heading: str) -> str:
        """Return a timeline of docs/recovery.md."""
        told: str = self._ask({"timeline": heading})
        return told

    def run_tests(self, paths: list[str], left_out: list[str]) -> tuple[list[str], dict[str, str]]:
        """Run test files on the in-memory Flight. Return the tests that passed, and why others failed."""
        passed, failed = self._ask({"tests": paths, "left_out": left_out})
        return passed, failed

    def _run(self, request: dict[str, Any]) -> Ran:
        answer = self._ask(request)
        return Ran(**{name: answer[name] for name in Ran.__dataclass_fields__})

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the simulation's process ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10.0)
        self._process.stdout.close()
