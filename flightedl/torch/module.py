"""The tensors of a module that are declared, by name: parameters, and buffers that training changes.

* Names are those in the original module, without prefixes that wrappers add (``torch.compile``,
  ``DistributedDataParallel``). A shared parameter is declared under the first of its names.
* Parameters of 16 to 64-bit floats are declared, including frozen parameters, because they may be unfrozen during the
  job. Frozen parameters of other types are left alone, and so are parameters and buffers without elements.
* Rows of tables are not declared as parameters; see ``rows``.
* The declared buffers are those in the ``state_dict``; see ``buffers``. Others keep the module's own values.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flightedl.errors import UsageError
from flightedl.torch.rows import OnTable

#: Types of parameters that servers train.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_COMPILED = "_orig_mod"


@dataclass(frozen=True, slots=True)
class Place:
    """The attribute of a module that holds a tensor."""

    owner: nn.Module
    attribute: str
    tensor: torch.Tensor

    @property
    def current(self) -> torch.Tensor | None:
        """The tensor that the attribute has now. Scripts may assign another one, and ``module.to`` does for buffers."""
        return self.owner._parameters.get(self.attribute, self.owner._buffers.get(self.attribute))

    @property
    def is_dense(self) -> bool:
        """False if the tensor is sparse, or uses the same memory for several elements."""
        return self.tensor.layout == torch.strided and all(
            size <= 1 or step > 0 for size, step in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )

    @property
    def memory(self) -> npt.NDArray[np.void]:
        """An array at the place of the tensor's elements, which must not be read: it may be on a device."""
        tensor = self.tensor
        strides = tuple(step * tensor.itemsize for step in tensor.stride())
        known = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides, "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__={**known, "typestr": f"|V{tensor.itemsize}"}))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module without its wrappers."""
    while True:
        if isinstance(module, _WRAPPERS):
            module = module.module
        elif _COMPILED in module._modules:
            module = module._modules[_COMPILED]
        else:
            return module


def parameters_of(module: nn.Module) -> dict[str, Place]:
    """Return all trainable parameters as a dict from name to parameter.

    Raises:
        UsageError: the module cannot be trained on the servers.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"the first argument is {module!r:.80}, but must be the module to train: Optimizer(net, ...)")
    for prefix, owner in _modules(module, once=True):
        if type(owner).get_extra_state is not nn.Module.get_extra_state and owner.get_extra_state() is not None:
            raise UsageError(
                f"module {prefix.removesuffix('.')!r} has extra state, which servers do not keep: register it as a "
                "buffer, or let get_extra_state return None"
            )
    found: dict[str, Place] = {}
    for name, place in _walk(module, "_parameters"):
        if isinstance(place.owner, OnTable):
            continue
        _require_plain("parameter", name, place)
        if place.tensor.dtype in FLOATS and place.is_dense and place.tensor.numel():
            found[name] = place
    if not found and not embeddings_of(module):
        raise UsageError("this module has no floating-point parameters, so there is nothing to train")
    return found


def embeddings_of(module: nn.Module) -> dict[str, OnTable]:
    """Return all embeddings whose rows are stored in tables, as a dict from name to module."""
    found = {prefix.removesuffix("."): owner for prefix, owner in _modules(module, once=True)}
    return {name: owner for name, owner in found.items() if isinstance(owner, OnTable)}


def buffers_of(module: nn.Module) -> dict[str, Place]:
    """Return all buffers in the ``state_dict``, as a dict from name to buffer. Raises the same errors."""
    found: dict[str, Place] = {}
    for name, place in _walk(module, "_buffers"):
        if place.attribute not in place.owner._non_persistent_buffers_set:
            _require_plain("buffer", name, place)
            if place.tensor.numel():
                found[name] = place
    return found


def undeclared(module: nn.Module, declared: Container[str]) -> dict[str, torch.Tensor]:
    """Return the parameters that are not declared, because of their type or because they have no elements."""
    found = {name: place for name, place in _walk(module, "_parameters") if name not in declared}
    return {name: place.tensor for name, place in found.items() if not isinstance(place.owner, OnTable)}


def require_separate(parameters: Mapping[str, Place], buffers: Mapping[str, Place]) -> None:
    """Raise UsageError if a parameter shares elements with another tensor: the servers would keep both separately."""
    places = {**parameters, **buffers}
    by_memory: dict[int, list[str]] = {}
    for name, place in places.items():
        if type(place.tensor.data) is torch.Tensor:
            by_memory.setdefault(place.tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_memory.values():
        for first, second in combinations(names, 2):
            if first in parameters and np.shares_memory(places[first].memory, places[second].memory):
                raise UsageError(
                    f"{first!r} and {second!r} share memory, so their updates would overwrite each other: use the same "
                    "nn.Parameter in both places, or give one of them a copy with .clone()"
                )


def names_of(module: nn.Module) -> dict[str, str]:
    """Return the declared name for every name of a parameter or buffer. Tied ones have several names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for prefix, owner in _modules(module, once=False):
        for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                name = prefix + attribute
                names[name] = first.setdefault(id(tensor), name)
    return names


def _walk(module: nn.Module, kind: str) -> Iterator[tuple[str, Place]]:
    seen: set[int] = set()
    for prefix, owner in _modules(module, once=True):
        for attribute, tensor in getattr(owner, kind).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + attribute, Place(owner, attribute, tensor)


def _modules(module: nn.Module, *, once: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with the prefix of their members' names, like ``named_modules``, without wrappers' prefixes."""
    for name, owner in unwrapped(module).named_modules(remove_duplicate=once):
        parts = [part for part in name.split(".") if part and part != _COMPILED]
        yield "".join(f"{part}." for part in parts), owner


def _require_plain(kind: str, name: str, place: Place) -> None:
    tensor, what, is_buffer = place.tensor, f"{kind} {name!r}", kind == "buffer"
    kind = type(tensor).__name__
    if isinstance(place.owner, nn.Embedding | nn.EmbeddingBag) and place.owner.max_norm is not None:
        raise UsageError(
            f"the embedding of {name!r} has max_norm, so each trainer would change its rows on its own: use a table, "
            "fe.torch.Embedding(job.table(...), max_norm=...), or omit max_norm"
        )
    if kind in ("DTensor", "FlatParameter") or hasattr(tensor, "_local_tensor"):
        raise UsageError(
            f"{what} is sharded over processes ({kind}): FSDP and tensor parallelism cannot be combined "
            "with parameter servers, which shard the model themselves; pass the unsharded module"
        )
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise UsageError(f"{what} has no shape yet: run the module on one batch before declaring it")
    if tensor.device.type == "meta":
        raise UsageError(f"{what} has no values (it is on the meta device): initialize it first")
    if is_buffer and (not place.is_dense or tensor.is_complex() or tensor.is_quantized):
        raise UsageError(f"{what} is complex, sparse or expanded: make it a dense real tensor, or non-persistent")
    layout = tensor.layout if tensor.layout != torch.strided or place.is_dense else "expanded"
    if tensor.requires_grad and not (is_buffer or (place.is_dense and tensor.dtype in FLOATS)):
        raise UsageError(
            f"{what} has type {tensor.dtype} and layout {layout}, which servers cannot train: make it a dense "
            "real tensor of 16 bits or more, or freeze it with requires_grad_(False)"
        )
