"""Simulate jobs: ``python -m tests.simulation --seeds 100``. See ``--help``."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.simulation import runs
from tests.simulation.scenario import MODES, OPTIMIZERS, SHARES, Wanted, drawn
from tests.simulation.timelines import TIMELINES, timeline

_ALL = ", ".join(SHARES)


def _features(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SHARES:
            raise argparse.ArgumentTypeError(f"no feature {name!r}: choose among {_ALL}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed, and print what happens")
    parser.add_argument("--seeds", type=int, default=20, help="run so many seeds")
    parser.add_argument("--from", type=int, default=1, dest="first", help="first seed")
    parser.add_argument("--faults", choices=("on", "off"), default="on", help="whether faults happen")
    parser.add_argument("--mode", choices=MODES, default="", help="only this mode")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="", help="only this optimizer")
    parser.add_argument("--with", type=_features, default=[], dest="on", help=f"features, with commas: {_ALL}")
    parser.add_argument("--without", type=_features, default=[], dest="off", help="features, with commas")
    parser.add_argument("--only", default=None, help="numbers of the strikes to carry out, with commas")
    parser.add_argument("--planted", default="", help="bugs to plant, with commas")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and compare the traces")
    parser.add_argument("--shrink", action="store_true", help="find few strikes with which --seed still fails")
    parser.add_argument("--diff", action="store_true", help="run --seed twice, and print where the traces differ")
    parser.add_argument("--marks", action="store_true", help="print how often each mark of the product was reached")
    parser.add_argument("--timelines", action="store_true", help="print the timelines of docs/recovery.md")
    parser.add_argument("--quiet", action="store_true", help="print only what fails")
    parser.add_argument("--processes", type=int, default=1, help="seeds that run at once")
    return parser


def main() -> int:
    """Run what the command line asks for. Return 1 if a seed fails."""
    runs.fix_hashes("tests.simulation")
    chosen = _parser().parse_args()
    wanted = Wanted(
        faults=chosen.faults == "on",
        mode=chosen.mode,
        optimizer=chosen.optimizer,
        features=dict.fromkeys(chosen.off, False) | dict.fromkeys(chosen.on, True),
        only=None if chosen.only is None else tuple(int(each) for each in chosen.only.split(",") if each),
        planted=tuple(each for each in chosen.planted.split(",") if each),
    )
    runs.warm_up()
    if chosen.timelines:
        print("\n\n".join(f"{each}\n\n{timeline(each)}" for each in TIMELINES))
        return 0
    if chosen.seed is None:
        return _many(chosen, wanted)
    if chosen.shrink:
        return _shrink(chosen.seed, wanted)
    if chosen.diff:
        return _diff(chosen.seed, wanted)
    for strike in drawn(chosen.seed, wanted).strikes:
        print(strike)
    outcome = runs.run_forked(chosen.seed, wanted, is_verbose=not chosen.quiet)
    print(outcome)
    return 0 if outcome.is_good else 1


def _many(chosen: argparse.Namespace, wanted: Wanted) -> int:
    began_s = time.monotonic()
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    outcomes = []
    again = runs.run_many(seeds, wanted, chosen.processes) if chosen.twice else itertools.repeat(None)
    for outcome, other in zip(runs.run_many(seeds, wanted, chosen.processes), again, strict=False):
        if other is not None and other.trace != outcome.trace:
            outcome.problems.append(f"another run had trace {other.trace}")
        outcomes.append(outcome)
        if not (chosen.quiet and outcome.is_good):
            print(outcome, flush=True)
    bad = [each.seed for each in outcomes if not each.is_good]
    print(
        f"{len(outcomes)} seeds, {sum(each.strikes for each in outcomes)} strikes, "
        f"{sum(each.virtual_s for each in outcomes):.0f} virtual s, "
        f"{sum(each.processor_s for each in outcomes):.1f} s of processor, {time.monotonic() - began_s:.0f} s; "
        f"failed: {bad or 'none'} (Python {sys.version.split()[0]})"
    )
    if chosen.marks:
        from tests.support.marks import report

        print(report(sum((Counter(each.marks) for each in outcomes), Counter())))
    return 1 if bad else 0


def _shrink(seed: int, wanted: Wanted) -> int:
    def fails(numbers: object) -> bool:
        outcome = runs.run_forked(seed, _with_only(wanted, numbers))
        print(f"{numbers}: {'ok' if outcome.is_good else outcome.problems}", flush=True)
        return not outcome.is_good

    left = runs.shrunk(drawn(seed, wanted).strikes, fails)
    print(f"--seed {seed} --only {','.join(map(str, left))}")
    return 1


def _with_only(wanted: Wanted, numbers: object) -> Wanted:
    assert isinstance(numbers, list), "a list of numbers"
    return replace(wanted, only=tuple(numbers))


def _diff(seed: int, wanted: Wanted) -> int:
    one, other = (runs.run_forked(seed, wanted, keeps_history=True).history for _ in range(2))
    for number, (left, right) in enumerate(itertools.zip_longest(one, other)):
        if left != right:
            print(*one[max(number - 5, 0) : number], f"first:  {left}", f"second: {right}", sep="\n")
            return 1
    print(f"{len(one)} lines are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
