"""The seed that found each planted bug last. Tests try it first, so that a bug costs one run instead of hundreds.

A seed may stop finding its bug when the simulation changes. Tests then try all others, which only costs time.
``python -m tests.simulation.found_at`` looks for new seeds and takes some minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

from tests.simulation.cores import BUGS, run_seeds

FILE = Path(__file__).with_suffix(".json")
#: Number of seeds among which each planted bug is found.
WITHIN = 600
#: Look for another seed if a run takes longer; a job that does not end takes seconds.
_QUICK_S = 1.0
_TRIES = 3


def seeds_for(flaw: str) -> list[int]:
    """Return all seeds, first the one that found the bug last."""
    noted = json.loads(FILE.read_text()).get(flaw)
    return list(dict.fromkeys([*([] if noted is None else [noted]), *range(WITHIN)]))


def quick_seed(flaw: str) -> tuple[str, int | None]:
    """Return the quickest of some seeds that find the bug, or None."""
    found: list[tuple[float, int]] = []
    for seed in seeds_for(flaw):
        began = time.process_time()
        if run_seeds([seed], flaws=[flaw]).found:
            found.append((time.process_time() - began, seed))
            if found[-1][0] < _QUICK_S or len(found) == _TRIES:
                break
    return flaw, min(found)[1] if found else None


def main() -> None:
    """Rewrite the file as seeds are found, and print the bugs that no seed finds."""
    noted = {flaw: seed for flaw, seed in json.loads(FILE.read_text()).items() if flaw in BUGS}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for flaw, seed in pool.imap_unordered(quick_seed, BUGS):
            if seed is None:
                print(f"not found within {WITHIN} seeds: {flaw}", flush=True)
                noted.pop(flaw, None)
            else:
                noted[flaw] = seed
            # In one step, because the other process reads the file.
            part = FILE.with_suffix(".part")
            part.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n")
            part.replace(FILE)


if __name__ == "__main__":
    main()
