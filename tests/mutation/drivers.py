"""Mutants of drivers: ``python -m tests.mutation.drivers --count 300``.

Draws wrong guards (see ``operators``) from driver statements that seeds execute. For each mutant, runs the
seeds that execute its line, those with most strikes first, until one finds it. Prints the mutants that survive, and a
row for each module. The chosen mutants depend on the code, the seeds and ``--draw`` only.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.operators import Mutant, change, described, functions_of, mutants_of
from tests.simulation import covered, runs
from tests.simulation.scenario import Wanted, drawn

#: Virtual seconds after which a job hangs, as for planted bugs.
WANTED = Wanted(changes={"limit_s": 150.0})
#: Processor seconds after which a seed loops.
_LIMIT_S = 15.0


@dataclass(slots=True)
class Tried:
    """A mutant, and the seeds that ran with it."""

    mutant: Mutant
    seeds: list[int] = field(default_factory=list)
    #: What the last seed found; "" for nothing.
    problem: str = ""


class Hunt:
    """Runs seeds with mutants.

    Args:
        seeds: Seeds to choose from. Those that fail without a mutant are left out.
        tries: Maximum number of seeds that run with one mutant.
    """

    def __init__(self, seeds: Sequence[int], tries: int) -> None:
        self._tries = tries
        self._paths = [file for group in covered.GROUPS for package in group for file in covered.files_of(package)]
        good = [seed for seed in seeds if runs.run_forked(seed, WANTED).is_good]
        if len(good) < len(seeds):
            print(f"seeds that fail without a mutant: {sorted(set(seeds) - set(good))}")
        executed = zip(good, covered.lines_of(good), strict=True)
        #: Seed -> file -> lines.
        self._executed = {seed: {file: set(lines) for file, lines in found.items()} for seed, found in executed}
        self._seeds = sorted(good, key=lambda seed: -len(drawn(seed, WANTED).strikes))
        gc.unfreeze()  # gc does not list frozen objects.
        self._functions = functions_of(self._paths)
        gc.freeze()

    def draw(self, count: int, number: int) -> list[Mutant]:
        """Return so many mutants of executed statements in functions."""
        found = [
            mutant
            for path in self._paths
            for mutant in mutants_of(str(path.relative_to(covered.ROOT)), path.read_text())
            if mutant.function and self._seeds_of(mutant)
        ]
        chosen = random.Random(number).sample(found, min(count, len(found)))
        print(f"{len(chosen)} of {len(found)} mutants of statements that {len(self._seeds)} seeds execute", flush=True)
        return chosen

    def _seeds_of(self, mutant: Mutant) -> list[int]:
        file = str(covered.ROOT / mutant.path)
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        return [seed for seed in self._seeds if not self._executed[seed].get(file, set()).isdisjoint(lines)]

    def run(self, mutant: Mutant) -> Tried:
        """Run seeds until one finds the mutant."""
        tried = Tried(mutant)
        for seed in self._seeds_of(mutant)[: self._tries]:
            tried.seeds.append(seed)
            tried.problem = self._problem(mutant, seed)
            if tried.problem:
                break
        return tried

    def _problem(self, mutant: Mutant, seed: int) -> str:
        def work() -> str:
            change(mutant, self._functions)
            try:
                outcome = runs.run_here(seed, WANTED, is_last=True)
            except Exception as error:  # noqa: BLE001 - the mutant's
                return f"fails: {error!r}"
            return "" if outcome.is_good else outcome.problems[0][:150]

        found = runs.forked(work, _LIMIT_S)
        return "loops" if found is None else str(found)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.drivers", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--draw", type=int, default=1, help="number of the draw")
    parser.add_argument("--seeds", type=int, default=100, help="seeds to choose from")
    parser.add_argument("--tries", type=int, default=30, help="seeds to run with each mutant")
    parser.add_argument("--processes", type=int, default=1, help="seeds that run at once")
    chosen = parser.parse_args()
    began_s = time.monotonic()
    runs.warm_up()
    hunt = Hunt(range(1, 1 + chosen.seeds), chosen.tries)
    done: list[Tried] = []
    with ThreadPoolExecutor(chosen.processes) as pool:
        for tried in pool.map(hunt.run, hunt.draw(chosen.count, chosen.draw)):
            done.append(tried)
            verdict = f"found by seed {tried.seeds[-1]}: {tried.problem}" if tried.problem else "survives"
            print(f"{described(tried.mutant)}\n    {verdict}, {len(tried.seeds)} seeds", flush=True)
    by_file: dict[str, list[Tried]] = {}
    for tried in done:
        by_file.setdefault(tried.mutant.path, []).append(tried)
    for path, group in sorted(by_file.items()):
        found = sum(bool(each.problem) for each in group)
        print(f"{Path(path).relative_to('flightedl')!s:50s} {found:4d} of {len(group):4d}")
    found, percent = sum(bool(each.problem) for each in done), 100 / max(len(done), 1)
    print(f"found: {found} of {len(done)} = {found * percent:.0f} %, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    runs.fix_hashes("tests.mutation.drivers")
    main()
