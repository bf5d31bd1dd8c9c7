"""The model's values in a trainer's memory: one contiguous buffer, in which the blocks of a message are adjacent.

With ``lending``, arriving values are shown to the user instead of being stored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from flightedl.client.model.lending import Lending, Show
from flightedl.domain.model.sharding import ALIGNMENT_BYTES, Block, ShardPlan
from flightedl.errors import MessageError
from flightedl.kernels.half_precision import array_dtype
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory
from flightedl.wire.shared_values import copy_past_cache

if TYPE_CHECKING:
    from flightedl.kernels.compiled import HalfKernels

Array = npt.NDArray[np.generic]
#: Below this size, bytes are copied directly: creating arrays would take longer than the copy.
_FEW_BYTES = 16 << 10


class ModelValues:
    """Values of all blocks, and the conversions between their dtypes and the sent dtypes.

    Args:
        plan: The shard plan.
        blocks: All blocks of the plan, by number.
        halves: Converts float32 elements that are sent as 16-bit floats; None if they are sent unchanged.
    """

    def __init__(self, plan: ShardPlan, blocks: Mapping[int, Block], halves: HalfKernels | None) -> None:
        self._half = halves
        #: True if some values are sent as 16-bit floats although their dtype is wider.
        self.shortens = halves is not None
        starts, size_bytes = _places_in_line(plan)
        raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
        first = -raw.ctypes.data % ALIGNMENT_BYTES
        self._line = raw[first : first + size_bytes]
        self._plan, self._starts = plan, starts
        arrays = self._arrays_in(self._line)
        #: Memory for gradients that pservers on the same host map; None until ``gradient_memory`` allocates it.
        self.gradients: SharedMemory | None = None
        #: Dtype of each parameter's array.
        self.dtypes: dict[str, np.dtype[Any]] = {name: array.dtype for name, array in arrays.items()}
        #: Parameter -> its values, read-only.
        self.views = {name: _read_only(array) for name, array in arrays.items()}
        self._is_float32 = [self.dtypes[spec.name] == np.float32 for spec in plan.parameters]
        self._parameters = {number: block.parameter for number, block in blocks.items()}
        self._blocks, self._names = blocks, [spec.name for spec in plan.parameters]
        #: Object that shows values to the user instead of storing them; None if values are stored.
        self.lending: Lending | None = None
        #: Numbers of the parameters that ``store`` has changed; None if changes are not recorded.
        self.stored: set[int] | None = None
        #: Block -> its start and end in the buffer, in bytes.
        self._bounds: dict[int, tuple[int, int]] = {}
        for number, block in blocks.items():
            item_bytes, start = plan.parameters[block.parameter].seen_item_bytes, starts[block.parameter]
            self._bounds[number] = (start + block.start * item_bytes, start + block.stop * item_bytes)

    def _arrays_in(self, line: npt.NDArray[np.uint8]) -> dict[str, Array]:
        """Return one array per parameter, in the parameter's shape."""
        return {
            spec.name: line[start : start + spec.size * spec.seen_item_bytes]
            .view(array_dtype(spec.dtype))
            .reshape(spec.shape)
            for spec, start in zip(self._plan.parameters, self._starts, strict=True)
        }

    def gradient_memory(self) -> dict[str, Array]:
        """Return an array for each parameter's gradient, which pservers on the same host read in place.

        Raises:
            UnavailableError: this system does not support shared memory.
        """
        self.gradients = SharedMemory.create(bytes(NONCE_BYTES), self._line.size, "flightedl-gradients")
        return self._arrays_in(self.gradients.values)

    def nbytes(self, blocks: range) -> int:
        return self._bounds[blocks[-1]][1] - self._bounds[blocks[0]][0]

    def sent_bytes(self, blocks: range) -> int:
        """Return the bytes of adjacent blocks' values as they are sent."""
        return self.nbytes(blocks) // 2 if self._halves_of(blocks) else self.nbytes(blocks)

    def _halves_of(self, blocks: range) -> HalfKernels | None:
        """Return the converter for a run's blocks, or None if their values are sent unchanged."""
        return self._half if self._is_float32[self._parameters[blocks[0]]] else None

    def store(self, blocks: range, data: memoryview) -> None:
        """Store the values of adjacent blocks of a run. The values are adjacent both in the message and in the buffer.

        Raises:
            MessageError: the number of bytes is wrong.
        """
        start, end = self._bounds[blocks[0]][0], self._bounds[blocks[-1]][1]
        if self.stored is not None:
            self.stored.update(self._parameters[number] for number in blocks)
        halves = self._half and self._halves_of(blocks)
        if end - start != (2 * len(data) if halves else len(data)):
            raise MessageError(f"{len(data)} bytes arrived for {blocks}")
        if self.lending is not None:
            self._show(self.lending, blocks, _widened(data, halves))
            return
        if halves is None and end - start <= _FEW_BYTES:
            self._line.data[start:end] = data
            return
        target = self._line[start:end]
        if halves is not None:
            halves.to_float32(np.frombuffer(data, np.uint16), target.view(np.float32))
        else:
            copy_past_cache(target, np.frombuffer(data, np.uint8))

    def lend_to(self, show: Show) -> None:
        """Show the current values, and show new values as they arrive instead of storing them."""
        lending = Lending(show)
        if self.lending is None:
            for name, view in self.views.items():
                lending.show(name, 0, view.reshape(-1).view(np.uint8).data, self.dtypes[name])
            lending.require()
            self.views, self._line = {}, np.empty(0, np.uint8)
        self.lending = lending

    @property
    def is_lent(self) -> bool:
        """True if values are shown instead of being stored."""
        return self.lending is not None

    def _show(self, lending: Lending, blocks: range, data: memoryview) -> None:
        first = place = self._bounds[blocks[0]][0]
        for parameter, numbers in groupby(blocks, self._parameters.__getitem__):
            mine = list(numbers)
            end = self._bounds[mine[-1]][1]
            name = self._names[parameter]
            lending.show(name, self._blocks[mine[0]].start, data[place - first : end - first], self.dtypes[name])
            place = end

    def outgoing(self, gradient: Array, blocks: range, part: range) -> Array:
        """Return ``part`` of the (n,) gradient of adjacent blocks, as it is sent."""
        if part != blocks:
            bounds, item_bytes = self._bounds, self.nbytes(blocks) // gradient.size
            first = bounds[blocks[0]][0]
            start, end = bounds[part[0]][0] - first, bounds[part[-1]][1] - first
            gradient = gradient[start // item_bytes : end // item_bytes]
        if self._half is None or gradient.dtype != np.float32:
            return gradient
        bits = np.empty(gradient.size, np.uint16)
        self._half.to_half(cast("npt.NDArray[np.float32]", gradient), bits)
        return bits


def _widened(data: memoryview, halves: HalfKernels | None) -> memoryview:
    if halves is None:
        return data
    wide = np.empty(len(data) // 2, np.float32)
    halves.to_float32(np.frombuffer(data, np.uint16), wide)
    return wide.data.cast("B")


def _places_in_line(plan: ShardPlan) -> tuple[list[int], int]:
    """Return the byte offset of each parameter in a buffer of all parameters, in declared order, and its size.

    Consecutive parameters of the same dtype are stored without a gap, so the values of a message are contiguous.
    """
    starts: list[int] = []
    end = 0
    dtype = ""
    for spec in plan.parameters:
        if spec.dtype != dtype:
            end, dtype = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, spec.dtype
        starts.append(end)
        end += spec.size * spec.seen_item_bytes
    return starts, end


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
