"""Local SGD with an optimizer on the servers (DiLoCo, arXiv 2311.08105).

Each trainer trains the module with an optimizer of its own, the *inner* one, for ``every`` steps. The difference
between the job's values and the module's then counts as one gradient for the servers' optimizer, the *outer* one, and
the module gets the job's new values. So values are exchanged ``every`` times less often than with ``Optimizer``.

The unit that counts once is the *outer batch* of ``every`` batches: it is handed out, pushed, refused and repeated as
one (``client.data.slices``). The state of the inner optimizer belongs to the trainer and ends with it. A trainer that
joins begins with the job's values. The only copy of these that a trainer keeps is the one in ``model``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from flightedl.client.model.parameters import Parameters
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.optimizers import Optimizer as Rule
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.errors import UsageError
from flightedl.torch.buffers import Buffers
from flightedl.torch.groups import chosen, with_overrides
from flightedl.torch.module import buffers_of, embeddings_of, parameters_of, require_separate
from flightedl.torch.tensors import Array, Copies, tensor_of

if TYPE_CHECKING:
    from flightedl.client.session import Job


class DiLoCo:
    """Exchanges a module's values with the job after every so many steps of a local optimizer.

    Must be made before ``job.dataset``, whose batches become slices of outer batches.

    Args:
        module: The module to train. Its parameters, including frozen ones, and its buffers are declared.
        job: The result of ``fe.connect()``.
        inner: The optimizer that trains the module, such as ``torch.optim.AdamW(net.parameters())``.
        every: Number of batches, and calls of ``step``, between two exchanges.
        outer: The servers' optimizer. The paper uses ``fe.Momentum(lr=0.7, momentum=0.9, nesterov=True)``;
            ``fe.SGD(lr=1.0)`` takes the mean of the trainers' values.
        mode: As in ``job.parameters``. In a round, differences count with their numbers of records.
        wire: As in ``job.parameters``.
        error_feedback: As in ``job.parameters``.

    Raises:
        UsageError: the servers cannot train the module in this way. The message suggests a remedy.
        DeclarationError: the job has already declared a different model.
    """

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        inner: torch.optim.Optimizer,
        *,
        every: int,
        outer: Rule | str,
        mode: Mode | str | None = None,
        wire: str = "",
        error_feedback: bool = False,
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer) or hasattr(inner, "model"):
            raise UsageError("inner must be an optimizer of PyTorch, which trains the module between exchanges")
        if embeddings_of(module):
            raise UsageError(
                "the module has embeddings on tables, whose rows have no local copy: use fe.torch.Optimizer for it"
            )
        self._places = parameters_of(module)
        self._buffers = Buffers(buffers := buffers_of(module))
        require_separate(self._places, buffers)
        self._names = {id(place.tensor): name for name, place in self._places.items()}
        self._inner = inner
        self._copies = Copies()
        self._trained()
        first = Copies().arrays({name: place.tensor for name, place in self._places.items()}) | self._buffers.known
        rule = with_overrides(chosen(outer), self._buffers.rules)
        #: The job's values by name, as returned by ``job.parameters``.
        self.model: Parameters = job.parameters(
            first, optimizer=rule, mode=mode, wire=wire, error_feedback=error_feedback, local_steps=every
        )
        assert self.model.slices is not None, "the model was declared with local steps"
        self._slices = self.model.slices
        #: Parameter -> PyTorch's write counter when the parameter last had the job's values.
        self._written: dict[str, int] = {}
        self.values_arrived(list(self.model))
        self.model.listen(self)
        self._memory = self.model.gradient_memory()

    @property
    def inner_step(self) -> int:
        """Number of inner steps before the current one, for schedules of the inner optimizer's learning rate.

        A trainer that joins continues the count, which goes by the updates of the job's values: in synchronous modes,
        by rounds; in asynchronous ones, by the pushes of all trainers.
        """
        return max(self.model.steps.versions.values()) * self._slices.every + self._slices.number

    def step(self) -> bool:
        """Record a step of the inner optimizer. After the last step on an outer batch, push the difference, then pull.

        Returns:
            True if the module now has new values of the job.

        Raises:
            GradientError: a value is not finite. Nothing was sent. The loop repeats the outer batch.
            UsageError: no batch is current, or the inner optimizer trains other tensors than the module's.
            UnavailableError: for the same reasons as ``model.step``.
        """
        if self.model.current_batch is None:
            raise UsageError("there is no current batch: call step inside the loop over the batches, after each one")
        if self._slices.are_open:
            return False
        known = self._buffers.known
        try:
            self.model.step(self._differences() | self._buffers.changes())
        except BaseException:
            self._buffers.known = known
            raise
        return True

    def _trained(self) -> dict[str, torch.Tensor]:
        """Return the parameters that the inner optimizer trains now. Raises UsageError if it trains other tensors."""
        found: dict[str, torch.Tensor] = {}
        for group in self._inner.param_groups:
            for tensor in group["params"]:
                name = self._names.get(id(tensor))
                if name is None:
                    raise UsageError(
                        "the inner optimizer trains a tensor that is no parameter of the module: make it from "
                        "module.parameters(), after the module is complete and on its device"
                    )
                found[name] = tensor
        return found

    def _differences(self) -> dict[str, Array]:
        arrays = self._copies.arrays(self._trained())
        return {name: np.subtract(self.model[name], now, out=self._memory.get(name)) for name, now in arrays.items()}

    # called by the job

    def values_arrived(self, names: Collection[str]) -> None:
        with torch.no_grad():
            for name in names:
                values = tensor_of(self.model[name])
                if name in self._places:
                    tensor = self._places[name].tensor
                    tensor.copy_(values)
                    self._written[name] = tensor._version
                else:
                    self._buffers.arrived(name, values)

    def batch_ends(self, current: CurrentBatch) -> None:
        """Begin an outer batch that will be repeated with the job's values. Raises UsageError if it was not pushed."""
        if current.is_undone:
            self.values_arrived(list(self.model))
        elif not current.has_gradient and any(
            place.tensor._version != self._written[name] for name, place in self._places.items()
        ):
            raise UsageError(
                f"the local steps on {current} were not pushed, and the batch would count as done without them: call "
                "step() of fe.torch.DiLoCo after each batch, before the next one is requested"
            )
