"""The tensors of a module that are declared, by name: parameters, and buffers that training changes.

* Names are those in the original module, without prefixes that wrappers add (``torch.compile``,
  ``DistributedDataParallel``). A shared parameter is declared under the first of its names.
* All floating-point parameters are declared, including frozen parameters, because they may be unfrozen during the job.
* Rows of tables are not declared as parameters; see ``rows``.
* The declared buffers are persistent floating-point buffers, which are part of ``state_dict``, and integer counters
  with one element, which the servers store as float64 (exact up to 2**53). All other buffers, such as masks and
  positions, keep the module's own values, and so do non-finite buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from flightedl.errors import UsageError
from flightedl.torch.rows import OnTable

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_COMPILED = "_orig_mod"


@dataclass(frozen=True, slots=True)
class Place:
    """The attribute of a module that holds a tensor."""

    owner: nn.Module
    attribute: str
    tensor: torch.Tensor

    @property
    def is_current(self) -> bool:
        """False if the attribute has been assigned another tensor."""
        found = self.owner._parameters.get(self.attribute, self.owner._buffers.get(self.attribute))
        return found is self.tensor


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
    found: dict[str, Place] = {}
    for name, place in _walk(module, "_parameters"):
        if isinstance(place.owner, OnTable):
            continue
        _require_plain(name, place)
        if place.tensor.is_floating_point() and place.tensor.numel():
            found[name] = place
    if not found and not embeddings_of(module):
        raise UsageError("this module has no floating-point parameters, so there is nothing to train")
    return found


def embeddings_of(module: nn.Module) -> dict[str, OnTable]:
    """Return all embeddings whose rows are stored in tables, as a dict from name to module."""
    found = {prefix.removesuffix("."): owner for prefix, owner in _modules(module, once=True)}
    return {name: owner for name, owner in found.items() if isinstance(owner, OnTable)}


def buffers_of(module: nn.Module) -> dict[str, Place]:
    """Return all buffers that training changes, as a dict from name to buffer."""
    found: dict[str, Place] = {}
    for name, place in _walk(module, "_buffers"):
        tensor = place.tensor
        if place.attribute in place.owner._non_persistent_buffers_set or tensor.device.type == "meta":
            continue
        is_counter = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
        if (is_counter and tensor.numel() == 1) or (
            tensor.is_floating_point() and tensor.numel() and bool(torch.isfinite(tensor).all())
        ):
            found[name] = place
    return found


def names_of(module: nn.Module) -> dict[str, str]:
    """Return the declared name for every name of a parameter. Tied parameters have several names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for prefix, owner in _modules(module, once=False):
        for attribute, tensor in owner._parameters.items():
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


def _require_plain(name: str, place: Place) -> None:
    tensor, kind = place.tensor, type(place.tensor).__name__
    if isinstance(place.owner, nn.Embedding | nn.EmbeddingBag) and place.owner.max_norm is not None:
        raise UsageError(
            f"the embedding of {name!r} has max_norm, so each trainer would change its rows on its own: use a table, "
            "fe.torch.Embedding(job.table(...), max_norm=...), or omit max_norm"
        )
    if kind in ("DTensor", "FlatParameter") or hasattr(tensor, "_local_tensor"):
        raise UsageError(
            f"parameter {name!r} is sharded over processes ({kind}): FSDP and tensor parallelism cannot be combined "
            "with parameter servers, which shard the model themselves; pass the unsharded module"
        )
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise UsageError(f"parameter {name!r} has no shape yet: run the module on one batch before declaring it")
    if tensor.device.type == "meta":
        raise UsageError(f"parameter {name!r} has no values (it is on the meta device): initialize it first")
