"""The seed that found each bug last. Tests run exactly that seed.

The features of its scenario are noted, too, so a seed stays as it is when scenarios get new features. It may stop
finding its bug when the simulation changes in other ways. ``python -m tests.simulation.found_bugs`` then looks for
another one: it tries the old seed first, then those that already find other bugs, so that these share the run without a
bug, and then those that call the changed functions most often. It rewrites ``found_bugs.json``. A seed counts only if
it finds nothing without the bug. A ``former_seed`` found its bug in an earlier version of the scenarios; no test runs
it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation import runs
from tests.simulation.scenario import Wanted, features_of

if TYPE_CHECKING:
    from tests.support.planting import Planted

FILE = Path(__file__).with_suffix(".json")
#: Virtual seconds after which a job hangs. Jobs without a bug take at most a minute.
LIMIT_S = 150.0
#: Number of seeds with other bugs to try first.
_SHARED = 6


class _Search:
    """Looks for seeds that find bugs.

    Args:
        bugs: All bugs, by their names.
        features: Bug -> a feature of all scenarios in which it is looked for; empty for none.
        seeds: Number of seeds among which to choose for each bug.
        tries: Maximum number of seeds to try for each bug.
        processes: Number of seeds that run at once.
    """

    def __init__(
        self, bugs: dict[str, Planted], features: dict[str, str], seeds: int, tries: int, processes: int
    ) -> None:
        self._bugs, self._features, self._seeds, self._tries = bugs, features, seeds, tries
        self._processes = processes
        self._noted: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
        #: Feature -> seed -> calls of each changed function in a run without a bug; without seeds that fail.
        self._calls: dict[str, dict[int, Counter[str]]] = {}
        self._lock = threading.Lock()

    def is_found(self, name: str) -> bool:
        """True if a seed is noted for a bug."""
        return "seed" in self._noted.get(name, {})

    def look_for(self, names: Collection[str]) -> Iterator[str]:
        """Try seeds for these bugs, and note the results in the file. Yield a line about each bug."""
        with ThreadPoolExecutor(self._processes) as pool:
            for feature in sorted({self._features[name] for name in names}):
                seeds = range(1, 1 + self._seeds)
                found = pool.map(lambda seed, feature=feature: self._called(seed, feature), seeds)
                self._calls[feature] = {seed: calls for seed, calls in zip(seeds, found, strict=True) if calls}
                bad = sorted(set(seeds) - self._calls[feature].keys())
                yield f"{len(seeds)} seeds with {feature or 'anything'}; failed without a bug: {bad or 'none'}"
            yield from pool.map(self._look_for, names)

    def _wanted(self, seed: int, feature: str) -> Wanted:
        anything = Wanted(features={feature: True} if feature else {}, changes={"limit_s": LIMIT_S})
        return replace(anything, features=features_of(seed, anything), is_exact=True)

    def _called(self, seed: int, feature: str) -> Counter[str]:
        places = tuple({edit.place for bug in self._bugs.values() for edit in bug.edits})
        outcome = runs.run_forked(seed, replace(self._wanted(seed, feature), counted=places))
        return Counter(outcome.calls) if outcome.is_good else Counter()

    def _candidates(self, name: str) -> Iterator[tuple[int, Wanted]]:
        feature, known = self._features[name], self._noted.get(name, {})
        if "seed" in known:
            yield known["seed"], msgspec.convert(known["wanted"], Wanted)
        places = {edit.place for edit in self._bugs[name].edits}
        calls = {seed: sum(found[place] for place in places) for seed, found in self._calls[feature].items()}
        reaching = sorted((seed for seed in calls if calls[seed]), key=lambda seed: -calls[seed])
        of_others = Counter(
            found["seed"]
            for found in list(self._noted.values())
            if "seed" in found and found["wanted"]["features"] == self._wanted(found["seed"], feature).features
        )
        shared = [seed for seed, _ in of_others.most_common() if calls.get(seed)][:_SHARED]
        for seed in list(dict.fromkeys([*shared, *reaching]))[: self._tries]:
            yield seed, self._wanted(seed, feature)

    def _look_for(self, name: str) -> str:
        known, tried = self._noted.get(name, {}), 0
        for seed, wanted in self._candidates(name):
            tried += 1
            outcome = runs.run_forked(seed, replace(wanted, planted=(name,)))
            if outcome.has_failed_itself:
                return f"cannot be planted: {name}: {outcome.problems[0][-150:]}"
            # A former seed may fail without the bug, too.
            if not outcome.is_good and (seed != known.get("seed") or runs.run_forked(seed, wanted).is_good):
                noted = {"features": wanted.features, "is_exact": True, "changes": wanted.changes}
                self._note(name, {"seed": seed, "wanted": noted, "problem": outcome.problems[0][:150]})
                return f"{seed:4d} {outcome.processor_s:5.1f} s  {name}: {outcome.problems[0][:150]}"
        former = known.get("seed", known.get("former_seed"))
        self._note(name, {"tried": max(tried, known.get("tried", 0)), **({"former_seed": former} if former else {})})
        return f"not found in {tried} seeds: {name}"

    def _note(self, name: str, found: dict[str, Any]) -> None:
        with self._lock:
            self._noted[name] = found
            kept = {each: self._noted[each] for each in self._bugs if each in self._noted}
            FILE.write_text(json.dumps(kept, indent=2) + "\n")


def main() -> None:
    """Look for seeds that find the bugs that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.found_bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs to look for; all by default")
    parser.add_argument("--unfound", action="store_true", help="leave out bugs for which a seed is noted")
    parser.add_argument("--seeds", type=int, default=60, help="number of seeds")
    parser.add_argument("--tries", type=int, default=20, help="try at most so many of them for each bug")
    parser.add_argument("--processes", type=int, default=2, help="seeds that run at once")
    chosen = parser.parse_args()
    runs.warm_up()
    # Imports the product, which must be on the fakes.
    from tests.simulation.planted import BUGS, FEATURES

    search = _Search(BUGS, FEATURES, chosen.seeds, chosen.tries, chosen.processes)
    for line in search.look_for(
        [name for name in chosen.names or BUGS if not (chosen.unfound and search.is_found(name))]
    ):
        print(line, flush=True)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.found_bugs", *sys.argv[1:]])
    main()
