"""The buffers of a module: trainers push their changes, and the servers keep the values.

* For floating-point buffers and for integers with one element, which count batches, the servers add the mean change.
* Other integers and bools get the values after the batch with the highest identity in the round, or of the last push.
* A floating-point buffer that is declared with an infinity gets the mean of new values, as infinities have no changes.

The servers store all but finite floats as float64: whole numbers up to 2**53, and its largest number for infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flightedl.domain.model.optimizers import Delta
from flightedl.errors import UsageError
from flightedl.torch.module import FLOATS, Place
from flightedl.torch.tensors import Array, array_of

_LARGEST, _LARGEST_WHOLE = np.finfo(np.float64).max, 2**53


class Buffers:
    """The declared buffers, by name. Raises UsageError if the servers cannot store their values."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self.rules = {name: _rule_of(place.tensor) for name, place in places.items()}
        #: Buffer -> its values when they last arrived or were last pushed, as the servers store them.
        self.known: dict[str, Array] = {}
        for name, place in places.items():
            is_own = place.tensor.dtype in FLOATS and not self.rules[name].assign
            self.known[name] = _stored(name, place.tensor, None if is_own else np.float64)
            if np.isnan(self.known[name]).any():
                raise UsageError(f"buffer {name!r} has NaN, which servers cannot keep: initialize it first")

    def changes(self) -> dict[str, Array]:
        """Return what to push for each changed buffer. Raises UsageError if the servers cannot store its values."""
        found: dict[str, Array] = {}
        known = dict(self.known)
        for name, place in self._places.items():
            # PyTorch's kernels do not increment the write counter when they update running statistics.
            given, tensor = self.known[name], place.current
            if tensor is None or tensor.shape != given.shape:
                raise UsageError(f"buffer {name!r} no longer has the declared shape {given.shape}: give it this shape")
            now = _stored(name, tensor, given.dtype)
            if (now != given).any():
                found[name] = now if self.rules[name].assign else np.asarray(now - given, given.dtype)
                known[name] = now
        self.known = known
        return found

    def arrived(self, name: str, values: torch.Tensor) -> None:
        tensor = self._places[name].current
        if tensor is not None and tensor.shape == values.shape:
            self.known[name] = _stored(name, write(tensor, values), self.known[name].dtype)


def write(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write stored values to a parameter or buffer of the same shape. Return them in its dtype."""
    if values.dtype == torch.float64:
        # The mean of an infinity and a finite number is infinite.
        values = torch.where(values.abs() > 1e300, values * torch.inf, values)
    made = (values if tensor.is_floating_point() else values.round()).to(tensor.dtype)
    tensor.copy_(made)
    return made


def _rule_of(tensor: torch.Tensor) -> Delta:
    if tensor.dtype in FLOATS:
        return Delta(assign="mean") if bool(tensor.isinf().any()) else Delta()
    is_counter = tensor.numel() == 1 and tensor.dtype != torch.bool and not tensor.is_floating_point()
    return Delta() if is_counter else Delta(assign="latest")


def _stored(name: str, tensor: torch.Tensor, dtype: Any) -> Array:
    """Return a copy of a buffer's values as the servers store them. ``dtype`` is None for the buffer's own."""
    is_eight_bits = tensor.is_floating_point() and tensor.dtype not in FLOATS
    array = array_of((tensor.float() if is_eight_bits else tensor).detach().cpu())
    if array.dtype.kind in "iu" and not -_LARGEST_WHOLE <= int(array.min()) <= int(array.max()) <= _LARGEST_WHOLE:
        raise UsageError(f"buffer {name!r} has whole numbers beyond 2**53, which servers cannot keep exactly")
    found = np.array(array, dtype or array.dtype)
    return np.clip(found, -_LARGEST, _LARGEST) if found.dtype == np.float64 else found
