"""What is checked of the user's gradients before anything of them is sent, and what they are scaled to.

Big gradients are sent as they lie in the user's memory. Small ones travel many to a message, one after the other; they
are put together here, before the check, because checking a thousand little arrays takes longer than sending them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
        #: First block of a run of whole parameters -> their names.
        self._runs = dict(_whole_runs(plan, runs))

    def unknown(self, name: str) -> str:
        """What is wrong with a name that no parameter has."""
        return f"there is no parameter {name!r:.80}; declared are {', '.join(sorted(self._wanted))}"

    def flattened(self, gradients: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """The gradients as contiguous (n,) arrays.

        Raises:
            GradientError: not given by name, unknown name, no array, wrong shape or dtype.
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
                raise GradientError(
                    f"the gradient of {name!r} is {array.dtype}, the parameter {wanted.dtype}: "
                    f"use .astype(np.{wanted.dtype})"
                )
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
        for first, names in self._runs.items():
            if not arrays.keys() >= names.keys():
                continue
            joined = np.concatenate([arrays[name] for name in names])
            # Where it is not sound, each one is looked at below, to name it.
            if self._is_within(joined, self._wanted[next(iter(names))].kind):
                together[first] = joined
                passed |= names.keys()
        for name, array in arrays.items():
            kind = self._wanted[name].kind
            if name not in passed and not self._is_within(array, kind):
                raise self._unsound(name, array, kind, where)
        return together

    @staticmethod
    def _unsound(name: str, array: Array, kind: str, where: object) -> GradientError:
        if not kind or not np.isfinite(array).all():
            return GradientError(f"the gradient of {name!r} has NaN or infinity in {where}; nothing of it was pushed")
        return GradientError(
            f"the gradient of {name!r} is beyond {largest(kind):g} in {where}, the largest that {kind} can say; "
            "nothing of it was pushed: scale the loss down"
        )

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


def _whole_runs(plan: ShardPlan, runs: Sequence[Sequence[range]]) -> Iterator[tuple[int, dict[str, None]]]:
    """Runs of several blocks, each the whole of a parameter."""
    for pserver_runs in runs:
        for run in pserver_runs:
            blocks = [plan.block(number) for number in run]
            specs = [plan.parameters[block.parameter] for block in blocks]
            if len(run) > 1 and all(block.size == spec.size for block, spec in zip(blocks, specs, strict=True)):
                yield run.start, dict.fromkeys(spec.name for spec in specs)


def _square_sum(array: Array) -> float:
    return float(np.square(_wide(array), dtype=np.float64).sum())


def _wide(array: Array) -> npt.NDArray[Any]:
    """16-bit floats as float32; others as they are."""
    return array.astype(np.float32) if array.dtype.itemsize == ITEM_BYTES else array


def _is_within(flat: Array, limit: float) -> bool:
    """Whether all elements are finite and below a limit: one fast pass, an exact one only where that is not enough."""
    if flat.size < _FEW_ELEMENTS and math.isinf(limit):
        # Setting the error state costs more than looking at each element.
        return bool(np.isfinite(flat).all())
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.dot(flat, flat))
        return (math.isfinite(squares) and squares < limit * limit) or bool((np.abs(flat) < limit).all())
