"""Mutation testing of the domain's guards: ``mutants.py [--sample N] [PACKAGE ...]``.

Each mutant (see ``operators``) has one wrong guard. The tests that reach its lines run, fastest first, until one fails.
A mutant that passes all of them *survives*: a test is missing, or the guard is superfluous, or the mutant is
*equivalent*, that is, indistinguishable from the product. ``equivalent.toml`` lists equivalent mutants with reasons.

Mutants do not need new processes of pytest. The tests are collected once, and run once under coverage, which shows the
tests that reach each line. Then each mutant is a fork of this process in which one function has the mutant's code.
hypothesis tries the same examples in each run and does not shrink them. A test that needs several times as much CPU
time as without the mutant is stopped, and the mutant counts as killed, because it presumably does not terminate.

The exit code is 1 if an unlisted mutant survives, or if a listed one is killed or does not exist.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import re
import resource
import sys
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest
from operators import ROOT, Functions, Mutant, change, described, functions_of, mutants_of

DOMAIN = ROOT / "flightedl" / "domain"
TESTS = ROOT / "tests" / "domain"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
#: Packages that contain decisions.
PACKAGES = ("queue", "groups", "consistency", "exactly_once", "recovery", "checkpoint", "master", "trainer", "pserver")
MARKED = "etcd or s3 or faults or slow or seeds"
#: Further tests of a package, in addition to test modules that import from it.
TESTS_BESIDE = {"master": ROOT / "tests" / "master"}
#: CPU seconds of the tests that a mutant must pass, fastest tests first.
BUDGET_S = 3.0
MEMORY_LIMIT_BYTES = 4 << 30
#: Outcomes, as exit codes of the child. BROKEN is a bug in this program.
KILLED, SURVIVED, BROKEN, ENDLESS = range(4)


@dataclass(slots=True)
class Results:
    """Outcomes of mutants by module."""

    killed: dict[str, list[Mutant]] = field(default_factory=lambda: defaultdict(list))
    survived: dict[str, list[Mutant]] = field(default_factory=lambda: defaultdict(list))
    is_complete: bool = False


class Mutation:
    """A pytest plugin that runs all tests once, and then runs for each mutant the tests that reach it.

    Args:
        paths: Modules to change.
        sample: Number of mutants, spread evenly; None runs all.
    """

    def __init__(self, paths: list[Path], sample: int | None) -> None:
        self._paths, self._sample = paths, sample
        self._coverage = coverage.Coverage(data_file=None, include=[str(path) for path in paths], config_file=False)
        #: CPU seconds of each test under coverage.
        self._seconds: dict[str, float] = {}
        self._failed = False
        #: True while no mutant is active, so that every failure is reported.
        self._is_unchanged = True
        self.results = Results()

    # --- pytest's hooks ---

    def pytest_internalerror(self, excrepr: object) -> None:
        _print(str(excrepr))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings  # Imported after pytest, which rewrites asserts of its plugins.

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", settings.default, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _print(f"{report.longrepr}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = True
            if self._is_unchanged:
                _print(f"{report.longreprtext}\n{report.nodeid} fails without any mutant\n")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True
        tests_of_line = self._run_unchanged(session)
        if self._failed:
            return True
        by_id = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # gc does not list frozen objects.
        functions = functions_of(self._paths)
        caches = [thing for thing in gc.get_objects() if isinstance(thing, functools._lru_cache_wrapper)]
        gc.collect()
        gc.freeze()
        if self._outcome(None, session.items, functions, caches) != SURVIVED:
            _print("the tests fail in a child of this process\n")
            return True
        self._is_unchanged = False
        for mutant in self._mutants():
            lines = range(mutant.lines[0], mutant.lines[1] + 1)
            items = self._quickest(by_id[test] for line in lines for test in tests_of_line[mutant.path, line])
            outcome = self._outcome(mutant, items, functions, caches) if items else SURVIVED
            (self.results.survived if outcome == SURVIVED else self.results.killed)[mutant.path].append(mutant)
            _print("s" if outcome == SURVIVED else ".")
        _print("\n")
        self.results.is_complete = True
        return True

    # --- what it does ---

    def _run_unchanged(self, session: pytest.Session) -> dict[tuple[str, int], set[str]]:
        """Run all tests once, and record which tests reach which lines."""
        self._coverage.start()
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            self._coverage.switch_context(item.nodeid)
            started = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._seconds[item.nodeid] = time.process_time() - started
        self._coverage.stop()
        data = self._coverage.get_data()
        reaching: dict[tuple[str, int], set[str]] = defaultdict(set)
        for path in data.measured_files():
            for line, tests in data.contexts_by_lineno(path).items():
                reaching[str(Path(path).relative_to(ROOT)), line].update(test for test in tests if test)
        return reaching

    def _mutants(self) -> list[Mutant]:
        found = [
            mutant
            for path in self._paths
            for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())
            if mutant.function
        ]
        if self._sample is None or self._sample >= len(found):
            return found
        return [found[number * len(found) // self._sample] for number in range(self._sample)]

    def _quickest(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """Return the fastest tests within ``BUDGET_S``, in ascending order, and at least one if there is any."""
        found: list[pytest.Item] = []
        seconds = 0.0
        for item in sorted(set(items), key=lambda item: (self._seconds[item.nodeid], item.nodeid)):
            seconds += self._seconds[item.nodeid]
            if found and seconds > BUDGET_S:
                break
            found.append(item)
        return found

    def _outcome(
        self,
        mutant: Mutant | None,
        items: list[pytest.Item],
        functions: Functions,
        caches: list[functools._lru_cache_wrapper[object]],
    ) -> int:
        """Run the tests in a child of this process. Return KILLED, SURVIVED or ENDLESS."""
        child = os.fork()
        if child == 0:
            outcome = BROKEN
            try:
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
                if mutant is not None:
                    change(mutant, functions)
                for cache in caches:
                    cache.cache_clear()
                outcome = KILLED  # Includes failures of pytest itself, for lack of memory.
                outcome = KILLED if self._fails(items, may_be_endless=mutant is not None) else SURVIVED
            except BaseException:  # noqa: BLE001 - the child ends here, whatever happened
                if outcome == BROKEN or mutant is None:
                    traceback.print_exc()
            finally:
                os._exit(outcome)
        _, status = os.waitpid(child, 0)
        outcome = os.WEXITSTATUS(status) if os.WIFEXITED(status) else ENDLESS
        assert outcome != BROKEN, f"this mutant could not be run: {mutant and described(mutant)}"
        return outcome

    def _fails(self, items: list[pytest.Item], *, may_be_endless: bool) -> bool:
        started = time.process_time()
        for item, following in zip(items, [*items[1:], None], strict=True):
            if may_be_endless:
                used = time.process_time() - started
                limit_s = math.ceil(used + 1 + 3 * self._seconds[item.nodeid])
                resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return True
        return False


def _print(text: str) -> None:
    sys.__stdout__.write(text)
    sys.__stdout__.flush()


def tests_of(packages: Iterable[str]) -> list[Path]:
    """Return the test modules of these packages of the domain."""
    imports = re.compile(rf"^from flightedl\.domain\.({'|'.join(packages)})\b", re.MULTILINE)
    found = [path for path in TESTS.rglob("test_*.py") if imports.search(path.read_text())]
    for package in set(packages) & TESTS_BESIDE.keys():
        found += TESTS_BESIDE[package].rglob("test_*.py")
    return sorted(set(found))


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Return the reasons why mutants are equivalent, by (path, function, line before, line after)."""
    entries = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    return {(each["path"], each["function"], each["before"], each["after"]): each["reason"] for each in entries}


