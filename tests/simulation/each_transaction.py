"""Strikes calm jobs at each of their transactions of etcd: ``python -m tests.simulation.each_transaction``.

A calm seed of each kind of job runs once. It is then repeated for each transaction of each of its processes: with a
kill after the transaction, and with a freeze before it that is longer than a lease.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping

from tests.simulation import runs
from tests.simulation.scenario import MODES, SHARES, Aim, Strike, Wanted

#: Features that are a kind of job by themselves. The others change only what strikes it, or who watches it.
KINDS = (*MODES, *(feature for feature in SHARES if feature not in {"aims", "watchers"}))
_FREEZE_S = 3.0
#: A job that is struck once and has not ended by then hangs.
_LIMIT_S = 120.0


def wanted_for(kind: str, strikes: tuple[Strike, ...] = ()) -> Wanted:
    """Return what distinguishes a kind of job, without faults."""
    return Wanted(
        faults=False,
        mode=kind if kind in MODES else "async" if kind == "sums" else "",
        features={} if kind in MODES else {kind: True},
        is_exact=True,
        strikes=strikes,
        changes={"trainers": 2, "pservers": 2, "limit_s": _LIMIT_S},
    )


def aimed(transactions: Mapping[str, int]) -> Iterator[Strike]:
    """Yield a kill and a freeze at each transaction, given the number of transactions of each process."""
    for name, count in transactions.items():
        role, _, index = name.partition(".")[0].rpartition("-")
        for number in range(1, count + 1):
            for kind, when, extent in (("kill", "after", 0.3), ("freeze", "before", _FREEZE_S)):
                aim = Aim(role, int(index), "transaction", number, when)
                yield Strike(1000, 0.0, kind, role, int(index), extent, aim=aim)


def main(kinds: list[str], seed: int) -> int:
    """Run what the command line asks for. Return 1 if a job fails."""
    failed = 0
    runs.warm_up()
    for kind in kinds:
        calm = runs.run_forked(seed, wanted_for(kind))
        print(calm, flush=True)
        strikes = [] if not calm.is_good else list(aimed(calm.transactions))
        struck, processor_s, longest_s = 0, 0.0, calm.virtual_s
        for strike in strikes:
            outcome = runs.run_forked(seed, wanted_for(kind, (strike,)))
            struck += outcome.strikes > calm.strikes
            processor_s, longest_s = processor_s + outcome.processor_s, max(longest_s, outcome.virtual_s)
            if not outcome.is_good:
                failed += 1
                print(f"{strike}: {outcome}", flush=True)
        print(
            f"{kind}: {len(strikes)} runs, {struck} struck, {processor_s:.0f} s of processor, "
            f"at most {longest_s - calm.virtual_s:.1f} virtual s longer than the calm run",
            flush=True,
        )
        failed += not calm.is_good
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    runs.fix_hashes("tests.simulation.each_transaction")
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.each_transaction", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"kinds of jobs; all by default: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1, help="the calm seed")
    chosen = parser.parse_args()
    if unknown := set(chosen.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    sys.exit(main(chosen.kinds or list(KINDS), chosen.seed))
