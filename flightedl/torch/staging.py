"""Stage gradients: ``backward`` moves each gradient to the memory from which it is sent.

A pserver on the same host maps that memory, so ``step`` need not copy the gradient. ``parameter.grad`` refers to this
memory as well, so changes to the gradient before the step (by clipping, a scaler, or a second backward pass) also
change the sent values. The write counters of tensors do not detect changes by ``GradScaler`` or through ``.data``.

A gradient is not moved if anything else refers to its tensor, to its memory, or to the memory for sending, because the
move would then be visible. Gradients on an accelerator, with another layout, or with a graph are not moved either.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial

import torch

from flightedl.torch.module import Place
from flightedl.torch.tensors import Array, is_bound, is_sole_owner, tensor_of


class Staging:
    """Hooks on the parameters of a module. The hooks do nothing once this object has been deleted.

    Args:
        places: The parameters by name.
        memory: Array for the gradient of each parameter, in its shape. Parameters without an array are not staged.
    """

    def __init__(self, places: Mapping[str, Place], memory: Mapping[str, Array]) -> None:
        self._memory = memory
        self._homes = {name: tensor_of(memory[name]) for name in places if name in memory}
        own = weakref.ref(self)

        def stage(name: str, parameter: torch.Tensor) -> None:
            if (staging := own()) is not None:
                staging._stage(parameter, staging._homes[name])

        for name in self._homes:
            if places[name].tensor.requires_grad:
                places[name].tensor.register_post_accumulate_grad_hook(partial(stage, name))

    def staged(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        """Return the arrays of the staged gradients. All of them are views of one block of memory."""
        return {
            name: self._memory[name]
            for name, gradient in gradients.items()
            if (home := self._homes.get(name)) is not None and is_bound(gradient, home)
        }

    def _stage(self, parameter: torch.Tensor, home: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not _is_movable(gradient, home):
            return
        with torch.no_grad():
            # Each gradient is a new tensor. If the user keeps a previous gradient, that also refers to ``home``; see
            # below.
            parameter.grad = home.detach().copy_(gradient)
        before = weakref.ref(gradient)
        del gradient
        if (kept := before()) is not None:
            parameter.grad = kept


def _is_movable(gradient: torch.Tensor, home: torch.Tensor) -> bool:
    return (
        gradient.device.type == "cpu"
        and not is_bound(gradient, home)
        and type(gradient) is torch.Tensor
        and not gradient.requires_grad
        and gradient.layout == torch.strided
        and (gradient.dtype, gradient.shape, gradient.stride()) == (home.dtype, home.shape, home.stride())
        and is_sole_owner(gradient)
        and is_sole_owner(home)
    )
