"""What of a module the job has: its parameters and the buffers that training changes, by name.

* Names are those of the module as it was written: wrappers (``torch.compile``, ``DistributedDataParallel``) add
  prefixes, which are left out. A parameter that is used twice has the first of its names.
* All floating-point parameters are declared, frozen ones too: they may be thawed while the job runs.
* Rows of tables are no parameters: see ``rows``.
* Of buffers, floating-point ones that a ``state_dict`` has are declared, and integers of one element, which count:
  the servers keep these as float64, which is exact up to 2**53. Other buffers, such as masks and positions, and
  those that are not finite, stay what the module made them.
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
    """Where a module has a tensor."""

    owner: nn.Module
    attribute: str
    tensor: torch.Tensor

    @property
    def is_still_there(self) -> bool:
        """Whether nobody has put another tensor into its place."""
        found = self.owner._parameters.get(self.attribute, self.owner._buffers.get(self.attribute))
        return found is self.tensor


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, without what was put around it."""
    while True:
        if isinstance(module, _WRAPPERS):
            module = module.module
        elif _COMPILED in module._modules:
            module = module._modules[_COMPILED]
        else:
            return module


def parameters_of(module: nn.Module) -> dict[str, Place]:
    """Name -> parameter, of all that can be trained.

    Raises:
        UsageError: it is nothing that can be trained on servers.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"the first argument is {module!r:.80}, but must be the module to train, as in Optimizer(net)")
    found: dict[str, Place] = {}
    for name, place in _walk(module, "_parameters"):
        if isinstance(place.owner, OnTable):
            continue
        _require_plain(name, place)
        if place.tensor.is_floating_point() and place.tensor.numel():
            found[name] = place
    if not found and not embeddings_of(module):
        raise UsageError("this module has no floating-point parameters: there is nothing to train")
    return found


def embeddings_of(module: nn.Module) -> dict[str, OnTable]:
    """Name -> what lies in tables."""
    found = {prefix.removesuffix("."): owner for prefix, owner in _modules(module, once=True)}
    return {name: owner for name, owner in found.items() if isinstance(owner, OnTable)}


def buffers_of(module: nn.Module) -> dict[str, Place]:
    """Name -> buffer, of those that training changes."""
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
    """Every name of a parameter -> the one that it is declared with: tied ones have several."""
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
    """Each module with the prefix of what is in it, as ``named_modules`` but without the prefixes of wrappers."""
    for name, owner in unwrapped(module).named_modules(remove_duplicate=once):
        parts = [part for part in name.split(".") if part and part != _COMPILED]
        yield "".join(f"{part}." for part in parts), owner


def _require_plain(name: str, place: Place) -> None:
    tensor, kind = place.tensor, type(place.tensor).__name__
    if isinstance(place.owner, nn.Embedding | nn.EmbeddingBag) and place.owner.max_norm is not None:
        raise UsageError(
            f"the embedding of {name!r} has max_norm, and so writes to its rows in each trainer by itself: put it into "
            "a table, fe.torch.Embedding(job.table(...), max_norm=...), or leave max_norm out"
        )
    if kind in ("DTensor", "FlatParameter") or hasattr(tensor, "_local_tensor"):
        raise UsageError(
            f"parameter {name!r} is sharded over processes ({kind}): FSDP and tensor parallelism cannot be combined "
            "with parameter servers, which shard the model themselves; give the plain module"
        )
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise UsageError(f"parameter {name!r} has no shape yet: run the module on one batch before it is declared")
    if tensor.device.type == "meta":
        raise UsageError(f"parameter {name!r} has no values (it is on the meta device): initialize it first")
