"""Plans for pushes: how to validate a given set of gradients, and how to arrange them in messages.

A loop pushes the same parameters step after step, so their names are resolved only once, in a :class:`StepPlan`. The
plan holds the shapes and dtypes of the gradients, and determines which blocks and gradients each message contains.

With a plan, a step takes one pass over the gradients. Gradients that match their declarations need no Python call each.
Others are converted, or rejected with an error that names the parameter, before anything is sent. Large gradients are
sent from the user's memory. Small gradients are joined before they are checked for non-finite values, because checking
a thousand small arrays takes longer than sending them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from flightedl.client.arguments import unmasked
from flightedl.client.model.kept import ErrorFeedback
from flightedl.client.tables.traffic import RowMessages
from flightedl.domain.model.parameters import STORAGE_DTYPES
from flightedl.domain.model.sharding import ShardPlan
from flightedl.errors import GradientError
from flightedl.kernels.half_precision import ITEM_BYTES, is_finite, largest, too_large

Array = npt.NDArray[np.generic]

#: Number of elements above which two threads check an array. Starting the second thread takes as long as reading 3 MB.
_BIG_BYTES = 16 << 20
_FEW_ELEMENTS = 4096
#: Maximum number of cached plans.
_PLANS_LIMIT = 1024
_ARRAYS = {np.ndarray}
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
#: NumPy functions that are faster than the arrays' methods, which are implemented in Python.
_all = np.logical_and.reduce
_square: Any = np.vdot


@dataclass(frozen=True, slots=True)
class _Declared:
    """Shape and dtypes that a parameter's gradients must have."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: The gradient's 16-bit float type, declared or as sent; empty if there is none.
    kind: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Stretch(NamedTuple):
    """Adjacent blocks of one parameter within a run."""

    name: str
    blocks: range
    #: Range of the flattened gradient that these blocks cover.
    elements: slice


class Line(NamedTuple):
    """Gradients that are adjacent in a message."""

    #: Range of the plan's names that these gradients cover.
    first: int
    stop: int
    kind: str
    #: Smallest value that is too large to be sent.
    limit: float
    #: Buffer in which several gradients are joined; None for a single gradient, which is not copied.
    memory: Array | None


class Piece(NamedTuple):
    """Adjacent blocks of a run that have gradients in the same line, or that all lack gradients."""

    blocks: range
    #: Number of the line; None if the blocks have no gradient and only learn that the batch has arrived.
    line: int | None
    #: Range of the line that contains the blocks' elements; None for the entire line.
    elements: slice | None


