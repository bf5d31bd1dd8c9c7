"""Blocks and the shard plan, which assigns each slice of each parameter to a pserver.

A *block* is a contiguous slice of one parameter, flattened in C order. Blocks are numbered in the order of their
parameters. The *cut* into blocks is a pure function of the declared parameters and a number of pservers; every process
computes it, and it never changes.

The *placement*, which assigns the blocks to owners, is computed and stored once by the master, and has a version. Cut
and placement together form the *plan*.

Every message contains the plan's hash: the hash of the cut, a dot, and the version of the placement. Both sides must
have the same cut. A trainer and a pserver may have different placements if the pserver has the blocks in the message;
the master and a pserver may not.

Jobs declared by a version without placements use the computed owners, which are part of the plan's hash.

Derivation: lay out all T bytes of the model in one line, in the order of declaration. With P pservers and R rounds, the
line is cut at ``j * T / (P * R)``, and stretch j belongs to pserver ``j % P``. So each pserver gets R stretches of
equal length, even if one parameter is huge or thousands are tiny.

R is the smallest number for which a stretch has at most ``STRETCH_BYTES``. Stretches of this length are short enough to
distribute any few layers over all pservers, and long enough to keep most adjacent parameters, such as a small weight
and its bias, in one message.

A cut inside a parameter moves to the nearest end of the parameter if it would otherwise leave a piece shorter than
``MINIMUM_ELEMENTS`` or than a 64th of a stretch; other cuts are at multiples of ``CUT_ELEMENTS``.

Because cuts are computed from the start of the line, their moves do not add up: a stretch changes by at most two of
them.

The pieces between cuts are then divided into the fewest equal blocks of at most ``block_limit`` bytes, so no parameter
ends in a small remainder.

The rows of all embedding tables are divided into ``BUCKETS`` *buckets* (``tables.placement``). A bucket has a position
in the plan, like a block, and positions of buckets follow those of all blocks. So pushes, rounds, checkpoints and
recovery treat buckets like blocks. Each pserver has a range of buckets, which depends only on the number of pservers.

The load may be uneven if pservers have only a few small blocks each, or if parameters have different optimizers.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.tables.placement import BUCKETS, bucket_owners
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import NotFoundError, UsageError
from flightedl.messages.declarations import Placement, runs_of_equal

#: Version of the rules in this module. Part of every plan's hash, so plans of different versions never match.
PLAN_VERSION = 3
#: The best size of a message, measured with several trainers pushing. Smaller messages cost more CPU time per byte,
#: because code is evicted from the cache between messages.
BLOCK_BYTES = 1 << 21
#: Used if a pserver would otherwise get fewer than ``_MESSAGES`` blocks, so that both sides can work in parallel.
SMALL_BLOCK_BYTES = 1 << 20
_MESSAGES = 4
ELEMENTS_LIMIT = 1 << 20
#: Minimum number of elements in a piece.
MINIMUM_ELEMENTS = 8192
#: Pieces start at multiples of this many elements, which fill cache lines in the parameter and the pserver's arena.
CUT_ELEMENTS = 16
STRETCH_BYTES = 4 << 20
ALIGNMENT_BYTES = 64

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``start`` to ``stop`` (exclusive) of a flattened parameter; ``parameter`` is its number."""

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
    """All blocks of a model. The four arrays have one entry per block: (n,) int64. The module describes ``hash``."""

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
    #: Owner of each bucket, (BUCKETS,) int64; computed unless a placement is stored. None for a model without tables.
    bucket_pservers: Integers | None = None
    hash: str = field(init=False)
    #: Parameter name -> its number.
    numbers_by_name: dict[str, int] = field(init=False, repr=False)
    #: Pserver -> positions of its buckets.
    bucket_ranges: tuple[range, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.bucket_pservers is None and self.tables:
            object.__setattr__(self, "bucket_pservers", bucket_owners(self.pserver_count))
        object.__setattr__(self, "hash", _hash(self))
        object.__setattr__(self, "numbers_by_name", {p.name: number for number, p in enumerate(self.parameters)})
        object.__setattr__(self, "bucket_ranges", tuple(map(self._buckets_of, range(self.pserver_count))))
        for array in (self.block_parameters, self.block_starts, self.block_stops, self.block_pservers):
            array.flags.writeable = False

    @property
    def block_count(self) -> int:
        return len(self.block_starts)

    @property
    def block_bytes(self) -> Integers:
        """Bytes of each block's values, (n,) int64."""
        items = np.array([parameter.item_size_bytes for parameter in self.parameters], np.int64)
        return (self.block_stops - self.block_starts) * items[self.block_parameters]

    def has_same_cut(self, other: ShardPlan) -> bool:
        """True if both plans have the same blocks and tables; owners are not compared."""
        return (
            self.parameters == other.parameters
            and self.block_count == other.block_count
            and bool((self.block_starts == other.block_starts).all())
            and bool((self.block_parameters == other.block_parameters).all())
            and _shapes(self) == _shapes(other)
        )

    def block(self, number: int) -> Block:
        """Return one block. Raises NotFoundError if there is no block with this number."""
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
        """Number of buckets on all pservers together; 0 without tables."""
        return BUCKETS if self.tables else 0

    def buckets_of(self, pserver: int) -> range:
        """Return the positions of a pserver's buckets. Raises NotFoundError if there is no such pserver."""
        if not 0 <= pserver < self.pserver_count:
            raise NotFoundError(f"there is no pserver {pserver}; the plan has {self.pserver_count}")
        return self.bucket_ranges[pserver]

    def _buckets_of(self, pserver: int) -> range:
        first = self.block_count
        own = np.flatnonzero(self.bucket_pservers == pserver) if self.tables else np.empty(0, np.int64)
        if not own.size:
            return range(first, first)
        found = range(first + int(own[0]), first + int(own[-1]) + 1)
        assert own.size == len(found), "the buckets of a pserver are not neighbors"
        return found

    def positions_of(self, pserver: int) -> list[int]:
        return [*self.blocks_of(pserver).tolist(), *self.buckets_of(pserver)]

    def blocks_of(self, pserver: int) -> Integers:
        """Return a pserver's block numbers, (n,) int64, ascending. Raises NotFoundError if there is no such pserver."""
        if not 0 <= pserver < self.pserver_count:
            raise NotFoundError(f"there is no pserver {pserver}; the plan has {self.pserver_count}")
        return np.flatnonzero(self.block_pservers == pserver).astype(np.int64)

    def block_range(self, name: str) -> range:
        """Return the numbers of a parameter's blocks. Raises NotFoundError for an unknown parameter."""
        number = self.numbers_by_name.get(name)
        if number is None:
            raise NotFoundError(f"there is no parameter {name!r:.80}")
        first, last = np.searchsorted(self.block_parameters, (number, number + 1))
        return range(int(first), int(last))


def _shapes(plan: ShardPlan) -> list[tuple[str, int, str]]:
    return [(table.name, table.dim, table.dtype) for table in plan.tables]


def name_same_cut(plan_hash: str, other: str) -> bool:
    """True if the hashes of two plans contain the same cut; the versions of their placements are ignored."""
    return plan_hash.partition(".")[0] == other.partition(".")[0]


def hash_with(plan_hash: str, placement: int) -> str:
    """Return the hash of a plan with the same cut and another version of the placement."""
    return f"{plan_hash.partition('.')[0]}.{placement}"


def placement_of_hash(plan_hash: str) -> int:
    """Return the version of the placement in a plan's hash, or 0 if the hash contains none."""
    version = plan_hash.partition(".")[2]
    return int(version) if version.isdecimal() else 0


def adjacent(numbers: Iterable[int]) -> Iterator[range]:
    """Yield the ranges of adjacent numbers, such as those of blocks or buckets, in ascending order."""
    for _, pairs in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        yield range(run[0], run[-1] + 1)


def block_limit(parameters: Sequence[ParameterSpec], pserver_count: int) -> int:
    """Return the maximum number of bytes in a block and in a run, for a model on ``pserver_count`` pservers."""
    share = sum(parameter.size_bytes for parameter in parameters) // pserver_count
    return min(BLOCK_BYTES, max(SMALL_BLOCK_BYTES, share // _MESSAGES))


def runs_of(plan: ShardPlan, pserver: int) -> list[range]:
    """Return a pserver's runs: adjacent blocks of one dtype with at most ``block_limit`` bytes, sent in one message.

    The blocks of a run are adjacent in the model, so both sides can keep them in one array. All processes compute the
    same runs, whatever the transport. The limit is chosen so that the values of both sides fit into the cache.

    Returns:
        Ranges of block numbers, ascending; every block of the pserver is in one of them.
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
    """Cut parameters into blocks, and assign each block to a pserver; see the module's docstring for the rules.

    Args:
        parameters: In declared order, which the plan depends on.
        pserver_count: P >= 1.
        tables: In declared order, which the plan depends on.
        block_bytes: Limit of a block's size, unless a smaller block would have less than ``MINIMUM_ELEMENTS``; None:
            ``block_limit``.

    Raises:
        UsageError: there is no pserver, there are neither parameters nor tables, or two have the same name.
    """
    _require_pserver(pserver_count)
    if not parameters and not tables:
        raise UsageError("a model needs at least one parameter or table")
    _require_distinct("parameters", [parameter.name for parameter in parameters])
    _require_distinct("tables", [table.name for table in tables])
    if not parameters:
        nothing = np.empty(0, np.int64)
        return ShardPlan((), pserver_count, nothing, nothing, nothing, nothing.copy(), tables=tuple(tables))
    limit = block_limit(parameters, pserver_count) if block_bytes is None else block_bytes
    return replace(_divide(tuple(parameters), pserver_count, limit), tables=tuple(tables))


def _require_pserver(count: int) -> None:
    if count < 1:
        raise UsageError(
            f"this job has {count} pservers, but a model needs at least one: start it with "
            "`flightedl run --pservers 1`, and let its trainers know its etcd (FLIGHTEDL_ETCD)"
        )


def _require_distinct(kind: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"there are two {kind} named {name!r}; give each its own name")
        seen.add(name)


def reassigned(plan: ShardPlan, pserver_count: int) -> ShardPlan:
    """Return the same blocks on a different number of pservers, for a job that continues on fewer or more pservers.

    Each block keeps its version and applied set, so blocks are neither cut nor merged. The result does not depend on
    the blocks' previous owners, so however often a job is moved, its plan follows from the first cut and the current
    number of pservers.

    In descending order of size, each block is assigned to the pserver with the fewest bytes so far (Graham 1969), or to
    the lowest of several. No pserver therefore has more than an equal share plus one block.

    Raises:
        UsageError: there is no pserver.
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
    """Return the plan of a job whose parameters were cut for ``cut_for`` pservers.

    Args:
        parameters: In declared order.
        pserver_count: Number of pservers that the job has now.
        cut_for: Number of pservers that the job had first; 0: ``pserver_count``.
        tables: In declared order.
        placement: The stored placement; None if the owners are to be computed.

    Raises:
        UsageError: as for ``plan_shards``, or the placement belongs to other blocks.
    """
    plan = plan_shards(parameters, cut_for or pserver_count, tables=tables)
    if placement is not None:
        return placed(plan, placement)
    return plan if plan.pserver_count == pserver_count else reassigned(plan, pserver_count)


def placement_of(plan: ShardPlan, version: int = 1) -> Placement:
    """Return a plan's owners in their stored form."""
    buckets = [] if plan.bucket_pservers is None else plan.bucket_pservers.tolist()
    return Placement(
        version=version,
        pservers=plan.pserver_count,
        blocks=runs_of_equal(plan.block_pservers.tolist()),
        buckets=runs_of_equal(buckets),
    )


def placed(plan: ShardPlan, placement: Placement) -> ShardPlan:
    """Return the plan with the owners of a stored placement. Raises UsageError if the placement has other blocks."""
    owners, buckets = (
        np.array([owner for owner, count in runs for _ in range(count)], np.int64)
        for runs in (placement.blocks, placement.buckets)
    )
    known = set(owners.tolist()) | set(buckets.tolist())
    if (owners.size, buckets.size) != (plan.block_count, plan.bucket_count) or known - {*range(placement.pservers)}:
        raise UsageError(
            f"placement {placement.version} belongs to other blocks than the job's: run the same version everywhere"
        )
    return replace(
        plan,
        pserver_count=placement.pservers,
        block_pservers=owners,
        placement=placement.version,
        bucket_pservers=buckets if plan.tables else None,
    )


def _cuts(parameters: Sequence[ParameterSpec], ends: Integers, stretch_count: int) -> list[int]:
    """Return the ends of all stretches except the last, in elements of the line; empty stretches repeat a cut.

    Args:
        parameters: In line order.
        ends: Cumulative number of elements at the end of each parameter, (parameters,).
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

    # Pieces between adjacent cuts or ends of parameters, in elements of the line. Each array is (pieces,).
    borders = np.union1d(np.union1d(0, ends), cuts)
    starts, sizes = borders[:-1], np.diff(borders)
    owners = np.searchsorted(cuts, starts, side="right") % pserver_count
    numbers = np.searchsorted(ends, starts, side="right")
    items = np.array([parameter.item_size_bytes for parameter in parameters], np.int64)[numbers]

    # Divide each piece into equal blocks. Within a piece, blocks begin at multiples of CUT_ELEMENTS.
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
