"""What is checked of the user's gradients before anything of them is sent, and what they are scaled to.

Big gradients are sent as they lie in the user's memory. Small ones travel many to a message, one after the other; they
are put together here, before the check, because checking a thousand little arrays takes longer than sending them. Where
all of a message are there and as they were declared, which is nearly always, no Python runs for each of them (see
``JoinedRun``); whatever is wrong with one of them is found, and said, by the way that looks at each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.parameters import STORAGE_DTYPES
from flightedl.domain.model.sharding import ShardPlan
from flightedl.errors import GradientError
from flightedl.kernels.half_precision import ITEM_BYTES, is_finite, largest, too_large

Array = npt.NDArray[np.generic]

#: Arrays from here on are checked by two threads. Handing half over takes as long as reading 3 MB.
_BIG_BYTES = 16 << 20
_FEW_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a parameter's gradient has to be."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: Of 16-bit floats, in which it is declared or travels; empty: neither.
    kind: str


_ARRAYS = {np.ndarray}
_SHAPE = attrgetter("shape")
#: Without the Python that the method of arrays has.
_all = np.logical_and.reduce
_square: Callable[[Any, Any], float] = np.vdot


class JoinedRun:
    """Whole parameters that travel in one message, and the memory in which their gradients are put together.

    Args:
        names: Of the parameters, in order.
        wanted: What each one's gradient has to be; all are of one dtype.
    """

    def __init__(self, names: Sequence[str], wanted: Sequence[_Wanted]) -> None:
        self.names = dict.fromkeys(names)
        self.kind = wanted[0].kind
        self._pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
        self._pick = itemgetter(*names) if len(names) > 1 else lambda gradients: (gradients[names[0]],)
        self._shapes = [each.shape for each in wanted]
        self._dtype = wanted[0].dtype
        self._line = np.empty(sum(math.prod(shape) for shape in self._shapes), self._dtype)

    def join(self, gradients: Mapping[str, Any]) -> Array | None:
        """(n,) the gradients one after the other, until the next time; None: not all are there and as declared.

        A single one stays where it is.
        """
        try:
            arrays = self._pick(gradients)
            if set(map(type, arrays)) != _ARRAYS or list(map(_SHAPE, arrays)) != self._shapes:
                return None
            if len(arrays) == 1 and arrays[0].flags.c_contiguous:
                return arrays[0].reshape(-1) if arrays[0].dtype == self._dtype else None
            return np.concatenate(arrays, axis=None, out=self._line, casting="no")
        except (KeyError, TypeError):
            # One is missing, or has another dtype.
            return None


class GradientCheck:
    """The checks of one model's gradients.

    Args:
        plan: Where every block lies.
        runs: Of each pserver, see ``runs_of``.
        dtypes: Of each parameter's array.
        wire: How float32 elements travel, see ``kernels.half_precision``.
        clip_norm: Gradients whose global norm is above it are scaled down to it; None: never.
        pool: Lends a second thread.
        unclipped: Parameters to which ``clip_norm`` does not apply.
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
    ) -> None:
        self._unclipped = frozenset(unclipped)
        self._clip_norm = clip_norm
        self._pool = pool
        self._wanted = {
            spec.name: _Wanted(
                tuple(spec.shape), dtypes[spec.name], spec.short_kind or (wire if spec.dtype == "float32" else "")
            )
            for spec in plan.parameters
        }
        #: First block of a run of whole parameters -> what joins them.
        self._runs = {
            first: JoinedRun(names, [self._wanted[name] for name in names]) for first, names in _whole_runs(plan, runs)
        }

    def unknown(self, name: str) -> str:
        """What is wrong with a name that no parameter has."""
        return f"there is no parameter {name!r:.80}; declared are {', '.join(sorted(self._wanted))}"

    def ready(
        self, gradients: Mapping[str, npt.ArrayLike], where: object
    ) -> tuple[dict[str, Array], Mapping[int, Array]]:
        """What ``flattened`` and ``require_sound`` give, and raise, for gradients that are sent as they are.

        Those that were joined without a look at each are not among the arrays.
        """
        together: dict[int, Array] = {}
        joined: set[str] = set()
        for first, run in self._runs.items() if isinstance(gradients, Mapping) else ():
            line = run.join(gradients)
            if line is not None and self._is_within(line, run.kind):
                together[first] = line
                joined |= run.names.keys()
        if len(joined) == len(gradients) and together:
            return {}, together
        rest = {name: value for name, value in gradients.items() if name not in joined} if together else gradients
        arrays = self.flattened(rest, where)
        return arrays, together | self.require_sound(arrays, where)

    @property
    def clips(self) -> bool:
        """Whether gradients may be scaled before they are sent."""
        return self._clip_norm is not None

    def flattened(self, gradients: Mapping[str, npt.ArrayLike], where: object) -> dict[str, Array]:
        """The gradients as contiguous (n,) arrays of the parameters' dtypes.

        Raises:
            GradientError: not given by name, unknown name, no array, wrong shape, or as of ``converted``.
        """
        if not isinstance(gradients, Mapping):
            raise GradientError(
                f"gradients must be given by name, such as {{{next(iter(self._wanted))!r}: array}}, "
                f"not as {type(gradients).__name__}"
            )
        found: dict[str, Array] = {}
        for name, value in gradients.items():
            wanted = self._wanted.get(name)
            if wanted is None:
                raise GradientError(self.unknown(name))
            try:
                array = np.asarray(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise GradientError(f"the gradient of {name!r} is no array: {error!s:.160}") from None
            if array.shape != wanted.shape:
                raise GradientError(f"the gradient of {name!r} has shape {array.shape}, the parameter {wanted.shape}")
            if array.dtype != wanted.dtype:
                array = converted(array, wanted.dtype, repr(name), where)
            if array.ndim != 1 or not array.flags.c_contiguous:
                array = np.ascontiguousarray(array).reshape(-1)
            found[name] = array
        return found

    def require_sound(self, arrays: Mapping[str, Array], where: object) -> dict[int, Array]:
        """GradientError unless all elements of the (n,) gradients are finite, also as they travel.

        Returns:
            First block of a run of small parameters, all of them given -> (n,) their gradients, one after the other.
        """
        together: dict[int, Array] = {}
        passed: set[str] = set()
        for first, run in self._runs.items():
            if not arrays.keys() >= run.names.keys():
                continue
            joined = np.concatenate([arrays[name] for name in run.names])
            # Where it is not sound, each one is looked at below, to name it.
            if self._is_within(joined, run.kind):
                together[first] = joined
                passed |= run.names.keys()
        for name, array in arrays.items():
            kind = self._wanted[name].kind
            if name not in passed and not self._is_within(array, kind):
                raise self._unsound(name, array, kind, where)
        return together

    @staticmethod
    def _unsound(name: str, array: Array, kind: str, where: object) -> GradientError:
        if not kind or not np.isfinite(array).all():
            return GradientError(f"the gradient of {name!r} has NaN or infinity in {where}; nothing of it was pushed")
        return _beyond(repr(name), kind, where)

    def clipped(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """The gradients, scaled so that the norm of all of them together is at most ``clip_norm``; else the same."""
        if self._clip_norm is None:
            return arrays
        norms = {name: _square_sum(array) for name, array in arrays.items() if name not in self._unclipped}
        norm = math.sqrt(sum(norms.values()))
        if norm <= self._clip_norm:
            return arrays
        factor = self._clip_norm / norm
        return {
            name: np.asarray(_wide(array) * factor, array.dtype) if name in norms else array
            for name, array in arrays.items()
        }

    def _is_within(self, flat: Array, kind: str) -> bool:
        """A big array is read by two threads: the pass is bound by one core's way to memory."""
        if flat.dtype.itemsize == ITEM_BYTES:
            return is_finite(flat.view(np.uint16), kind)
        limit = too_large(kind)
        if flat.nbytes < _BIG_BYTES:
            return _is_within(flat, limit)
        half = flat.size // 2
        second = self._pool.submit(_is_within, flat[half:], limit)
        return _is_within(flat[:half], limit) & second.result()


def converted(array: Array, dtype: np.dtype[Any], what: str, where: object) -> Array:
    """Return a gradient in another float type: exact in a wider type, rounded to nearest even in a narrower type.

    Raises:
        GradientError: it is not of floats, or a finite element is beyond the range of ``dtype``.
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


def _beyond(what: str, kind: str, where: object) -> GradientError:
    return GradientError(
        f"the gradient of {what} is beyond {largest(kind):g} in {where}, the largest that {kind} can say; "
        "nothing of it was pushed: scale the loss down"
    )


def _whole_runs(plan: ShardPlan, runs: Sequence[Sequence[range]]) -> Iterator[tuple[int, list[str]]]:
    """First block and parameters of runs of blocks that are each the whole of a parameter.

    Of several, or of a single one so small that to copy it costs less than to look at it in the other way.
    """
    for pserver_runs in runs:
        for run in pserver_runs:
            blocks = [plan.block(number) for number in run]
            specs = [plan.parameters[block.parameter] for block in blocks]
            is_little = len(run) > 1 or blocks[0].size < _FEW_ELEMENTS
            if is_little and all(block.size == spec.size for block, spec in zip(blocks, specs, strict=True)):
                yield run.start, [spec.name for spec in specs]


def _square_sum(array: Array) -> float:
    return float(np.square(_wide(array), dtype=np.float64).sum())


def _wide(array: Array) -> npt.NDArray[Any]:
    """16-bit floats as float32; others as they are."""
    return array.astype(np.float32) if array.dtype.itemsize == ITEM_BYTES else array


def _is_within(flat: Array, limit: float) -> bool:
    """Whether all elements are finite and below a limit: one fast pass, an exact one only where that is not enough."""
    if flat.size < _FEW_ELEMENTS and math.isinf(limit):
        # Setting the error state costs more than this pass, which does not look at it, as ``dot`` does.
        return math.isfinite(_square(flat, flat)) or bool(_all(np.isfinite(flat)))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.dot(flat, flat))
        return (math.isfinite(squares) and squares < limit * limit) or bool((np.abs(flat) < limit).all())
