"""Runs seeds: each in a child that is forked from one warm process, so that no seed leaves anything to the next.

The warm process imports the product on the fakes, compiles its kernels and fills its caches with a first run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.scenario import Strike, Wanted, drawn

#: A seed whose processor time exceeds this many medians loops.
_LOOPS_FACTOR = 20
#: Processor seconds of a typical seed, until enough have run.
_TYPICAL_S = 2.0
_FAILED = "the simulation failed"


@dataclass(slots=True)
class Outcome:
    """What one seed did."""

    seed: int
    trace: str = ""
    problems: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    processor_s: float = 0.0
    switches: int = 0
    messages: int = 0
    threads: int = 0
    strikes: int = 0
    #: Process -> number of its transactions of etcd.
    transactions: dict[str, int] = field(default_factory=dict)
    #: (role, index, function) -> number of its calls, if they were counted.
    calls: list[tuple[str, int, str, int]] = field(default_factory=list)
    #: Mark of the product -> how often it was reached.
    marks: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    log: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    @property
    def has_failed_itself(self) -> bool:
        """True if the simulation has failed, and not what it simulates."""
        return any(each.startswith(_FAILED) for each in self.problems)

    def __str__(self) -> str:
        verdict = "ok" if self.is_good else "; ".join(self.problems)
        return (
            f"seed {self.seed} {self.mode}: {self.virtual_s:.1f} virtual s, {self.processor_s:.2f} s of processor, "
            f"{self.switches} switches, {self.messages} messages, {self.strikes} strikes, trace {self.trace}: {verdict}"
        )


def fix_hashes(module: str) -> None:
    """Start this program again unless hashes of strings are the same in all its runs. Seeds depend on them."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def warm_up() -> None:
    """Import the product, compile kernels and fill caches. Must be called once, before seeds are run."""
    os.environ.pop("FLIGHTEDL_JOB", None)
    from tests.simulation import product

    product.install()
    from flightedl.domain.model.optimizers import SGD, Adagrad
    from flightedl.domain.model.parameters import ParameterSpec
    from flightedl.domain.tables.spec import TableSpec
    from flightedl.kernels.compiled_rows import distinct_kernels
    from flightedl.pserver.stores.building import kernels_of

    # A seed would depend on whether its kernels are compiled.
    for rule in (SGD(lr=1.0), Adagrad(lr=1.0)):
        first, others = kernels_of([ParameterSpec("w", (1,), "float32")], [TableSpec("rows", 1, rule)], rule, "")
        for load in (*first, *others):
            load()
    distinct_kernels()
    with contextlib.redirect_stdout(io.StringIO()):
        for mode, optimizer in (("sync", "sgd"), ("async", "adagrad")):
            run_here(0, Wanted(faults=False, mode=mode, optimizer=optimizer, features={"tables": True}))
    gc.collect()
    gc.freeze()


def run_here(
    seed: int,
    wanted: Wanted,
    *,
    record: str = "",
    is_verbose: bool = False,
    keeps_history: bool = False,
    is_last: bool = False,
) -> Outcome:
    """Run a seed in this process. After the last one, its threads are left as they are.

    Its recordings are kept if ``record`` names a directory for them.
    """
    from flightedl.marks import counting
    from tests.simulation import account
    from tests.simulation.calls import calls, prepare
    from tests.simulation.cluster import Cluster
    from tests.simulation.programs import Programs
    from tests.simulation.scheduler import HangsError
    from tests.simulation.strikes import Striker

    scenario = drawn(seed, wanted)
    prepare(wanted.planted, {*wanted.counted, *(each.aim.called for each in scenario.strikes if each.aim)} - {""})
    outcome = Outcome(seed, mode=scenario.summary)
    began_s = time.process_time()
    gc.disable()
    recorded = record or tempfile.mkdtemp(prefix="simulated-")
    try:
        programs = Programs(scenario, recorded)
        cluster = Cluster(scenario, programs.by_role(), is_verbose=is_verbose, keeps_history=keeps_history)
        programs.cluster = cluster
        programs.write_files()
        cluster.pserver_count_key = programs.pserver_count_key()
        striker = Striker(cluster)
        striker.begin()
        try:
            with counting() as marks:
                cluster.run()
        except HangsError as error:
            outcome.problems.append(f"hangs: {error}")
            outcome.log += ["waiting:", *cluster.scheduler.waiting()]
        outcome.problems += account.crashes(cluster)
        if not outcome.problems:
            outcome.problems += account.problems(cluster, programs, Path(recorded))
        scheduler = cluster.scheduler
        outcome.trace, outcome.virtual_s, outcome.switches = scheduler.trace, scheduler.now, scheduler.switches
        outcome.messages, outcome.threads = cluster.network.message_count, len(scheduler.threads)
        outcome.strikes = striker.count
        outcome.transactions = {each.name: count for each, count in cluster.etcd.transaction_counts.items()}
        outcome.marks = dict(marks)
        outcome.calls = [(*place, count) for place, count in calls.items()]
        outcome.log = cluster.told.lines + outcome.log
        outcome.history = scheduler.history or []
        if not is_last:
            cluster.close()
    finally:
        if not record:
            shutil.rmtree(recorded, ignore_errors=True)
        gc.enable()
    outcome.processor_s = time.process_time() - began_s
    return outcome


def forked(work: Callable[[], Any], limit_s: float = _LOOPS_FACTOR * _TYPICAL_S) -> Any:
    """Call a function in a child of this process, and return its result, which has to be JSON.

    The system ends the child if it uses too much processor time. The result is then None.
    """
    source, sink = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(source)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
        faulthandler.register(signal.SIGXCPU, all_threads=True, chain=True)
        result = work()
        with os.fdopen(sink, "wb") as file:
            file.write(json.dumps(result).encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def run_forked(
    seed: int, wanted: Wanted, limit_s: float = _LOOPS_FACTOR * _TYPICAL_S, *, keeps_log: bool = False, **more: Any
) -> Outcome:
    """Run a seed in a child of this process, which must be warm. The log of a good seed is kept only on request."""

    def run() -> dict[str, Any]:
        try:
            outcome = run_here(seed, wanted, is_last=True, **more)
        except BaseException:  # noqa: BLE001 - an error of the simulation itself
            outcome = Outcome(seed, problems=[f"{_FAILED}: {traceback.format_exc()}"])
        if outcome.is_good and not keeps_log:
            outcome.log = []
        return asdict(outcome)

    found = forked(run, limit_s)
    if found is None:
        return Outcome(seed, problems=["loops: see the stacks above"], processor_s=limit_s)
    return Outcome(**found)


def run_many(seeds: Iterable[int], wanted: Wanted, processes: int = 1) -> Iterator[Outcome]:
    """Run seeds, several at once, and yield their outcomes in order."""
    took: list[float] = []

    def run(seed: int) -> Outcome:
        median_s = sorted(took)[len(took) // 2] if len(took) >= 5 else _TYPICAL_S
        outcome = run_forked(seed, wanted, _LOOPS_FACTOR * max(median_s, 0.5))
        took.append(outcome.processor_s)
        return outcome

    if processes == 1:
        yield from map(run, seeds)
        return
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(run, seeds)


def shrunk(strikes: Sequence[Strike], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the numbers of few strikes that still fail: leave out halves, then quarters, and so on."""
    left = [each.number for each in strikes]
    size = max(len(left) // 2, 1)
    while left:
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left = fewer
                break
        else:
            if size == 1:
                break
            size = max(size // 2, 1)
    return left
