"""The servers' optimizer as a ``torch.optim.Optimizer``, which pushes gradients and pulls values in place.

``step`` pushes all gradients with the identity of the current batch, and then pulls. New values arrive in a step, at
the end of a batch without a step, and when this trainer joins again. From then on, the module has these values, and
gradients count as computed from them.

A parameter in main memory is bound once, when the optimizer is created, to the memory in which its values arrive
(``bind``). For all other parameters and for buffers, values are copied in place.

* A gradient of None is not a gradient of zero: if no trainer has a gradient for a parameter in a round, the parameter's
  value and optimizer state do not change. A round's mean includes only trainers with a gradient, weighted by their
  numbers of records.
* The learning rate and all other settings are stored on the servers, and apply to the entire job. ``param_groups``
  shows them. Changing them there, as PyTorch's schedulers do, is an error.
* If other code writes to a parameter during a job, the next step fails, because other trainers would not get the new
  value. Writing the same values, or restoring them, is permitted.
* A step also pushes the changes that this trainer has made to buffers (``buffers``).
* Rows that embeddings have looked up in tables are parameters until the step (``rows``), which pushes their gradients.
* If gradients of the current batch have been computed but not pushed, requesting the next batch fails, because the
  batch would count as done without them.

Writes through ``.data`` may remain undetected. They are overwritten by the next values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from flightedl.client.model.parameters import Parameters
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.optimizers import Optimizer as Rule
from flightedl.domain.model.optimizers import exact
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.errors import GradientError, UsageError
from flightedl.torch.ahead import PrefetchDetector, Seen
from flightedl.torch.buffers import Buffers
from flightedl.torch.groups import ShownSettings, chosen, settings_in, shown, with_overrides
from flightedl.torch.module import buffers_of, embeddings_of, parameters_of, require_separate, undeclared
from flightedl.torch.rows import RowGroups
from flightedl.torch.staging import Staging
from flightedl.torch.tensors import Array, Copies, bind, fingerprint, is_bound, tensor_of

if TYPE_CHECKING:
    from flightedl.client.session import Job


class Optimizer(torch.optim.Optimizer):
    """Optimizer whose updates are computed on the job's servers.

    Args:
        module: The module to train. Its parameters, including frozen ones, and its buffers are declared.
        job: The result of ``fe.connect()``.
        optimizer: The rule, as in ``job.parameters``.
        mode: As in ``job.parameters``.
        groups: Parameter groups as in ``torch.optim``: dicts of ``params`` and settings. Parameters in no group are
            declared, but not trained until ``add_param_group`` adds them. None for one group of all parameters.
        wire: As in ``job.parameters``.
        error_feedback: As in ``job.parameters``.
        overlap_backward: True to copy gradients from main memory to memory that a pserver on the same host reads during
            ``backward`` instead of in ``step``. The results are the same.

    Raises:
        UsageError: the servers cannot train the module in this way. The message suggests a remedy.
        DeclarationError: the job has already declared a different model.
    """

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        optimizer: Rule | str,
        *,
        mode: Mode | str | None = None,
        groups: Iterable[Mapping[str, Any]] | None = None,
        wire: str = "",
        error_feedback: bool = False,
        overlap_backward: bool = False,
    ) -> None:
        self._places = parameters_of(module)
        self._rows = RowGroups(embeddings_of(module))
        self._names = {id(place.tensor): name for name, place in self._places.items()}
        self._undeclared = undeclared(module, self._places)
        self._buffers = Buffers(buffers := buffers_of(module))
        require_separate(self._places, buffers)
        given = self._given(groups)
        rule = chosen(optimizer)
        of_groups = [(settings_in(group, type(rule)), self._names_in(group["params"])) for group in given]
        rule = with_overrides(rule, {name: settings for settings, names in of_groups if settings for name in names})
        self._rule = with_overrides(rule, self._buffers.rules)
        self._model: Parameters | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        #: Tensor -> value of PyTorch's write counter when the tensor last had the job's values.
        self._written: dict[str, int] = {}
        #: Bound parameter -> hash of the job's values for it.
        self._prints: dict[str, int] = {}
        self._copies = Copies()
        self._pushed = Seen([])
        self._shown = ShownSettings()
        self._prefetch_detector = PrefetchDetector()
        super().__init__([{**group} for group in given], shown(self._rule))
        self._add_row_groups()
        # Some tools assume that an optimizer without state is unused, and run a trial step with it.
        for place in self._places.values():
            self.state[place.tensor] = {"version": torch.zeros((), device="cpu")}
        self._model = job.parameters(
            self._first_values(), optimizer=self._rule, mode=mode, wire=wire, error_feedback=error_feedback
        )
        self._require_own_tables()
        self._tensors = {name: tensor_of(self._model[name]) for name in self._model}
        for name, place in self._places.items():
            bind(place.tensor, self._tensors[name])
        self.values_arrived(list(self._tensors))
        self._pushed = Seen(self._gradients().values())
        self._model.listen(self)
        self._staging = Staging(self._places, self._model.gradient_memory()) if overlap_backward else None

    def _given(self, groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        if groups is None:
            return [{"params": [place.tensor for place in self._places.values()]}]
        given: list[dict[str, Any]] = []
        for group in groups:
            if not isinstance(group, Mapping) or "params" not in group:
                raise UsageError(f'groups has {group!r:.80}, but must have dicts such as {{"params": ..., "lr": 0.1}}')
            tensors = self._tensors_in(group)
            dense = self._without_rows(group, tensors)
            if dense or not tensors:
                given.append({**group, "params": dense})
        return given

    def _tensors_in(self, group: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the declared parameters and rows of a group, in which each parameter may be a tuple with its name."""
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        tensors = [each[-1] if isinstance(each, tuple) else each for each in params]
        return [tensor for tensor in tensors if all(tensor is not other for other in self._undeclared.values())]

    def _without_rows(self, group: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of a group, except rows, which have their own groups.

        Raises:
            UsageError: the group has settings and contains only rows.
        """
        dense = [tensor for tensor in tensors if not self._rows.owns(tensor)]
        if tensors and not dense and group.keys() - {"params"}:
            raise UsageError(
                f"a group sets {', '.join(sorted(group.keys() - {'params'}))}, but contains only embeddings on tables, "
                "whose rows use the settings of the table: set them with job.table(..., optimizer=...)"
            )
        return dense

    def _names_in(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        names = []
        for tensor in tensors:
            name = self._names.get(id(tensor))
            if name is None:
                raise UsageError(
                    "a group has a parameter that is not in the module: build the complete module before the "
                    "optimizer, and combine several modules in one nn.ModuleDict"
                )
            names.append(name)
        return names

    def _add_row_groups(self) -> None:
        for module, rule in self._rows.rules():
            settings = shown(rule)
            super().add_param_group({"params": [module.rows], **settings})
            self._shown.add(rule, settings)
            self._rows.add_group(module, self.param_groups[-1])
            self.state[module.rows] = {"version": torch.zeros((), device="cpu")}

    def _require_own_tables(self) -> None:
        for module, _ in self._rows.rules():
            if module.table.declared[1] is not self.model:
                raise UsageError(f"table {module.table.name!r} belongs to another job: declare it with this one")

    def _first_values(self) -> dict[str, Array]:
        tensors = {name: place.tensor.detach() for name, place in self._places.items()}
        return Copies().arrays(tensors) | self._buffers.known

    @property
    def model(self) -> Parameters:
        """The job's values by name, as returned by ``job.parameters``. ``model.pull()`` gets the current ones."""
        if self._model is None:
            raise UsageError("this optimizer was not declared, because its constructor failed")
        return self._model

    # called by PyTorch

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the current batch's gradients, then pull. When this returns, the module contains the new values.

        Args:
            closure: Computes the loss and its gradients. Called once.

        Returns:
            The result of the closure.

        Raises:
            GradientError: a gradient is not finite. Nothing was sent. The loop repeats the batch.
            UsageError: no batch is current, it has already been stepped, or other code has changed a parameter.
            UnavailableError: for the same reasons as ``model.step``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prefetch_detector.require_in_order()
        self._shown.require_unchanged(self.param_groups)
        self._require_unchanged()
        gradients, rows, known_buffers = self._gradients(), self._rows.gradients(), self._buffers.known
        changes = self._buffers.changes()
        arrays = self._copies.arrays(gradients | {name: used.leaf.grad for name, (_, used) in rows.items()})
        if self._staging is not None:
            arrays |= self._staging.staged(gradients)
        try:
            for name, (table, used) in rows.items():
                table.push_distinct(used.ids, used.gradients(arrays.pop(name)))
            self.model.step(arrays | changes)
        except GradientError as error:
            self.model.forget_rows()
            self._buffers.known = known_buffers
            if wrong := [name for name, change in changes.items() if not np.isfinite(change).all()]:
                text = f"{wrong[0]!r} is a buffer, which may have infinities only if it had one when it was declared"
                raise GradientError(f"{error}; {text}") from error
            raise
        self._pushed = Seen(gradients.values())
        self._rows.drop()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that are in no group yet, with the settings that were declared for them.

        Raises:
            UsageError: a parameter is not in the module, or the group's settings differ from the declared ones.
        """
        tensors = self._without_rows(param_group, self._tensors_in(param_group))
        names = self._names_in(tensors)
        rules = [self._rule.for_parameter(name) for name in names]
        settings = settings_in(param_group, type(self._rule))
        for name, rule in zip(names, rules, strict=True):
            for setting, value in settings.items():
                used = shown(rule).get(setting, "nothing")
                if value not in (used, getattr(rule, setting, None)):
                    kind = type(rule).__name__
                    change = f"{{{setting!r}: {value!r}}}" if kind == type(self._rule).__name__ else f"fe.{kind}(...)"
                    raise UsageError(
                        f"the servers use {setting}={used!r} for {name!r}, not {value!r}: declare it from the start, "
                        f"as in fe.{type(self._rule).__name__}(..., overrides={{{exact(name)!r}: {change}}})"
                    )
        rule = rules[0] if rules else self._rule
        settings = shown(rule)
        super().add_param_group({**param_group, **settings, "params": tensors})
        self._shown.add(rule, settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, with the version of each parameter's values.

        The servers store the optimizer's state. To resume a job, use its checkpoint, not this dict.
        """
        versions = self.model.versions
        for name, place in self._places.items():
            if place.tensor in self.state:
                self.state[place.tensor]["version"].fill_(versions[name])
        state: dict[str, Any] = super().state_dict()
        for group, shown_group in zip(self.param_groups, state["param_groups"], strict=True):
            del shown_group["params"][len(self._permanent(group["params"])) :]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a ``state_dict`` belongs to this optimizer. Loads nothing, because the servers store the state.

        Raises:
            UsageError: the ``state_dict`` belongs to another optimizer.
        """
        groups = state_dict.get("param_groups", ())
        sizes = [len(self._permanent(group["params"])) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes or not self._shown.match(groups):
            raise UsageError(
                "this state belongs to another optimizer, and the servers have the state of this job's: resume the "
                "job from its checkpoint, for example with flightedl run --resume"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a job's optimizer can be neither pickled nor copied, because it belongs to this trainer's session; save "
            "the result of optimizer.state_dict() or use job.save_model(...)"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(2)

    # called by the job

    def values_arrived(self, names: Collection[str]) -> None:
        with torch.no_grad():
            for name in names:
                values = self._tensors[name]
                if name not in self._places:
                    self._buffers.arrived(name, values)
                    continue
                tensor = self._places[name].tensor
                if is_bound(tensor, values):
                    # The values are already in place, but autograd must be told that they have changed.
                    increment_version(tensor)
                    self._prints[name] = fingerprint(values)
                else:
                    tensor.copy_(values)
                    self._prints.pop(name, None)
                self._written[name] = tensor._version
        self._update_rates()

    def batch_ends(self, current: CurrentBatch) -> None:
        """Prepare for the next batch, or for the same one again. Raises UsageError if gradients were not pushed."""
        if current.is_undone:
            self._rows.drop()
            self.values_arrived(list(self._buffers.rules))
            return
        unpushed = [] if current.has_gradient else self._unpushed()
        try:
            self._prefetch_detector.batch_ends(current, was_used=current.has_gradient or bool(unpushed))
            self._require_pushed(current, unpushed)
        finally:
            self._rows.drop()

    def _unpushed(self) -> list[torch.Tensor]:
        """Return gradients that were computed after the last push."""
        dense = [gradient for gradient in self._gradients().values() if gradient not in self._pushed]
        rows = [used.leaf.grad for _, used in self._rows.gradients().values()]
        return dense + [gradient for gradient in rows if gradient is not None]

    def _require_pushed(self, current: CurrentBatch, unpushed: Sequence[torch.Tensor]) -> None:
        plain = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in unpushed]
        # A GradScaler skips batches whose gradients are not finite.
        if any(bool(each.count_nonzero()) for each in plain) and all(bool(each.isfinite().all()) for each in plain):
            raise UsageError(
                f"the gradients of {current} were not pushed, and the batch would count as done without them: call "
                "optimizer.step() for every batch, or zero_grad() to skip one; to push several batches at once use "
                "mode=fe.Sync(push_every=n), which adds up their gradients"
            )

    # helpers

    def _grouped(self) -> Iterable[torch.Tensor]:
        return (tensor for group in self.param_groups for tensor in group["params"])

    def _permanent(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of a group that do not depend on the batch."""
        return [tensor for tensor in tensors if tensor in self.state]

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients by name, except the gradients of rows."""
        found: dict[str, torch.Tensor] = {}
        for tensor in self._grouped():
            if tensor.grad is not None and id(tensor) in self._names:
                found[self._names[id(tensor)]] = tensor.grad
        return found

    def _require_unchanged(self) -> None:
        for name, tensor in self._undeclared.items():
            if tensor.requires_grad and tensor.numel():
                raise UsageError(
                    f"parameter {name!r} was frozen or empty when it was declared: unfreeze it before that"
                )
        for name, place in self._places.items():
            tensor, wanted, is_declared = place.tensor, self._tensors[name], place.current is place.tensor
            if not is_declared or tensor.shape != wanted.shape:
                raise UsageError(
                    f"the module's tensor {name!r} is not the declared one: change the module before making "
                    "fe.torch.Optimizer, in all trainers"
                )
            if tensor._version == self._written[name]:
                continue
            if not self._has_values_of_job(name, tensor):
                raise UsageError(
                    f"the value of {name!r} was changed in this trainer only, for example by load_state_dict, but the "
                    "servers have the model: load values before making fe.torch.Optimizer, or start a new job with them"
                )
            self._written[name] = tensor._version

    def _has_values_of_job(self, name: str, tensor: torch.Tensor) -> bool:
        """True if the tensor still contains the values that arrived most recently."""
        values, print_of_job = self._tensors[name], self._prints.get(name)
        if print_of_job is not None and fingerprint(values) != print_of_job:
            return False
        return is_bound(tensor, values) or torch.equal(tensor.detach().cpu(), values.to(tensor.dtype))

    def _update_rates(self) -> None:
        versions: dict[str, int] = {}

        def version_of(number: int) -> int:
            params = self.param_groups[number]["params"]
            name = self._names.get(id(params[0])) if params else None
            if name is None:
                return max(self.model.steps.versions.values())
            versions.update(versions or self.model.versions)
            return versions[name]

        if self._model is not None:
            self._shown.update_rates(self.param_groups, version_of)
