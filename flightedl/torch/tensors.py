"""Conversion between tensors and NumPy arrays, without copying where possible.

NumPy has no bfloat16, so bfloat16 tensors are passed as their bits. Tensors on an accelerator are copied to pinned
memory on a separate stream; all copies are started before waiting once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from flightedl.errors import UsageError
from flightedl.kernels.half_precision import array_dtype

Array = npt.NDArray[Any]
_BITS = {torch.bfloat16: torch.int16}


def array_of(tensor: torch.Tensor) -> Array:
    """Return the elements of a CPU tensor as an array of the same shape, without copying if the tensor is dense."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.coalesce().to_dense() if plain.layout == torch.sparse_coo else plain.to_dense()
    plain = plain.resolve_conj().resolve_neg()
    if plain.dtype in _BITS:
        bits: Array = plain.contiguous().view(_BITS[plain.dtype]).numpy()
        return bits.view(array_dtype("bfloat16"))
    array: Array = plain.numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory. Do not write to it if the array is read-only."""
    with warnings.catch_warnings():
        # PyTorch has no read-only tensors, so it warns about read-only arrays. No code here writes to them.
        warnings.simplefilter("ignore", UserWarning)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def bind(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Move a parameter into the memory of ``values``, unless the move could be observed.

    A parameter keeps its own memory if it is on a device, has different strides or another dtype, or shares its memory
    with another tensor or array, which would not move with it.
    """
    if (
        tensor.device.type == "cpu"
        and (tensor.dtype, tensor.shape, tensor.stride()) == (values.dtype, values.shape, values.stride())
        and type(tensor.data) is torch.Tensor
        and not tensor.is_shared()
        and is_sole_owner(tensor)
    ):
        tensor.data = values


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """True if, as far as PyTorch knows, nothing else uses the tensor's memory."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # The tensor holds one reference, and this function holds another.
    return count is not None and count(tensor.untyped_storage()._cdata) <= 2


def is_bound(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """True if the parameter still uses the memory of ``values``. ``module.to(device)`` may have moved it."""
    return (
        tensor.layout == torch.strided
        and tensor.data_ptr() == values.data_ptr()
        and (tensor.dtype, tensor.shape, tensor.stride()) == (values.dtype, values.shape, values.stride())
    )


def fingerprint(values: torch.Tensor) -> int:
    """Return a 64-bit hash of contiguous values. Different values collide with a probability of 2**-64."""
    return xxhash.xxh3_64_intdigest(array_of(values).reshape(-1).view(np.uint8).data)


class Copies:
    """Copies gradients to main memory."""

    def __init__(self) -> None:
        #: Name -> pinned memory.
        self._kept: dict[str, torch.Tensor] = {}
        self._stream: Any = None

    def arrays(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        """Return each tensor as an array. Arrays from accelerators are valid until the next call.

        Raises:
            UsageError: a device cannot be read, for example after a device error.
        """
        found = {name: tensor.detach() for name, tensor in tensors.items()}
        away = {name: tensor for name, tensor in found.items() if tensor.device.type != "cpu"}
        for name, tensor in away.items():
            try:
                found[name] = self._copied(name, tensor)
            except RuntimeError as error:
                raise _unreadable(name, tensor, error) from None
        if self._stream is not None:
            try:
                self._stream.synchronize()
            except RuntimeError as error:
                name = next(iter(away), "")
                raise _unreadable(name, tensors[name], error) from None
        return {name: array_of(tensor) for name, tensor in found.items()}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda" or tensor.layout != torch.strided:
            return tensor.to("cpu")
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            # Users may have set another default device.
            kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        if self._stream is None or self._stream.device != tensor.device:
            if self._stream is not None:
                self._stream.synchronize()
            self._stream = torch.cuda.Stream(tensor.device)
        # The copy must wait until the gradient has been computed.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return kept


def _unreadable(name: str, tensor: torch.Tensor, error: RuntimeError) -> UsageError:
    reason = (str(error).splitlines() or [""])[0]
    return UsageError(
        f"cannot read the gradient of {name!r} from {tensor.device}: {reason:.160}; restart this trainer, the others "
        "continue without it"
    )
