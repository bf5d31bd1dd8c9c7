"""The seed that found each bug last. Tests run exactly that seed.

The features of its scenario are noted, too, so a seed stays as it is when scenarios get new features. It may stop
finding its bug when the simulation changes in other ways. ``python -m tests.simulation.found_bugs`` then looks for
another one: it tries the old seed first, then those that already find other bugs, so that these share the run without a
bug, then those that call the changed functions most often, and at last calm ones, struck when they call these. It
rewrites ``found_bugs.json``. A seed counts only if it finds nothing without the bug. A ``former_seed`` found its bug in
an earlier version of the scenarios; no test runs it.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation import runs
from tests.simulation.scenario import Aim, Strike, Wanted, exact

if TYPE_CHECKING:
    from tests.support.planting import Planted

FILE = Path(__file__).with_suffix(".json")
#: Virtual seconds after which a job hangs. Jobs without a bug take at most a minute.
LIMIT_S = 150.0
#: Number of seeds with other bugs to try first.
_SHARED = 6
#: Share of the aimed strikes that hit another process than the one that makes the call.
_OTHERS = 0.4
#: (kind, extents, other end) of aimed strikes that may hit another process than the one that makes the call.
_OTHERS_KINDS: tuple[tuple[str, tuple[float, ...], str], ...] = (
    ("kill", (0.1, 0.3, 1.0), ""),
    ("kill silently", (0.3,), ""),
    ("freeze", (1.0, 2.5, 5.0), ""),
    ("break", (0.5, 1.0), ""),
    ("lease", (0.0,), ""),
)
#: The same for the process that makes the call.
_KINDS = (
    *_OTHERS_KINDS,
    ("cut", (1.0, 3.0), "etcd"),
    ("cut", (1.0, 3.0), "master"),
    ("cut", (1.0, 3.0), "pserver"),
    ("lost request", (0.0,), ""),
    ("lost reply", (0.0,), ""),
)


#: (role, index, function) -> number of its calls.
Calls = dict[tuple[str, int, str], int]


class _Search:
    """Looks for seeds that find bugs.

    Args:
        bugs: All bugs, by their names.
        features: Bug -> a feature of all scenarios in which it is looked for; empty for none.
        seeds: Number of seeds among which to choose for each bug.
        tries: Maximum number of seeds to try for each bug, with the faults that they draw.
        aimed: Maximum number of calm seeds to try after them, with one strike or two when a changed function is called.
        processes: Number of seeds that run at once.
    """

    def __init__(
        self, bugs: dict[str, Planted], features: dict[str, str], seeds: int, tries: int, aimed: int, processes: int
    ) -> None:
        self._bugs, self._features, self._seeds, self._tries, self._aimed = bugs, features, seeds, tries, aimed
        self._processes = processes
        self._noted: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
        #: (feature, whether faults are drawn) -> seed -> calls in a run without a bug; without seeds that fail.
        self._calls: dict[tuple[str, bool], dict[int, Calls]] = {}
        self._lock = threading.Lock()

    def is_found(self, name: str) -> bool:
        """True if a seed is noted for a bug."""
        return "seed" in self._noted.get(name, {})

    def look_for(self, names: Collection[str]) -> Iterator[str]:
        """Try seeds for these bugs, and note the results in the file. Yield a line about each bug."""
        with ThreadPoolExecutor(self._processes) as pool:
            for feature in sorted({self._features[name] for name in names}):
                for faults in [True] * bool(self._tries) + [False] * bool(self._aimed):
                    wanted = [self._wanted(seed, feature, faults=faults) for seed in range(1, 1 + self._seeds)]
                    found = enumerate(pool.map(self._called, range(1, 1 + self._seeds), wanted), 1)
                    self._calls[feature, faults] = called = {seed: calls for seed, calls in found if calls}
                    bad = sorted(set(range(1, 1 + self._seeds)) - called.keys())
                    what = f"{feature or 'anything'} and {'faults' if faults else 'no faults'}"
                    yield f"{self._seeds} seeds with {what}; failed without a bug: {bad or 'none'}"
            yield from pool.map(self._look_for, names)

    def _wanted(self, seed: int, feature: str, *, faults: bool = True) -> Wanted:
        features = {feature: True} if feature else {}
        return exact(seed, Wanted(faults=faults, features=features, changes={"limit_s": LIMIT_S}))

    def _called(self, seed: int, wanted: Wanted) -> Calls:
        places = tuple({edit.place for bug in self._bugs.values() for edit in bug.edits})
        outcome = runs.run_forked(seed, replace(wanted, counted=places))
        return {(role, index, place): count for role, index, place, count in outcome.calls} if outcome.is_good else {}

    def _candidates(self, name: str) -> Iterator[tuple[int, Wanted]]:
        feature, known = self._features[name], self._noted.get(name, {})
        if "seed" in known:
            yield known["seed"], msgspec.convert(known["wanted"], Wanted)
        calls = self._calls_of(name, faults=True)
        total = {seed: sum(found.values()) for seed, found in calls.items()}
        reaching = sorted(total, key=lambda seed: -total[seed])
        of_others = Counter(
            found["seed"]
            for found in list(self._noted.values())
            if "seed" in found and found["wanted"].get("features", {}) == self._wanted(found["seed"], feature).features
        )
        shared = [seed for seed, _ in of_others.most_common() if seed in calls][:_SHARED]
        for seed in list(dict.fromkeys([*shared, *reaching]))[: self._tries]:
            yield seed, self._wanted(seed, feature)
        calm = self._calls_of(name, faults=False)
        for number in range(self._aimed if calm else 0):
            draw = random.Random(f"{name} {number}")
            seed = draw.choice(list(calm))
            yield seed, replace(self._wanted(seed, feature, faults=False), strikes=_aimed(calm[seed], draw))

    def _calls_of(self, name: str, *, faults: bool) -> dict[int, Calls]:
        """Return the calls of the functions that a bug changes, for each seed that reaches them."""
        places = {edit.place for edit in self._bugs[name].edits}
        every = self._calls.get((self._features[name], faults), {}).items()
        found = {seed: {place: count for place, count in calls.items() if place[2] in places} for seed, calls in every}
        return {seed: calls for seed, calls in found.items() if calls}

    def _look_for(self, name: str) -> str:
        known, tried = self._noted.get(name, {}), 0
        for seed, wanted in self._candidates(name):
            tried += 1
            outcome = runs.run_forked(seed, replace(wanted, planted=(name,)))
            if outcome.has_failed_itself:
                return f"cannot be planted: {name}: {outcome.problems[0][-150:]}"
            # A former seed, or a struck one, may fail without the bug, too.
            is_proved = seed != known.get("seed") and not wanted.strikes
            if not outcome.is_good and (is_proved or runs.run_forked(seed, wanted).is_good):
                default = msgspec.to_builtins(Wanted())
                noted = {key: each for key, each in msgspec.to_builtins(wanted).items() if each != default[key]}
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


def _aimed(calls: Calls, draw: random.Random) -> tuple[Strike, ...]:
    """Draw one or two strikes, aimed at one of these calls. Each hits the calling process, or another one."""
    role, index, place = draw.choice(list(calls))
    # Most of what goes wrong is at the first calls.
    number = 1 + int(calls[role, index, place] * draw.random() ** 2)
    aim = Aim(role, index, f"call {place}", number, "before")
    strikes = []
    for which in range(draw.choice((1, 1, 2))):
        struck, kinds = (role, index), _KINDS
        if draw.random() < _OTHERS:
            struck, kinds = (
                (draw.choice(("master", "pserver", "trainer")), index + draw.randrange(2)),
                _OTHERS_KINDS,
            )
        kind, extents, other = draw.choice(kinds)
        strikes.append(Strike(1000 + which, 0.0, kind, *struck, draw.choice(extents), other, aim))
    return tuple(strikes)


def main() -> None:
    """Look for seeds that find the bugs that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.found_bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs to look for; all by default")
    parser.add_argument("--unfound", action="store_true", help="leave out bugs for which a seed is noted")
    parser.add_argument("--seeds", type=int, default=60, help="number of seeds")
    parser.add_argument("--tries", type=int, default=20, help="try at most so many of them for each bug")
    parser.add_argument("--aimed", type=int, default=20, help="then try so many calm seeds with aimed strikes")
    parser.add_argument("--processes", type=int, default=2, help="seeds that run at once")
    chosen = parser.parse_args()
    runs.warm_up()
    # Imports the product, which must be on the fakes.
    from tests.simulation.bugs import BUGS, FEATURES

    search = _Search(BUGS, FEATURES, chosen.seeds, chosen.tries, chosen.aimed, chosen.processes)
    for line in search.look_for(
        [name for name in chosen.names or BUGS if not (chosen.unfound and search.is_found(name))]
    ):
        print(line, flush=True)


if __name__ == "__main__":
    runs.fix_hashes("tests.simulation.found_bugs")
    main()
