"""Where each planted bug was found last: tests try that seed first, so that a bug costs one run rather than hundreds.

A seed that finds nothing any more, because the simulation has changed, costs time and nothing else: all others are
tried after it. ``python -m tests.simulation.found_at`` looks for new ones, and takes some minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

from flightedl.testing.simulation import BUGS, run_seeds

FILE = Path(__file__).with_suffix(".json")
#: Seeds within which each planted bug is found.
WITHIN = 600
#: Another seed is looked for where a run takes longer: a job that does not end takes seconds.
_QUICK_S = 1.0
_TRIES = 3


def seeds_for(flaw: str) -> list[int]:
    """All seeds, the one that found the bug last before the others."""
    noted = json.loads(FILE.read_text()).get(flaw)
    return list(dict.fromkeys([*([] if noted is None else [noted]), *range(WITHIN)]))


def quick_seed(flaw: str) -> tuple[str, int | None]:
    """A seed that finds the bug, the quickest of some; None: there is none."""
    found: list[tuple[float, int]] = []
    for seed in seeds_for(flaw):
        began = time.process_time()
        if run_seeds([seed], flaws=[flaw]).found:
            found.append((time.process_time() - began, seed))
            if found[-1][0] < _QUICK_S or len(found) == _TRIES:
                break
    return flaw, min(found)[1] if found else None


def main() -> None:
    """Write the file anew, as seeds are found; the bugs that no seed finds are told."""
    noted = {flaw: seed for flaw, seed in json.loads(FILE.read_text()).items() if flaw in BUGS}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for flaw, seed in pool.imap_unordered(quick_seed, BUGS):
            if seed is None:
                print(f"not found within {WITHIN} seeds: {flaw}", flush=True)
                noted.pop(flaw, None)
            else:
                noted[flaw] = seed
            # In one step: the other process reads it.
            part = FILE.with_suffix(".part")
            part.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n")
            part.replace(FILE)


if __name__ == "__main__":
    main()
