"""Freshness of a follower, and its cost to training: ``python -m benchmarks.following``.

A trainer steps as fast as it can on two pservers: a parameter of 4 MB, and 1,000 of 200,000 rows per step. In another
process, a follower's copy is read every 5 ms. The first element counts the steps, so each value that is read
names the step that made it. Freshness is the time from the end of a step to the first read that sees it. The cost
compares the rate of steps in alternating periods with and without the follower.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe

_PERIOD_S = 4.0
_PERIODS = 25
_ELEMENTS = 1_000_000
_ROWS, _PUSHED = 200_000, 1_000


def _look(etcd: str, job: str, orders: Any, answers: Any) -> None:
    """Follow for a period whenever asked, and answer with (time, step) of each new value."""
    while (seconds := orders.get()) is not None:
        seen: list[tuple[float, float]] = []
        with fe.Follower(etcd=etcd, job=job).wait() as follower:
            answers.put("ready")
            before = time.process_time()
            end = time.monotonic() + seconds
            last = -1.0
            while (now := time.monotonic()) < end:
                value = float(follower["w"][0])
                if value != last:
                    seen.append((now, value))
                    last = value
                time.sleep(0.005)
        answers.put((seen, (time.process_time() - before) / seconds))


def main() -> None:
    """Measure, and print the figures."""
    context = multiprocessing.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    folder = Path(tempfile.mkdtemp())
    pq.write_table(pa.table({"k": np.arange(10**6)}), folder / "data.parquet", row_group_size=10**5)
    with fe.local(pservers=2) as cluster, cluster.connect() as job:
        arguments = (cluster.etcd_address, cluster.job, orders, answers)
        process = context.Process(target=_look, args=arguments, daemon=True)
        process.start()
        data = iter(job.dataset(str(folder / "data.parquet"), batch_size=1))
        users = job.table("users", 16, optimizer=fe.SGD(lr=0.01))
        model = job.parameters({"w": np.zeros(_ELEMENTS, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        gradient, ends = -np.ones(_ELEMENTS, np.float32), [0.0]
        chance = np.random.default_rng(1)

        with cluster.status() as status:
            pservers = [psutil.Process(each.pid) for each in status.read(10.0).pservers]

        def steps(end: float) -> tuple[float, float]:
            """Step until the end; return the steps per second, and the pservers' CPU milliseconds per step."""
            began, count, before = time.monotonic(), 0, sum(sum(each.cpu_times()[:2]) for each in pservers)
            while time.monotonic() < end:
                next(data)
                users.push(chance.choice(_ROWS, _PUSHED, replace=False), np.ones((_PUSHED, 16), np.float32))
                model.step({"w": gradient})
                ends.append(time.monotonic())
                count += 1
            used = sum(sum(each.cpu_times()[:2]) for each in pservers) - before
            return count / (time.monotonic() - began), 1000 * used / max(count, 1)

        steps(time.monotonic() + _PERIOD_S)
        rates: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        delays: list[float] = []
        shares: list[float] = []
        for _ in range(_PERIODS):
            rates[False].append(steps(time.monotonic() + _PERIOD_S))
            orders.put(_PERIOD_S)
            while answers.empty():
                steps(time.monotonic() + 0.1)
            answers.get()
            rates[True].append(steps(time.monotonic() + _PERIOD_S - 0.5))
            while answers.empty():
                steps(time.monotonic() + 0.1)
            seen, share = answers.get()
            shares.append(share)
            # The first value is the base; each step counts from its end to the first look that sees it or a later one.
            for (_, before), (at, value) in pairwise(seen):
                delays += [at - ends[step] for step in range(int(before) + 1, int(value) + 1)]
        orders.put(None)
        process.join(10)
    delays.sort()
    p50, p99 = (1000 * delays[int(len(delays) * share)] for share in (0.5, 0.99))
    (without, used), (with_one, more) = (
        [statistics.median(each[place] for each in rates[key]) for place in (0, 1)] for key in (False, True)
    )
    print(f"freshness of {len(delays)} steps: p50 {p50:.0f} ms, p99 {p99:.0f} ms, most {1000 * delays[-1]:.0f} ms")
    print(f"steps per second: {without:.1f} without a follower, {with_one:.1f} with one: {with_one / without:.3f}")
    print(f"CPU of {len(pservers)} pservers per step: {used:.3f} ms without, {more:.3f} ms with one: {more / used:.3f}")
    print(f"CPU of the follower's process: {statistics.median(shares):.1%} of a core")


if __name__ == "__main__":
    main()
