"""``python -m tests.simulation.cores``: runs one seed or many. The exit code is 1 if a run found a violation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flightedl.adapters.clock import SystemClock
from tests.simulation.bugs import BUGS
from tests.simulation.cores.runs import Summary, run_seeds
from tests.support.marks import report


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.cores", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="number of seeds, from 0 or --from on")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--faults", type=float, default=1.0, help="rate of faults: 0 none, 1 normal, 2 double")
    parser.add_argument("--mode", choices=("sync", "async", "bounded"), default="", help="run only this mode")
    parser.add_argument("--recovery", choices=("replay", "rollback"), default="", help="run only this recovery")
    parser.add_argument("--rows", action="store_true", help="treat blocks as buckets of a table, with rows")
    parser.add_argument("--moves", action="store_true", help="change the number of pservers from time to time")
    parser.add_argument("--standbys", action="store_true", help="let processes without an index follow pservers")
    parser.add_argument("--planted", choices=sorted(BUGS), metavar="NAME", help="plant this bug; see --list")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, metavar="DIR", help="record the run of --seed for `flightedl replay`")
    parser.add_argument("--marks", action="store_true", help="print how often each mark was reached")
    parser.add_argument("--list", action="store_true", help="list the bugs that can be planted")
    chosen = parser.parse_args()
    if chosen.record is not None and chosen.seed is None:
        parser.error("--record needs one run: give its --seed")
    return chosen


def main() -> int:
    """Run the seeds and print the findings."""
    chosen = _arguments()
    if chosen.list:
        sys.stdout.writelines(f"{name}: {text}\n" for name, text in BUGS.items())
        return 0
    clock = SystemClock()
    begun_s = clock.now()
    seeds = range(chosen.first, chosen.first + chosen.seeds) if chosen.seed is None else [chosen.seed]

    def progress(summary: Summary) -> None:
        if sys.stderr.isatty():
            done = f"{summary.seeds} of {len(seeds)} seeds, {summary.fault_count:,} faults, {len(summary.found)} found"
            sys.stderr.write(f"\r{done}\x1b[K")

    summary = run_seeds(
        seeds,
        flaws=() if chosen.planted is None else (chosen.planted,),
        fault_scale=chosen.faults,
        mode=chosen.mode,
        recovery=chosen.recovery,
        processes=1 if len(seeds) < 50 else chosen.processes,
        progress=progress,
        record=chosen.record,
        has_rows=chosen.rows,
        has_moves=chosen.moves,
        has_standbys=chosen.standbys,
    )
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    for found in summary.found:
        sys.stdout.write(f"{found.story}\n--seed {found.seed}: {found.problem}\n")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary.faults.most_common())
    modes = ", ".join(f"{count} {mode}" for mode, count in summary.modes.most_common())
    sys.stdout.write(
        f"{summary.seeds} seeds ({modes}) in {clock.now() - begun_s:.1f} s: {summary.events:,} events, "
        f"{summary.fault_count:,} faults ({kinds}), {summary.checkpoints:,} manifests, "
        f"{summary.increments:,} increments, {summary.begun_anew:,} models started over, "
        f"{summary.quarantined:,} batches quarantined, {summary.evaluations:,} results of evaluations, "
        f"{summary.moves:,} moves, {summary.takeovers:,} takeovers by standbys, "
        f"{summary.simulated_s / 3600:.1f} simulated hours, {len(summary.found)} violations\n"
    )
    if chosen.marks:
        sys.stdout.write(f"{report(summary.marks)}\n")
    return 1 if summary.found else 0


if __name__ == "__main__":
    sys.exit(main())
