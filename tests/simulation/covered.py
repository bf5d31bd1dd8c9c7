"""Counts the statements of drivers that seeds execute: ``python -m tests.simulation.covered --seeds 20``.

Only statements in the bodies of functions count: those of modules and classes are executed by the import alone.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from coverage import Coverage

from tests.simulation import runs
from tests.simulation.scenario import Wanted

ROOT = Path(__file__).resolve().parents[2]
#: Packages whose statements are counted, in groups, and the part that 100 seeds execute at least.
GROUPS = {("client",): 60, ("pserver", "rowstore", "master"): 70, ("coordination",): 65, ("rpc", "wire"): 60}
#: Cost of the trace, as a factor of the limit of processor time.
_SLOWER = 4
#: File -> its lines that were executed.
Lines = dict[str, list[int]]


def files_of(package: str) -> list[Path]:
    """Return the modules of a driver package."""
    return sorted((ROOT / "flightedl" / package).rglob("*.py"))


def lines_of(seeds: Iterable[int]) -> Iterator[Lines]:
    """Run seeds in children of this process, which must be warm. Yield the lines that each has executed."""

    def run(seed: int) -> Lines:
        traced = _coverage()
        traced.start()
        runs.run_here(seed, Wanted(), is_last=True)
        traced.stop()
        data = traced.get_data()
        return {file: sorted(data.lines(file) or ()) for file in data.measured_files()}

    for seed in seeds:
        found: Lines | None = runs.forked(lambda: run(seed), _SLOWER * 40.0)  # noqa: B023 - called before the next one
        if found is None:
            print(f"seed {seed} has no result", file=sys.stderr)
        else:
            yield found


def body_lines(source: str) -> set[int]:
    """Return the first line of each statement in the body of a function, without docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            found.update(each.lineno for part in body for each in ast.walk(part) if isinstance(each, ast.stmt))
    return found


class Covered:
    """Counts statements, given the lines that were executed."""

    def __init__(self, executed: Iterable[Lines]) -> None:
        lines: dict[str, set[int]] = defaultdict(set)
        for each in executed:
            for file, numbers in each.items():
                lines[file].update(numbers)
        self._coverage = _coverage()
        self._coverage.get_data().add_lines(lines)

    def of(self, file: Path) -> tuple[int, list[int]]:
        """Return the number of statements in functions of a module, and the lines of those that were not executed."""
        _, statements, _, missing, _ = self._coverage.analysis2(str(file))
        inside = body_lines(file.read_text())
        return len(inside.intersection(statements)), sorted(inside.intersection(missing))


def _coverage() -> Coverage:
    include = [f"{ROOT}/flightedl/{package}/*" for group in GROUPS for package in group]
    return Coverage(include=include, concurrency=["greenlet"], data_file=None, config_file=False)


def main(seeds: range, *, names_files: bool) -> None:
    """Print a table."""
    runs.warm_up()
    covered = Covered(list(lines_of(seeds)))
    print(f"statements in function bodies executed by seeds {seeds.start} to {seeds.stop - 1}")
    for group, bar in GROUPS.items():
        counts = {file: covered.of(file) for package in group for file in files_of(package)}
        for package in group:
            _print_row(package, [counts[file] for file in files_of(package)])
        if names_files:
            for file, (count, missing) in sorted(counts.items(), key=lambda each: -len(each[1][1])):
                if missing:
                    _print_row(f"  {file.relative_to(ROOT / 'flightedl')}", [(count, missing)])
        _print_row("/".join(group), list(counts.values()), f", bar {bar} %")


def _print_row(name: str, counts: list[tuple[int, list[int]]], after: str = "") -> None:
    total = sum(count for count, _ in counts)
    executed = total - sum(len(missing) for _, missing in counts)
    print(f"{name:40s} {executed:6,d} of {total:6,d} = {100 * executed / max(total, 1):3.0f} %{after}")


if __name__ == "__main__":
    runs.fix_hashes("tests.simulation.covered")
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.covered", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds")
    parser.add_argument("--from", type=int, default=1, dest="first", help="first seed")
    parser.add_argument("--files", action="store_true", help="also print each module")
    chosen = parser.parse_args()
    main(range(chosen.first, chosen.first + chosen.seeds), names_files=chosen.files)
