"""Seeds that reach the product's marks: ``python -m tests.simulation.reached`` looks for few of them.

A mark is on a path that only faults reach (``flightedl.marks``). ``reached.json`` has seeds which together reach all
marks that many seeds reach. Tests run them, so such a path is not lost without notice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from tests.simulation import runs
from tests.simulation.scenario import SHARES, Wanted, exact

FILE = Path(__file__).with_suffix(".json")


def _wanted(seed: int, feature: str) -> Wanted:
    return exact(seed, Wanted(features={feature: True} if feature else {}))


def main() -> None:
    """Run seeds with each feature, and write few of them to the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.reached", description=__doc__)
    parser.add_argument("features", nargs="*", help=f"features to look at; all by default: {', '.join(SHARES)}")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds for each feature")
    parser.add_argument("--from", type=int, default=1, dest="first", help="first seed")
    chosen = parser.parse_args()
    runs.warm_up()
    known = json.loads(FILE.read_text()) if FILE.exists() else []
    tried = [(each["seed"], msgspec.convert(each["wanted"], Wanted)) for each in known]
    for number, feature in enumerate(chosen.features or ["", *SHARES]):
        first = chosen.first + number * chosen.seeds
        tried += [(seed, _wanted(seed, feature)) for seed in range(first, first + chosen.seeds)]
    left: list[tuple[set[str], int, Wanted]] = []
    for seed, wanted in tried:
        outcome = runs.run_forked(seed, wanted)
        if outcome.is_good:
            left.append((set(outcome.marks), seed, wanted))
        else:
            print(outcome, flush=True)
    noted, count = [], 0
    while best := max(left, key=lambda each: len(each[0])):
        marks, seed, wanted = best
        if not marks:
            break
        noted.append({"seed": seed, "wanted": {"features": wanted.features, "is_exact": True}, "marks": sorted(marks)})
        count += len(marks)
        left = [(others - marks, other, its) for others, other, its in left]
    FILE.write_text(json.dumps(noted, indent=2) + "\n")
    print(f"{len(noted)} of {len(left)} seeds reach {count} marks")


if __name__ == "__main__":
    runs.fix_hashes("tests.simulation.reached")
    main()
