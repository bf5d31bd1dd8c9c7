"""Blocks and the shard plan: which pserver owns which slice of which parameter.

A *block* is a contiguous slice of one parameter, flattened in C order. The *cut* into blocks is a pure function of the
declared parameters and a number of pservers, so everybody computes it, and it never changes. The owners of the blocks
are computed once, by the master, which stores them as a ``Placement`` with a version. The hash of the *plan*, cut and
placement together, is carried in every message: it names the cut, and behind a dot the version of the placement. The
cut of both sides has to be the same. A trainer's placement may be another one than the pserver's as long as the
message is about blocks that are there; what the master asks has to be about the same placement. Block numbers count
through the parameters in order.

A job that was declared by a version without placements has the computed one, which is part of its plan's hash.

Derivation. Lay all T bytes of the model in one line, in declared order. With P pservers and R rounds the line is cut at
``j * T / (P * R)``; stretch j belongs to pserver ``j % P``. Each pserver so gets R stretches of equal length, whatever
the parameters look like: one giant, thousands of tiny ones, or both. R is the least that makes a stretch at most
``STRETCH_BYTES``: short enough that any few layers lie on all pservers, long enough that neighbours (a small weight and
its bias) mostly stay together, and are sent in one message.

A cut moves to the nearest end of the parameter it falls into when one side would be a piece shorter than a 64th of a
stretch or ``MINIMUM_ELEMENTS``; inside a parameter it lies on a multiple of ``CUT_ELEMENTS``. Cuts are computed from
the line's start, so their moves do not add up along it: a stretch is at most two moves longer or shorter than it should
be. Pieces between cuts are then divided into the fewest equal blocks of at most ``block_limit`` bytes: a parameter
never ends in a small rest.

Embedding tables have their rows in ``BUCKETS`` *buckets*, all tables together (``tables.placement``). A bucket is a
position of the plan like a block, so that pushes, rounds, checkpoints and recovery are those of blocks: the numbers of
buckets go on behind those of all blocks, and each pserver has a range of them, which depends on nothing but P.

Not guaranteed: balance of models so small that a share is a few minimal blocks, and balance of work where optimizers
differ by parameter.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.tables.placement import BUCKETS, buckets_of_pserver
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import NotFoundError, UsageError
from flightedl.messages.declarations import Placement

#: The rules of this module; part of every plan's hash. A plan of another version is another plan.
PLAN_VERSION = 3
#: The measured best size of a message where several trainers push: a smaller one costs more of the processor's time a
#: byte, because it finds nothing of the program in the cache any more.
BLOCK_BYTES = 1 << 21
#: Where a pserver would get fewer than ``_MESSAGES`` of them: both sides are to be at work on different ones.
SMALL_BLOCK_BYTES = 1 << 20
_MESSAGES = 4
ELEMENTS_LIMIT = 1 << 20
#: Splitting never makes a piece smaller than this.
MINIMUM_ELEMENTS = 8192
#: Pieces start at multiples of this: whole cache lines, in the parameter and in the pserver's arena.
CUT_ELEMENTS = 16
STRETCH_BYTES = 4 << 20
ALIGNMENT_BYTES = 64

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``start`` to ``stop`` (exclusive) of the flattened parameter number ``parameter``."""

    number: int
    parameter: int
    start: int
    stop: int
    pserver: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """All blocks of a model. The four arrays have one entry per block, (n,) int64; ``hash``: see the module."""

    parameters: tuple[ParameterSpec, ...]
    pserver_count: int
    block_parameters: Integers
    block_starts: Integers
    block_stops: Integers
    block_pservers: Integers
    version: int = PLAN_VERSION
    tables: tuple[TableSpec, ...] = ()
    #: Version of the stored placement; 0 if the owners are computed.
    placement: int = 0
    #: Owner of each bucket, (BUCKETS,) int64, if a placement is stored.
    bucket_pservers: Integers | None = None
    hash: str = field(init=False)
    #: Parameter name -> its number.
    numbers_by_name: dict[str, int] = field(init=False, repr=False)
    #: Pserver -> the position numbers of its buckets.
    bucket_ranges: tuple[range, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", _hash(self))
        object.__setattr__(self, "numbers_by_name", {p.name: number for number, p in enumerate(self.parameters)})
        object.__setattr__(self, "bucket_ranges", tuple(map(self._buckets_of, range(self.pserver_count))))
        for array in (self.block_parameters, self.block_starts, self.block_stops, self.block_pservers):
            array.flags.writeable = False

    @property
    def block_count(self) -> int:
        """Number of blocks on all pservers."""
        return len(self.block_starts)

    @property
    def block_bytes(self) -> Integers:
        """Bytes of the values of each block, (n,) int64."""
        items = np.array([parameter.item_size_bytes for parameter in self.parameters], np.int64)
        return (self.block_stops - self.block_starts) * items[self.block_parameters]

    def has_same_cut(self, other: ShardPlan) -> bool:
        """True if both have the same blocks and tables, whoever owns them."""
        return (
            self.parameters == other.parameters
            and self.block_count == other.block_count
            and bool((self.block_starts == other.block_starts).all())
            and bool((self.block_parameters == other.block_parameters).all())
            and _shapes(self) == _shapes(other)
        )

    def block(self, number: int) -> Block:
        """One block. NotFoundError: there is none of that number."""
        if not 0 <= number < self.block_count:
            raise NotFoundError(f"there is no block {number}; the plan has {self.block_count}")
        return Block(
            number,
            int(self.block_parameters[number]),
            int(self.block_starts[number]),
            int(self.block_stops[number]),
            int(self.block_pservers[number]),
        )

    @property
    def bucket_count(self) -> int:
        """Number of buckets on all pservers; 0 without tables."""
        return BUCKETS if self.tables else 0

    def buckets_of(self, pserver: int) -> range:
        """Position numbers of a pserver's buckets. NotFoundError: there is no pserver of that index."""
        if not 0 <= pserver < self.pserver_count:
            raise NotFoundError(f"there is no pserver {pserver}; the plan has {self.pserver_count}")
        return self.bucket_ranges[pserver]

    def _buckets_of(self, pserver: int) -> range:
        first = self.block_count
        found = buckets_of_pserver(pserver, self.pserver_count) if self.tables else range(0)
        if self.bucket_pservers is not None:
            own = np.flatnonzero(self.bucket_pservers == pserver)
            found = range(int(own[0]), int(own[-1]) + 1) if own.size else range(0)
            assert own.size == len(found), "the buckets of a pserver are neighbours"
        return range(first + found.start, first + found.stop)

    def positions_of(self, pserver: int) -> list[int]:
        """Numbers of a pserver's blocks and buckets, rising."""
        return [*self.blocks_of(pserver).tolist(), *self.buckets_of(pserver)]

    def blocks_of(self, pserver: int) -> Integers:
        """Return the numbers of a pserver's blocks, (n,) int64, rising. NotFoundError: there is no such pserver."""
        if not 0 <= pserver < self.pserver_count:
            raise NotFoundError(f"there is no pserver {pserver}; the plan has {self.pserver_count}")
        return np.flatnonzero(self.block_pservers == pserver).astype(np.int64)

    def block_range(self, name: str) -> range:
        """Numbers of a parameter's blocks, which are consecutive. NotFoundError: no such parameter."""
        number = self.numbers_by_name.get(name)
        if number is None:
            raise NotFoundError(f"there is no parameter {name!r:.80}")
        first, last = np.searchsorted(self.block_parameters, (number, number + 1))
        return range(int(first), int(last))


def _shapes(plan: ShardPlan) -> list[tuple[str, int, str]]:
    return [(table.name, table.dim, table.dtype) for table in plan.tables]


def name_same_cut(plan_hash: str, other: str) -> bool:
    """True if the hashes of two plans name the same cut; the versions of their placements may differ."""
    return plan_hash.partition(".")[0] == other.partition(".")[0]


def placement_of_hash(plan_hash: str) -> int:
    """Return the version of the placement that a plan's hash names; 0 if it names none."""
    version = plan_hash.partition(".")[2]
    return int(version) if version.isdecimal() else 0


def block_limit(parameters: Sequence[ParameterSpec], pserver_count: int) -> int:
    """The most bytes of a block, and of a run, of a model on so many pservers."""
    share = sum(parameter.size_bytes for parameter in parameters) // pserver_count
    return min(BLOCK_BYTES, max(SMALL_BLOCK_BYTES, share // _MESSAGES))


def runs_of(plan: ShardPlan, pserver: int) -> list[range]:
    """A pserver's blocks in runs that travel in one message: neighbours of one dtype, at most ``block_limit`` bytes.

    A run's blocks lie next to each other in the line of the model, so both sides can keep them in one array. Everybody
    cuts runs alike, and however elements travel: it is the values at both ends that are to stay in the cache.

    Returns:
        Ranges of block numbers, rising; every block of the pserver is in one.
    """
    numbers = plan.blocks_of(pserver)
    dtypes = [parameter.dtype for parameter in plan.parameters]
    parameters = plan.block_parameters[numbers].tolist()
    sizes = plan.block_bytes[numbers].tolist()
    limit = block_limit(plan.parameters, plan.pserver_count)
    runs: list[range] = []
    start = stop = -1
    total, dtype = 0, ""
    for number, parameter, size in zip(numbers.tolist(), parameters, sizes, strict=True):
        if number == stop and dtypes[parameter] == dtype and total + size <= limit:
            stop, total = number + 1, total + size
            continue
        if stop > start:
            runs.append(range(start, stop))
        start, stop, total, dtype = number, number + 1, size, dtypes[parameter]
    if stop > start:
        runs.append(range(start, stop))
    return runs


def plan_shards(
    parameters: Sequence[ParameterSpec],
    pserver_count: int,
    *,
    tables: Sequence[TableSpec] = (),
    block_bytes: int | None = None,
) -> ShardPlan:
    """Cut parameters into blocks and give each to a pserver; see the module for the rules.

    Args:
        parameters: In declared order, which the plan depends on.
        pserver_count: P >= 1.
        tables: In declared order, likewise.
        block_bytes: No block is bigger, unless a smaller one would have less than ``MINIMUM_ELEMENTS``; None:
            ``block_limit``.

    Raises:
        UsageError: no pserver, neither parameters nor tables, or two of one name.
    """
    _require_pserver(pserver_count)
    if not parameters and not tables:
        raise UsageError("a model needs at least 1 parameter, or a table")
    _require_distinct("parameters", [parameter.name for parameter in parameters])
    _require_distinct("tables", [table.name for table in tables])
    if not parameters:
        nothing = np.empty(0, np.int64)
        return ShardPlan((), pserver_count, nothing, nothing, nothing, nothing.copy(), tables=tuple(tables))
    limit = block_limit(parameters, pserver_count) if block_bytes is None else block_bytes
    return replace(_divide(tuple(parameters), pserver_count, limit), tables=tuple(tables))


def _require_pserver(count: int) -> None:
    if count < 1:
        raise UsageError(f"this job has {count} pservers, and a model needs one: start it with --pservers 1 or more")


def _require_distinct(kind: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"there are two {kind} named {name!r}; give each its own name")
        seen.add(name)


def reassigned(plan: ShardPlan, pserver_count: int) -> ShardPlan:
    """The same blocks on another number of pservers: what a job gets that was saved on fewer or more of them.

    A block stays what it is, with its version and its applied set, so nothing has to be cut or merged. Depends on the
    blocks only, not on who owned them: however often a job is moved, the plan is that of its first cut and its present
    number of pservers. Each block goes to the pserver that has the fewest bytes so far, the biggest blocks first
    (Graham 1969), ties by lower number: no pserver has more than an equal share and one block.

    Raises:
        UsageError: no pserver.
    """
    _require_pserver(pserver_count)
    sizes = plan.block_bytes
    loads = [(0, index) for index in range(pserver_count)]
    owners = np.empty(plan.block_count, np.int64)
    for number in np.argsort(-sizes, kind="stable").tolist():
        load, index = loads[0]
        owners[number] = index
        heapq.heapreplace(loads, (load + int(sizes[number]), index))
    return ShardPlan(
        plan.parameters,
        pserver_count,
        plan.block_parameters.copy(),
        plan.block_starts.copy(),
        plan.block_stops.copy(),
        owners,
        plan.version,
        plan.tables,
    )


def plan_for(
    parameters: Sequence[ParameterSpec],
    pserver_count: int,
    cut_for: int = 0,
    tables: Sequence[TableSpec] = (),
    placement: Placement | None = None,
) -> ShardPlan:
    """Return the plan of a job whose parameters were cut for ``cut_for`` pservers (0: for as many as it has now).

    Args:
        parameters: In declared order.
        pserver_count: Of the job.
        cut_for: Likewise.
        tables: In declared order.
        placement: As stored; None if the owners are to be computed.

    Raises:
        UsageError: as ``plan_shards``; or the placement is of other blocks.
    """
    plan = plan_shards(parameters, cut_for or pserver_count, tables=tables)
    if placement is not None:
        return placed(plan, placement)
    return plan if plan.pserver_count == pserver_count else reassigned(plan, pserver_count)


def placement_of(plan: ShardPlan, version: int = 1) -> Placement:
    """Return the owners of a plan as they are stored."""
    buckets = [pserver for pserver in range(plan.pserver_count) for _ in plan.buckets_of(pserver)]
    owners = (plan.block_pservers.tolist(), buckets)
    blocks, buckets_ = ([(owner, len(list(run))) for owner, run in groupby(each)] for each in owners)
    return Placement(version=version, pservers=plan.pserver_count, blocks=blocks, buckets=buckets_)


def placed(plan: ShardPlan, placement: Placement) -> ShardPlan:
    """Return the blocks of a plan with the owners of a stored placement. UsageError: it is of other blocks."""
    owners, buckets = (
        np.array([owner for owner, count in runs for _ in range(count)], np.int64)
        for runs in (placement.blocks, placement.buckets)
    )
    known = set(owners.tolist()) | set(buckets.tolist())
    if (owners.size, buckets.size) != (plan.block_count, plan.bucket_count) or known - {*range(placement.pservers)}:
        raise UsageError(f"placement {placement.version} is of other blocks than the job's: run one version everywhere")
    return replace(
        plan,
        pserver_count=placement.pservers,
        block_pservers=owners,
        placement=placement.version,
        bucket_pservers=buckets if plan.tables else None,
    )


def _cuts(parameters: Sequence[ParameterSpec], ends: Integers, stretch_count: int) -> list[int]:
    """Where each stretch but the last one ends, in elements of the line; an empty stretch repeats a cut.

    Args:
        parameters: In line order.
        ends: Elements of the line up to and with each parameter, (parameters,).
        stretch_count: Number of stretches.
    """
    end_bytes = np.cumsum([parameter.size_bytes for parameter in parameters], dtype=np.int64)
    total = int(end_bytes[-1])
    targets = [number * total // stretch_count for number in range(1, stretch_count)]
    cuts: list[int] = []
    previous = 0
    for target, index in zip(targets, np.searchsorted(end_bytes, targets, side="right").tolist(), strict=True):
        parameter = parameters[index]
        size, item = parameter.size, parameter.item_size_bytes
        first = int(ends[index]) - size
        inside = (target - (int(end_bytes[index]) - parameter.size_bytes)) // item
        margin = max(MINIMUM_ELEMENTS, total // (64 * stretch_count * item))
        aligned = inside // CUT_ELEMENTS * CUT_ELEMENTS
        if aligned >= margin and size - aligned >= margin:
            cut = first + aligned
            if 0 < cut - max(previous, first) < MINIMUM_ELEMENTS:
                cut = previous
        else:
            cut = first if inside < size - inside else first + size
        previous = cut
        cuts.append(cut)
    return cuts


def _divide(parameters: tuple[ParameterSpec, ...], pserver_count: int, block_bytes: int) -> ShardPlan:
    total = sum(parameter.size_bytes for parameter in parameters)
    rounds = -(-total // (pserver_count * STRETCH_BYTES))
    ends = np.cumsum([parameter.size for parameter in parameters], dtype=np.int64)
    cuts = np.array(_cuts(parameters, ends, 1 if pserver_count == 1 else pserver_count * rounds), np.int64)

    # Pieces: what lies between neighbouring cuts and parameter ends, in elements of the line. (pieces,)
    borders = np.union1d(np.union1d(0, ends), cuts)
    starts, sizes = borders[:-1], np.diff(borders)
    owners = np.searchsorted(cuts, starts, side="right") % pserver_count
    numbers = np.searchsorted(ends, starts, side="right")
    items = np.array([parameter.item_size_bytes for parameter in parameters], np.int64)[numbers]

    # Each piece into equal blocks, whose bounds are multiples of CUT_ELEMENTS from the piece's start.
    limits = np.minimum(block_bytes // items, ELEMENTS_LIMIT) // CUT_ELEMENTS * CUT_ELEMENTS
    counts = np.minimum(-(-sizes // np.maximum(limits, 1)), np.maximum(sizes // MINIMUM_ELEMENTS, 1))
    piece = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    units = -(-sizes // CUT_ELEMENTS)
    low = nth * units[piece] // counts[piece] * CUT_ELEMENTS
    high = np.minimum((nth + 1) * units[piece] // counts[piece] * CUT_ELEMENTS, sizes[piece])
    in_parameter = (starts - (ends - np.diff(ends, prepend=0))[numbers])[piece]
    return ShardPlan(parameters, pserver_count, numbers[piece], in_parameter + low, in_parameter + high, owners[piece])


def _hash(plan: ShardPlan) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for parameter in plan.parameters:
        text = f"{parameter.name!r} {parameter.shape} {parameter.dtype}"
        digest.update(f"{len(text)} {text}\n".encode())
    count, owners = (0, ()) if plan.placement else (plan.pserver_count, (plan.block_pservers,))
    digest.update(f"{plan.version} {count} {plan.block_count}\n".encode())
    for array in (plan.block_parameters, plan.block_starts, plan.block_stops, *owners):
        digest.update(array.astype("<i8").tobytes())
    for table in plan.tables:
        text = f"table {table.name!r} {table.dim} {table.dtype}"
        digest.update(f"{len(text)} {text}\n".encode())
    return f"{digest.hexdigest()}.{plan.placement}" if plan.placement else digest.hexdigest()
