"""Many seeds, on several processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flightedl.marks import counting
from tests.simulation.bugs import PLANTED
from tests.simulation.bugs.moves import MOVE_BUGS
from tests.simulation.bugs.pserver import ROW_BUGS
from tests.simulation.bugs.standbys import STANDBY_BUGS
from tests.simulation.cores.cluster import Cluster, Outcome
from tests.support.planting import planted

_CHUNK = 25
_STORY_LINES = 60


@dataclass(frozen=True, slots=True)
class Found:
    """A violation that a run found."""

    seed: int
    problem: str
    #: The last events before the violation, and its traceback.
    story: str


@dataclass(slots=True)
class Summary:
    """Statistics and violations of several runs."""

    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    checkpoints: int = 0
    increments: int = 0
    begun_anew: int = 0
    quarantined: int = 0
    evaluations: int = 0
    moves: int = 0
    takeovers: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    #: Marks of the product (``flightedl.marks``).
    marks: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    def add(self, result: Outcome | Found) -> None:
        self.seeds += 1
        if isinstance(result, Found):
            self.found.append(result)
            return
        self.events += result.events
        self.simulated_s += result.simulated_s
        self.checkpoints += result.checkpoints
        self.increments += result.increments
        self.begun_anew += result.begun_anew
        self.quarantined += result.quarantined
        self.evaluations += result.evaluations
        self.moves += result.moves
        self.takeovers += result.takeovers
        self.faults.update(result.faults)
        self.modes[result.mode] += 1
        self.marks.update(result.marks)

    @property
    def fault_count(self) -> int:
        return sum(self.faults.values())


def run_seed(
    seed: int,
    flaws: Collection[str] = (),
    fault_scale: float = 1.0,
    mode: str = "",
    recovery: str = "",
    record: Path | None = None,
    *,
    has_rows: bool = False,
    has_moves: bool = False,
    has_standbys: bool = False,
) -> Outcome | Found:
    """Run one seed.

    ``record`` is the directory for recordings. For ``has_rows`` see ``JobShape``, for the others ``Scenario``.
    """
    has_standbys = has_standbys or not STANDBY_BUGS.keys().isdisjoint(flaws)
    has_rows = has_rows or not (ROW_BUGS | STANDBY_BUGS).keys().isdisjoint(flaws)
    has_moves = has_moves or not (MOVE_BUGS | STANDBY_BUGS).keys().isdisjoint(flaws)
    kinds: dict[str, Any] = {"has_rows": has_rows, "has_moves": has_moves, "has_standbys": has_standbys}
    cluster = None
    try:
        with planted([PLANTED[name] for name in flaws if name in PLANTED]), counting() as marks:
            cluster = Cluster(seed, flaws, fault_scale, mode, recovery, record, **kinds)
            return replace(cluster.run(), marks=marks)
    except Exception as error:  # noqa: BLE001 - any error of a run is a finding
        story = "" if cluster is None else "\n".join(list(cluster.world.story())[-_STORY_LINES:])
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return Found(seed, f"{type(error).__name__}: {error}", f"{story}\n{where}")
    finally:
        if cluster is not None:
            cluster.close()


def run_seeds(
    seeds: Iterable[int],
    *,
    flaws: Collection[str] = (),
    fault_scale: float = 1.0,
    mode: str = "",
    recovery: str = "",
    processes: int = 1,
    stop_at: int = 1,
    progress: Callable[[Summary], None] = lambda _: None,
    record: Path | None = None,
    has_rows: bool = False,
    has_moves: bool = False,
    has_standbys: bool = False,
) -> Summary:
    """Run seeds until all are done, or until ``stop_at`` of them have found a violation.

    Args:
        seeds: Seeds to run.
        flaws: Bugs to plant.
        fault_scale: Rate of faults: 0 disables them, 1 is normal.
        mode: "sync", "async" or "bounded"; empty to let the seed decide.
        recovery: "replay" or "rollback"; empty to let the seed decide.
        processes: Number of processes; with more than 1, they are spawned, not forked.
        stop_at: Number of violations after which the runs stop.
        progress: Called from time to time.
        record: See ``run_seed``; for a single seed.
        has_rows: See ``run_seed``.
        has_moves: See ``run_seed``.
        has_standbys: See ``run_seed``.
    """
    summary = Summary()
    numbers = list(seeds)
    kinds: dict[str, Any] = {"has_rows": has_rows, "has_moves": has_moves, "has_standbys": has_standbys}
    settings = tuple(flaws), fault_scale, mode, recovery
    chunks = [(numbers[at : at + _CHUNK], settings, kinds) for at in range(0, len(numbers), _CHUNK)]
    if processes <= 1:
        for chunk in chunks:
            with _uncollected():
                for seed in chunk[0]:
                    summary.add(run_seed(seed, *settings, record, **kinds))
                    if len(summary.found) >= stop_at:
                        return summary
            progress(summary)
        return summary
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for results in pool.imap_unordered(_run_chunk, chunks):
            for result in results:
                summary.add(result)
            progress(summary)
            if len(summary.found) >= stop_at:
                pool.terminate()
                break
        else:
            pool.close()
        pool.join()
    return summary


def _run_chunk(
    chunk: tuple[list[int], tuple[tuple[str, ...], float, str, str], dict[str, Any]],
) -> list[Outcome | Found]:
    seeds, settings, kinds = chunk
    with _uncollected():
        return [run_seed(seed, *settings, **kinds) for seed in seeds]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage only after the runs, because it would take a sixth of the time during the runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
