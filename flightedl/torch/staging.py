"""Staging of gradients: ``backward`` moves each gradient to the memory from which it is sent.

A pserver on the same host maps that memory, so ``step`` need not copy the gradient there. ``parameter.grad`` refers to
it, too. Whatever changes the gradient before the step (clipping, a scaler, a second backward pass) therefore changes
the sent values. Versions of tensors do not show such changes if ``GradScaler`` or writes through ``.data`` make them.

A gradient is not moved if anything else refers to its tensor, to its memory or to the memory for sending, because the
move would be visible. Nor are gradients on an accelerator, with another layout, or with a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from flightedl.torch.module import Place
from flightedl.torch.tensors import Array, is_bound, is_sole_owner, tensor_of


class Staging:
    """Hooks on the parameters of a module. They do nothing after this object is deleted.

    Args:
        places: The parameters by name.
        memory: An array for the gradient of each parameter, of its shape; parameters without one are not staged.
    """

    def __init__(self, places: Mapping[str, Place], memory: Mapping[str, Array]) -> None:
        self._homes = {id(place.tensor): tensor_of(memory[name]) for name, place in places.items() if name in memory}
        own = weakref.ref(self)

        def stage(parameter: torch.Tensor) -> None:
            if (staging := own()) is not None:
                staging._stage(parameter)

        for place in places.values():
            if place.tensor.requires_grad and id(place.tensor) in self._homes:
                place.tensor.register_post_accumulate_grad_hook(stage)

    def _stage(self, parameter: torch.Tensor) -> None:
        gradient, home = parameter.grad, self._homes[id(parameter)]
        if gradient is None or not _is_movable(gradient, home):
            return
        with torch.no_grad():
            # Each gradient is a new tensor. If the user keeps an earlier one, ``home`` has another owner, see below.
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
