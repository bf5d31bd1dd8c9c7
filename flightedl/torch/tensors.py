"""Tensors as NumPy arrays and back, where possible without a copy.

NumPy has no bfloat16 of its own: such tensors pass as their bits. What lies on an accelerator is copied to pinned
memory on a stream of its own, all of it at once, and waited for once.
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
    """The elements of a tensor of the main memory, as (shape of the tensor), without a copy where it is dense."""
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
    """A tensor of the same memory; it must not be written to where the array is read-only."""
    with warnings.catch_warnings():
        # PyTorch has no tensors that cannot be written to. Nothing here writes to one.
        warnings.simplefilter("ignore", UserWarning)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def bind(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a parameter lie in the memory of these values, where nobody can see a difference.

    A parameter stays where it is if it lies on a device, has other strides or another type, or if some other tensor or
    array lies in its memory, too: that one would stay behind.
    """
    if (
        tensor.device.type == "cpu"
        and (tensor.dtype, tensor.shape, tensor.stride()) == (values.dtype, values.shape, values.stride())
        and type(tensor.data) is torch.Tensor
        and not tensor.is_shared()
        and _is_alone(tensor)
    ):
        tensor.data = values


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else lies in a tensor's memory, as far as PyTorch can say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # The tensor has its storage, and so has this function.
    return count is not None and count(tensor.untyped_storage()._cdata) <= 2


def is_bound(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a parameter lies in the memory of these values: it does not after ``module.to(device)``, for example."""
    return (
        tensor.layout == torch.strided
        and tensor.data_ptr() == values.data_ptr()
        and (tensor.dtype, tensor.shape, tensor.stride()) == (values.dtype, values.shape, values.stride())
    )


def fingerprint(values: torch.Tensor) -> int:
    """64 bits of contiguous values, which others share with a probability of 2**-64."""
    return xxhash.xxh3_64_intdigest(array_of(values).reshape(-1).view(np.uint8).data)


class Copies:
    """Gradients in the main memory."""

    def __init__(self) -> None:
        #: Pinned, by name.
        self._kept: dict[str, torch.Tensor] = {}
        self._stream: Any = None

    def arrays(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        """Each tensor as an array; those of accelerators are valid until the next call.

        Raises:
            UsageError: a device cannot be read, as after an error of its own.
        """
        found = {name: tensor.detach() for name, tensor in tensors.items()}
        away = {name: tensor for name, tensor in found.items() if tensor.device.type != "cpu"}
        for name, tensor in away.items():
            try:
                found[name] = self._copied(name, tensor)
            except RuntimeError as error:
                raise _gone(name, tensor, error) from None
        if self._stream is not None:
            try:
                self._stream.synchronize()
            except RuntimeError as error:
                name = next(iter(away), "")
                raise _gone(name, tensors[name], error) from None
        return {name: array_of(tensor) for name, tensor in found.items()}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda" or tensor.layout != torch.strided:
            return tensor.to("cpu")
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self._stream is None or self._stream.device != tensor.device:
            if self._stream is not None:
                self._stream.synchronize()
            self._stream = torch.cuda.Stream(tensor.device)
        # What is to be copied has to be computed first.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return kept


def _gone(name: str, tensor: torch.Tensor, error: RuntimeError) -> UsageError:
    reason = (str(error).splitlines() or [""])[0]
    return UsageError(
        f"the gradient of {name!r} cannot be read from {tensor.device}: {reason:.160}; start this trainer again, the "
        "others go on without it"
    )