class StepPlan:
    """Plan for sending gradients of a given set of parameters.

    Args:
        names: The parameters, in declared order.
        declared: Declarations of all parameters.
        runs: Ranges of each pserver's runs.
    """

    def __init__(
        self, names: Sequence[str], declared: Mapping[str, _Declared], runs: Sequence[Sequence[Sequence[_Stretch]]]
    ) -> None:
        self.names = names
        self.shapes = [declared[name].shape for name in names]
        self.dtypes = [declared[name].dtype for name in names]
        self._declared = declared
        self._places = {name: place for place, name in enumerate(names)}
        self.lines: list[Line] = []
        #: Parameter -> number of the line that contains its gradient.
        self._line_of: dict[str, int] = {}
        #: Pserver -> run -> pieces.
        self.pieces = [[self._pieces_of(run) for run in shard_runs] for shard_runs in runs]

    def _pieces_of(self, run: Sequence[_Stretch]) -> list[Piece]:
        pieces: list[Piece] = []
        is_joining = False
        for name, blocks, elements in run:
            place, before = self._places.get(name), pieces[-1] if pieces else None
            if place is None:
                line, part, is_whole = None, None, False
            else:
                size = self._declared[name].size
                is_whole = elements.stop - elements.start == size
                part = None if is_whole else elements
                # Copying a gradient with few elements takes less time than sending it as a separate line.
                is_whole = is_whole and (len(run) > 1 or size < _FEW_ELEMENTS)
                line = self._joined_to(before, place) if is_joining and is_whole else self._line(name, place)
            if before is not None and before.line == line and (line is None or (is_joining and is_whole)):
                pieces[-1] = before._replace(blocks=range(before.blocks.start, blocks.stop))
            else:
                pieces.append(Piece(blocks, line, part))
            is_joining = is_whole
        return pieces

    def _line(self, name: str, place: int) -> int:
        number = self._line_of.get(name)
        if number is None:
            kind = self._declared[name].kind
            number = self._line_of[name] = len(self.lines)
            self.lines.append(Line(place, place + 1, kind, too_large(kind), None))
        return number

    def _joined_to(self, before: Piece | None, place: int) -> int:
        assert before is not None
        assert before.line is not None
        line = self.lines[before.line]
        stop = place + 1
        size = sum(math.prod(shape) for shape in self.shapes[line.first : stop])
        self.lines[before.line] = line._replace(stop=stop, memory=np.empty(size, self.dtypes[place]))
        return before.line

    def laid_out(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the (n,) lines of gradients that match their declarations. Joined lines are valid until the next call.

        The bits of 16-bit floats are returned, because Arrow does not support all 16-bit types.
        """
        found: list[Array] = []
        for first, stop, _, _, memory in self.lines:
            if memory is None:
                array = arrays[first]
                line = (array if array.flags.c_contiguous else np.ascontiguousarray(array)).reshape(-1)
            elif (in_place := _joined_in_place(arrays[first:stop])) is not None:
                line = in_place
            elif memory.dtype == arrays[first].dtype:
                line = np.concatenate(arrays[first:stop], axis=None, out=memory, casting="no")
            else:
                line = np.concatenate(arrays[first:stop], axis=None)
            found.append(line.view(np.uint16) if line.dtype.itemsize == ITEM_BYTES else line)
        return found


def _joined_in_place(arrays: Sequence[Array]) -> Array | None:
    """Return the arrays as one (n,) array without a copy if they are adjacent in memory, otherwise None."""
    base, dtype = arrays[0].base, arrays[0].dtype
    if base is None or arrays[1].base is not base:
        return None
    start = end = arrays[0].__array_interface__["data"][0]
    for array in arrays:
        is_next = array.base is base and array.__array_interface__["data"][0] == end
        if not (is_next and array.dtype == dtype and array.flags.c_contiguous):
            return None
        end += array.nbytes
    return as_strided(arrays[0].reshape(-1), ((end - start) // dtype.itemsize,), writeable=False)


class Outgoing(msgspec.Struct, frozen=True):
    """Gradients of one push. They are encoded only once, so that repeated messages have the same bytes."""

    plan: StepPlan
    #: The plan's lines.
    lines: Sequence[Array]
    #: Pushes and lookups of table rows.
    rows: RowMessages | None = None
    #: Gradients in the order of the plan's names. They have the declared dtypes until they are encoded, and the sent
    #: dtypes after that.
    arrays: Sequence[Array] = ()


class StepPlans:
    """Plans for all pushes to a model, and validation of the model's gradients.

    Args:
        plan: The shard plan.
        runs: Runs of each pserver's blocks; see ``runs_of``.
        dtypes: Dtype of each parameter's array.
        wire: Type in which float32 elements are sent; see ``kernels.half_precision``.
        clip_norm: Maximum global norm: gradients with a greater norm are scaled down to it. None for no limit.
        pool: Provides a second thread.
        unclipped: Parameters to which ``clip_norm`` does not apply.
        feedback: Encodes gradients together with earlier rounding errors; None to ignore rounding errors.
    """

    def __init__(
        self,
        plan: ShardPlan,
        runs: Sequence[Sequence[range]],
        dtypes: Mapping[str, np.dtype[Any]],
        wire: str,
        clip_norm: float | None,
        pool: ThreadPoolExecutor,
        unclipped: Collection[str] = (),
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self._unclipped = frozenset(unclipped)
        self._clip_norm = clip_norm
        self._pool = pool
        self._feedback = feedback
        self._declared = {
            spec.name: _Declared(
                tuple(spec.shape), dtypes[spec.name], spec.short_kind or (wire if spec.dtype == "float32" else "")
            )
            for spec in plan.parameters
        }
        self._runs = [[list(_stretches(plan, run)) for run in shard_runs] for shard_runs in runs]
        self._plans: dict[frozenset[str], StepPlan] = {}
        self._newest = self._plan_of(())
        #: True if gradients must be modified before they are sent.
        self.encodes = clip_norm is not None or feedback is not None
        #: A push without gradients.
        self.nothing = Outgoing(self._newest, ())

    def _plan_of(self, names: Collection[str]) -> StepPlan:
        key = frozenset(names)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS_LIMIT:
                self._plans.clear()
            plan = StepPlan([name for name in self._declared if name in key], self._declared, self._runs)
            self._plans[key] = plan
        return plan

    def unknown(self, name: str) -> str:
        return f"there is no parameter {name!r:.80}; declared are {', '.join(sorted(self._declared))}"

    def encoded(self, outgoing: Outgoing, *, is_clipped: bool = False) -> Outgoing:
        """Return the gradients to send: clipped unless they already are, and with earlier rounding errors added.

        Raises:
            GradientError: a gradient plus its rounding error is out of range for 16 bits. Nothing was sent.
        """
        plan, lines, arrays = outgoing.plan, outgoing.lines, outgoing.arrays
        gradients: Mapping[str, Array] = dict(zip(plan.names, arrays, strict=True))
        if not is_clipped:
            scaled = self.clipped(gradients)
            if scaled is not gradients:
                gradients, arrays = scaled, list(scaled.values())
                lines = plan.laid_out(arrays)
        if self._feedback is not None:
            encoded = self._feedback.encode({name: np.ravel(array) for name, array in gradients.items()})
            arrays = list(encoded.values())
            lines = plan.laid_out(arrays)
        return Outgoing(plan, lines, outgoing.rows, arrays)

    def placed(self, outgoing: Outgoing, owners: ShardPlan) -> Outgoing:
        """Return the same gradients arranged for other owners."""
        plan, rows = self._plan_of(outgoing.plan.names), outgoing.rows
        rows = None if rows is None else rows.placed(owners)
        return Outgoing(plan, plan.laid_out(outgoing.arrays), rows, outgoing.arrays)

    def clipped(self, gradients: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the gradients, scaled down if their global norm exceeds ``clip_norm``; otherwise unchanged."""
        if self._clip_norm is None:
            return gradients
        norms = {name: _square_sum(array) for name, array in gradients.items() if name not in self._unclipped}
        norm = math.sqrt(sum(norms.values()))
        if norm <= self._clip_norm:
            return gradients
        factor = self._clip_norm / norm
        return {
            name: np.asarray(_wide(array) * factor, array.dtype) if name in norms else array
            for name, array in gradients.items()
        }

    def sound(self, gradients: Mapping[str, npt.ArrayLike], where: object) -> Outgoing:
        """Validate the gradients and arrange them for sending. If ``encodes`` is true, they must still be encoded.

        Args:
            gradients: Gradients by name, in the parameters' shapes.
            where: Description of the batch, for messages.

        Raises:
            GradientError: the gradients are not given by name, a name is unknown, or a gradient is not an array, has a
                wrong shape, cannot be converted (see ``converted``), or is not finite in the declared type or as sent.
        """
        plan = self._newest
        arrays: Sequence[Any] | None
        try:
            arrays = list(map(gradients.__getitem__, plan.names)) if len(gradients) == len(plan.names) else None
        except (AttributeError, KeyError, TypeError):
            arrays = None
        if (
            arrays is None
            or not set(map(type, arrays)) <= _ARRAYS
            or list(map(_SHAPE, arrays)) != plan.shapes
            or list(map(_DTYPE, arrays)) != plan.dtypes
        ):
            plan, arrays = self._as_declared(gradients, where)
        lines = plan.laid_out(arrays)
        for line, (first, stop, kind, limit, _) in zip(lines, plan.lines, strict=True):
            if line.size < _FEW_ELEMENTS and math.isinf(limit) and not kind:
                # Changing NumPy's error state would take longer than the check, and ``vdot`` does not depend on it.
                if math.isfinite(_square(line, line)) or _all(np.isfinite(line)):
                    continue
            elif self._is_within(line, kind, limit):
                continue
            raise _unsound(plan.names[first:stop], arrays[first:stop], kind, where)
        return Outgoing(plan, lines, None, arrays)

    def _as_declared(self, gradients: Mapping[str, npt.ArrayLike], where: object) -> tuple[StepPlan, list[Array]]:
        """Return the plan for these names, and the gradients in its order, converted to the declared dtypes."""
        if not isinstance(gradients, Mapping):
            raise GradientError(
                f"gradients must be given by name, such as {{{next(iter(self._declared))!r}: array}}, "
                f"not as {type(gradients).__name__}"
            )
        found: dict[str, Array] = {}
        for name, value in gradients.items():
            declared = self._declared.get(name)
            if declared is None:
                raise GradientError(self.unknown(name))
            try:
                array = np.asarray(unmasked(value))
            except (TypeError, ValueError, RuntimeError) as error:
                raise GradientError(f"the gradient of {name!r} is not an array: {error!s:.160}") from None
            if array.shape != declared.shape:
                raise GradientError(f"the gradient of {name!r} has shape {array.shape}, the parameter {declared.shape}")
            found[name] = (
                array if array.dtype == declared.dtype else converted(array, declared.dtype, repr(name), where)
            )
        self._newest = plan = self._plan_of(found)
        return plan, [found[name] for name in plan.names]

    def _is_within(self, line: Array, kind: str, limit: float) -> bool:
        """Return True if all elements can be sent. Two threads check large lines, to use the full memory bandwidth."""
        if line.dtype == np.uint16:
            return is_finite(line.view(np.uint16), kind)
        if line.nbytes < _BIG_BYTES:
            return _is_within(line, limit)
        half = line.size // 2
        second = self._pool.submit(_is_within, line[half:], limit)
        return _is_within(line[:half], limit) & second.result()


def at_one_version(blocks: range, bases: Mapping[int, int], wanted: Collection[int] | None) -> list[range]:
    """Return ranges of adjacent blocks with equal base versions: of all blocks, or of the ``wanted`` blocks."""
    numbers = [number for number in blocks if wanted is None or number in wanted]
    stretches = groupby(enumerate(numbers), lambda pair: (pair[1] - pair[0], bases[pair[1]]))
    return [range(found[0][1], found[-1][1] + 1) for _, neighbors in stretches if (found := list(neighbors))]


def converted(array: Array, dtype: np.dtype[Any], what: str, where: object) -> Array:
    """Return a gradient in another float type. Widening is exact; narrowing rounds to nearest even.

    Raises:
        GradientError: the gradient does not have a float type, or a finite element is out of range for ``dtype``.
    """
    if array.dtype.name not in STORAGE_DTYPES:
        raise GradientError(
            f"the gradient of {what} is {array.dtype} in {where}, but must be one of {', '.join(STORAGE_DTYPES)}"
        )
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if (np.isinf(found) & np.isfinite(array)).any():
        raise _beyond(what, dtype.name, where)
    return found


def _unsound(names: Sequence[str], arrays: Sequence[Array], kind: str, where: object) -> GradientError:
    """Return the error for the first gradient that cannot be sent."""
    for name, array in zip(names, arrays, strict=True):
        if not np.isfinite(array).all():
            return GradientError(f"the gradient of {name!r} has NaN or infinity in {where}; nothing of it was pushed")
        if kind and array.dtype.itemsize != ITEM_BYTES and (np.abs(array) >= too_large(kind)).any():
            return _beyond(repr(name), kind, where)
    raise AssertionError("all gradients are sound")


def _beyond(what: str, kind: str, where: object) -> GradientError:
    return GradientError(
        f"the gradient of {what} is beyond {largest(kind):g} in {where}, the largest value of {kind}; "
        "nothing of it was pushed: scale the loss down"
    )


def _stretches(plan: ShardPlan, run: range) -> Iterator[_Stretch]:
    for parameter, found in groupby(map(plan.block, run), lambda block: block.parameter):
        blocks = list(found)
        numbers = range(blocks[0].number, blocks[-1].number + 1)
        yield _Stretch(plan.parameters[parameter].name, numbers, slice(blocks[0].start, blocks[-1].stop))


def _square_sum(array: Array) -> float:
    return float(np.square(_wide(array), dtype=np.float64).sum())


def _wide(array: Array) -> npt.NDArray[Any]:
    return array.astype(np.float32) if array.dtype.itemsize == ITEM_BYTES else array


def _is_within(flat: Array, limit: float) -> bool:
    """Return True if all elements are finite and below the limit. If the fast check is inconclusive, check exactly."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.dot(flat, flat))
        return (math.isfinite(squares) and squares < limit * limit) or bool((np.abs(flat) < limit).all())