def report(results: Results, *, is_sample: bool) -> int:
    """Print a row for each module, and unexpected outcomes. Return the exit code."""
    known = equivalents()
    rows = []
    for path in sorted({*results.killed, *results.survived}):
        survived = results.survived.get(path, [])
        equivalent = sum(mutant.key in known for mutant in survived)
        rows.append((path, len(results.killed.get(path, [])), equivalent, len(survived) - equivalent))
    print("| module | mutants | killed | equivalent | survive |\n|---|---|---|---|---|")
    together = [sum(row[column] for row in rows) for column in (1, 2, 3)]
    for path, killed, equivalent, left in [*rows, ("together", *together)]:
        name = path.removeprefix("flightedl/domain/").removesuffix(".py")
        print(f"| {name} | {killed + equivalent + left} | {killed} | {equivalent} | {left} |")
    survivors = [mutant for mutants in results.survived.values() for mutant in mutants]
    wrong = [f"survives: {described(mutant)}" for mutant in survivors if mutant.key not in known]
    if not is_sample:
        keys = {mutant.key for mutant in survivors}
        paths = {path for path, *_ in rows}
        wrong += [
            f"listed as equivalent, but killed or gone: {key}" for key in known if key[0] in paths and key not in keys
        ]
    print("\n".join(wrong))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="of flightedl.domain; none: all that decide")
    parser.add_argument("--module", help="only this one of the packages' modules")
    parser.add_argument("--sample", type=int, help="only so many, spread evenly")
    arguments = parser.parse_args()
    packages = arguments.packages or PACKAGES
    paths = [path for package in packages for path in sorted((DOMAIN / package).glob(f"{arguments.module or '*'}.py"))]
    mutation = Mutation(paths, arguments.sample)
    os.chdir(ROOT)
    # Limits are in CPU time, so this process may have a low priority.
    options = ["-o", "addopts=", "-o", "timeout=0", "--import-mode=importlib", "-m", f"not ({MARKED})"]
    for plugin in ("cacheprovider", "xdist", "terminal"):
        options += ["-p", f"no:{plugin}"]
    started = time.monotonic()
    pytest.main([*options, *map(str, tests_of(packages))], plugins=[mutation])
    if not mutation.results.is_complete:
        return 2
    code = report(mutation.results, is_sample=arguments.sample is not None)
    print(f"{time.monotonic() - started:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
