"""The scenario derived from a seed: the job's shape, the behavior of its programs, and the rates of faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.consistency.modes import Bounded, Mode, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from tests.simulation.cores.job import JobShape, some_async
from tests.simulation.cores.world import NetworkFaults

_MANY_TASKS_SHARE = 0.2
_GROWING_SHARE = 0.25
_STOPPED_SHARE = 0.25
_EVALUATED_SHARE = 0.25
_NO_CHECKPOINTS_SHARE = 0.07
_FAULTY_DATA_SHARE = 0.15
#: Fraction of the jobs with faulty data in which nothing else fails. In these jobs, no other batch may be quarantined.
_FAULTY_DATA_ALONE_SHARE = 0.4
#: Fraction of faulty batches that kill the process that reads them.
_DEADLY_SHARE = 0.4
_PATCHY_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Scenario:
    """All random choices that are made once per run."""

    shape: JobShape
    #: "sync", "async" or "bounded".
    mode_name: str
    #: True if the mode changes from time to time.
    changes_modes: bool
    #: True if the job may be stopped early.
    may_be_stopped: bool
    #: True if there are many tasks, so that a trainer may hold more than two.
    has_many_tasks: bool
    pserver_count: int
    trainer_count: int
    #: Usual maximum time to compute a batch. The longer it is, the more trainers contribute to the same round.
    batch_s: float
    #: Number of standby masters and pservers, which take over immediately when a process dies.
    standby_masters: int
    spare_pservers: int
    checkpoints: CheckpointSettings
    #: False if there is no store. If a pserver dies, the model then starts over.
    keeps_checkpoints: bool
    network: NetworkFaults
    #: Rate of faults; 1 is normal, and 0 disables them.
    fault_scale: float
    #: Probabilities that a request to the store fails, and that a stream breaks.
    store_error_rate: float
    break_rate: float
    #: True if the number of pservers changes from time to time, so that blocks move.
    has_moves: bool = False
    #: True if pserver processes without an index follow pservers as their standbys.
    has_standbys: bool = False
    #: Seconds that a pserver must be busy before its blocks move; 0: never.
    rebalance_s: float = 0.0


def drawn(
    seed: int,
    fault_scale: float = 1.0,
    mode: str = "",
    recovery: str = "",
    *,
    has_rows: bool = False,
    has_moves: bool = False,
    has_standbys: bool = False,
) -> Scenario:
    """Return a seed's scenario.

    ``mode`` and ``recovery`` override drawn values. For ``has_rows`` see ``JobShape``, for the others ``Scenario``.
    """
    # Separate generators, so that a change in one group of draws does not affect the others.
    random, fates, data, moves, standbys = (
        Random(seed if kind is None else f"{kind} {seed}") for kind in (None, "fates", "data", "moves", "standbys")
    )
    has_faulty_data = data.random() < _FAULTY_DATA_SHARE
    is_alone = not fault_scale or (has_faulty_data and data.random() < _FAULTY_DATA_ALONE_SHARE)
    fault_scale = 0.0 if is_alone else fault_scale
    if has_moves:
        # Blocks move only while all pservers are present and no checkpoint is in progress.
        fault_scale *= moves.choice((0.15, 0.4, 1.0))
    if has_standbys:
        # A standby takes over only if it has received a complete copy in time.
        fault_scale *= standbys.choice((0.15, 0.4, 1.0))
    pserver_count = random.choice((1, 2, 2, 3))
    mode_name = mode or random.choice(("sync", "sync", "async", "bounded"))
    has_many_tasks = not has_faulty_data and random.random() < _MANY_TASKS_SHARE
    batch_counts = _batch_counts(random, has_many_tasks, has_faulty_data)
    faulty = _faulty(data, batch_counts) if has_faulty_data else {}
    is_evaluated = data.random() < _EVALUATED_SHARE
    shape = JobShape(
        mode=_mode(random, mode_name),
        batch_counts=batch_counts,
        epochs=random.randint(1, 2 if faulty else 3),
        seed=seed,
        shuffle=random.random() < 0.7,
        cut_for=pserver_count,
        recovery=recovery or random.choice(("replay", "replay", "replay", "rollback")),
        first_count=fates.randrange(len(batch_counts)) if fates.random() < _GROWING_SHARE else len(batch_counts),
        evaluation=tuple(data.choice((1, 1, 2, 3)) for _ in range(data.randint(2, 4) if is_evaluated else 0)),
        faulty=faulty,
        attempts_limit=data.randint(1, 3) if faulty else 100_000,
        confirmations=data.randint(1, 2),
        # If only faulty data may fail, no piece may time out, even while a round waits for a dead trainer.
        timeout_floor_s=100.0 if faulty and is_alone else 4.0,
        # A sum has one weight for all blocks of a round, even if some of its batches have no gradient for a block.
        is_patchy=mode_name != "sync" and data.random() < _PATCHY_SHARE,
    )
    if has_moves:
        shape = replace(shape, cut_for=moves.choice((2, 3, 4, 4)), epochs=3)
    if has_rows:
        # Blocks that were cut for three pservers are not adjacent on two.
        shape = replace(shape, table=_table(Random(f"rows {seed}")), is_patchy=False, cut_for=min(2, pserver_count))
    if has_rows and has_moves:
        # However these two buckets are distributed, the buckets of each pserver are neighbors.
        shape = replace(shape, cut_for=2, first_bucket=2)
    if has_standbys:
        # A job that returns all pservers to one checkpoint has no standbys.
        shape = replace(shape, recovery="replay")
    return Scenario(
        shape=shape,
        mode_name=mode_name,
        changes_modes=not mode,
        may_be_stopped=fates.random() < _STOPPED_SHARE,
        has_many_tasks=has_many_tasks,
        pserver_count=pserver_count,
        trainer_count=random.choice((1, 2, 2, 3, 3)),
        standby_masters=data.choice((0, 1, 1, 1, 2)),
        spare_pservers=max(data.choice((0, 0, 1, 2)), standbys.choice((1, 2, 2, 3)) if has_standbys else 0),
        batch_s=max(data.choice((0.02, 0.1, 0.5)), 0.3 if has_moves else 0.0),
        checkpoints=CheckpointSettings(
            interval_s=random.choice((0.7, 2.0, 5.0)),
            interval_tasks=fates.choice((None, None, 1, 3)),
            keep=random.randint(1, 3),
            keep_every=random.choice((None, None, 4)),
            increments=data.choice((0, 1, 3, 8, 8, 8)) if has_rows else 8,
            patience_s=2.0,
            give_up_s=8.0,
            retry_floor_s=0.3,
            retry_ceiling_s=2.0,
        ),
        keeps_checkpoints=data.random() >= _NO_CHECKPOINTS_SHARE and not (has_standbys and standbys.random() < 0.2),
        network=NetworkFaults(
            drop=0.10 * fault_scale * random.random(),
            duplicate=0.12 * fault_scale * random.random(),
            delay=0.25 * fault_scale * random.random(),
            longest_delay_s=random.choice((0.05, 0.5, 3.0)),
        ),
        fault_scale=fault_scale,
        store_error_rate=0.15 * fault_scale * random.random(),
        break_rate=0.08 * fault_scale * random.random(),
        has_moves=has_moves,
        has_standbys=has_standbys,
        rebalance_s=standbys.choice((0.0, 0.0, 2.0, 4.0)) if has_moves and has_standbys else 0.0,
    )


def _table(random: Random) -> TableSpec:
    """Draw a table with rules for admission and eviction. Its limits apply to all buckets of the job."""
    most, versions = BUCKETS * random.randint(1, 3), random.randint(2, 6)
    rules: tuple[Evict | None, ...] = (
        None,
        Evict(unused_versions=versions),
        Evict(unused_epochs=1),
        Evict(max_rows=most),
        Evict(max_rows=most, unused_epochs=1),
        Evict(max_rows=most, norm_below=0.5),
        Evict(norm_below=0.5),
        Evict(norm_below=0.5, unused_versions=versions + 3),
    )
    return TableSpec("t", 1, SGD(lr=1.0), admit_after=random.choice((1, 1, 2, 3)), evict=random.choice(rules))


def _mode(random: Random, name: str) -> Mode:
    if name == "sync":
        sync = random.choice((Sync(), Sync(push_every=2), Sync(backup=1), Sync(deterministic=True)))
        return replace(sync, reduce=random.choice(("mean", "mean", "sum")))
    return some_async(random) if name == "async" else Bounded(random.randrange(3))


def _batch_counts(random: Random, has_many_tasks: bool, has_faulty_data: bool) -> tuple[int, ...]:
    if has_many_tasks:
        return (1,) * random.randint(12, 24)
    if has_faulty_data:
        return tuple(random.choice((1, 2, 4, 7)) for _ in range(random.randint(2, 4)))
    return tuple(random.choice((1, 1, 2, 3, 5)) for _ in range(random.randint(2, 5)))


def _faulty(random: Random, batch_counts: tuple[int, ...]) -> dict[tuple[int, int], bool]:
    places = [(task, batch) for task, count in enumerate(batch_counts) for batch in range(count)]
    faulty = random.sample(places, random.randint(1, min(2, len(places))))
    return {place: random.random() < _DEADLY_SHARE for place in faulty}
