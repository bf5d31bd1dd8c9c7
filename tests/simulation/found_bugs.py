"""The seed that found each bug in a driver last. Tests run exactly that seed.

The features of its scenario are noted, too, so a seed stays as it is when scenarios get new features. It may stop
finding its bug when the simulation changes in other ways. ``python -m tests.simulation.found_bugs`` then looks for
another one: it tries the old seeds first, and rewrites ``found_bugs.json``. A seed counts only if it finds nothing
without the bug. A ``former_seed`` found its bug in an earlier version of the scenarios; no test runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tests.simulation import runs
from tests.simulation.scenario import Wanted, drawn, features_of

FILE = Path(__file__).with_suffix(".json")
#: Virtual seconds after which a job hangs. Jobs without a bug take at most a minute.
LIMIT_S = 150.0


class _Search:
    """Looks for seeds that find bugs.

    Args:
        seeds: Number of seeds among which to choose for each bug.
        tries: Maximum number of seeds to try for each bug.
    """

    def __init__(self, seeds: int, tries: int) -> None:
        self._seeds, self._tries = seeds, tries
        self._noted: dict[str, dict[str, object]] = json.loads(FILE.read_text()) if FILE.exists() else {}
        self._is_good: dict[tuple[int, str], bool] = {}

    def is_found(self, name: str) -> bool:
        """True if a seed is noted for a bug."""
        return "seed" in self._noted.get(name, {})

    def look_for(self, name: str) -> str:
        """Try seeds, and note the result in the file. Return a line that describes it."""
        from tests.simulation.driver_bugs import MOVE_BUGS

        anything = Wanted(features={"moves": True} if name in MOVE_BUGS else {}, changes={"limit_s": LIMIT_S})
        known: dict[str, Any] = self._noted.get(name, {})
        before, tried = known.get("seed", known.get("former_seed", 0)), known.get("tried", 0)
        # Those with many faults find the most.
        seeds = sorted(range(1, 1 + self._seeds), key=lambda seed: -len(drawn(seed, anything).strikes))
        candidates = [(seed, anything) for seed in seeds[: self._tries]]
        if before:
            candidates.insert(0, (before, msgspec.convert(known["wanted"], Wanted) if "wanted" in known else anything))
        for seed, wanted in candidates:
            exact = replace(wanted, features=features_of(seed, wanted), is_exact=True)
            outcome = runs.run_forked(seed, replace(exact, planted=(name,)))
            if not outcome.is_good and self._is_good_without(seed, exact):
                noted = {"features": exact.features, "is_exact": True, "changes": exact.changes}
                self._note(name, {"seed": seed, "wanted": noted, "problem": outcome.problems[0][:150]})
                return f"{seed:4d} {outcome.processor_s:5.1f} s  {name}: {outcome.problems[0][:150]}"
        former = {"former_seed": before} if before else {}
        self._note(name, {"tried": tried + min(len(seeds), self._tries), **former})
        return f"not found in {min(len(seeds), self._tries)} seeds: {name}"

    def _is_good_without(self, seed: int, wanted: Wanted) -> bool:
        place = seed, str(wanted)
        if place not in self._is_good:
            self._is_good[place] = runs.run_forked(seed, wanted).is_good
            if not self._is_good[place]:
                print(f"seed {seed} fails without a bug ({wanted})", flush=True)
        return self._is_good[place]

    def _note(self, name: str, found: dict[str, object]) -> None:
        from tests.simulation.driver_bugs import DRIVER_BUGS

        self._noted[name] = found
        kept = {each: self._noted[each] for each in DRIVER_BUGS if each in self._noted}
        FILE.write_text(json.dumps(kept, indent=2) + "\n")


def main(names: Iterable[str], seeds: int, tries: int, *, only_unfound: bool) -> None:
    """Look for seeds that find these bugs; none means all bugs."""
    runs.warm_up()
    # Imports the product, which must be on the fakes.
    from tests.simulation.driver_bugs import DRIVER_BUGS

    search = _Search(seeds, tries)
    for name in names or DRIVER_BUGS:
        if not only_unfound or not search.is_found(name):
            print(search.look_for(name), flush=True)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.found_bugs", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.found_bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs to look for; all by default")
    parser.add_argument("--unfound", action="store_true", help="leave out bugs for which a seed is noted")
    parser.add_argument("--seeds", type=int, default=30, help="number of seeds")
    parser.add_argument(
        "--tries", type=int, default=0, help="try at most so many of them, those with most faults first"
    )
    chosen = parser.parse_args()
    main(chosen.names, chosen.seeds, chosen.tries or chosen.seeds, only_unfound=chosen.unfound)
