"""The servers' optimizer, as a ``torch.optim.Optimizer``: gradients go up, values come down, in place.

Theory. ``step`` pushes the gradient of each parameter that has one, under the identity of the current batch, and pulls.
The job brings other values by a step, by the end of a batch that was not stepped, and when this trainer has joined
again. From then on the module has them, and its next gradient counts as computed at them. A parameter of the main
memory is bound to the memory in which they arrive (``bind``), once, when the optimizer is made. Into other parameters,
and into buffers, they are copied in place.

* A gradient of None is not a zero: a parameter that no trainer had a gradient for in a round stays where it is, and so
  does what its optimizer remembers of it. The mean of a round is over those who had one, by their records.
* The learning rate and all other settings are the servers', one for the whole job. ``param_groups`` shows them; whoever
  changes them there, as PyTorch's schedulers do, is refused.
* Whoever writes to a parameter from outside in the midst of a job is refused in the next step: the others would not
  know. What writes the same values, or restores them, is fine.
* Buffers that training changes are averaged: a step pushes by how much they changed here, and the servers add the mean
  of that (``Delta``). Integers of one element, which count, count the rounds.
* Rows of tables that embeddings looked up are parameters until the step, see ``rows``; they are pushed with it.
* A batch whose gradients were computed and not pushed is refused when the next one is asked for: it would count as done
  without them.

What is not guaranteed: writes through ``.data`` may pass unnoticed; the next values overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from flightedl.client.model.parameters import Parameters
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.optimizers import Delta
from flightedl.domain.model.optimizers import Optimizer as Rule
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.errors import GradientError, UsageError
from flightedl.torch.ahead import OneByOne, Seen
from flightedl.torch.groups import ShownSettings, chosen, settings_in, shown, with_groups
from flightedl.torch.module import Place, buffers_of, embeddings_of, parameters_of
from flightedl.torch.rows import RowGroups
from flightedl.torch.tensors import Array, Copies, array_of, bind, fingerprint, is_bound, tensor_of


class Session(Protocol):
    """What of a job is needed here."""

    def parameters(self, initial: Mapping[str, Any], **more: Any) -> Parameters: ...


class Optimizer(torch.optim.Optimizer):
    """An optimizer that the job's servers run.

    Args:
        module: What is trained. All of it is declared: parameters, frozen ones too, and buffers.
        job: What ``fe.connect()`` returned.
        optimizer: The rule, as of ``job.parameters``.
        mode: Likewise.
        groups: Parameter groups as of ``torch.optim``: dicts of ``params`` and settings. Parameters of the module that
            are in none are declared, and not trained until ``add_param_group`` brings them. None: all are in one.
        wire: As of ``job.parameters``.
        error_feedback: Likewise.

    Raises:
        UsageError: something of this cannot be trained on servers; the sentence says what to do.
        DeclarationError: the job already has a different model.
    """

    def __init__(
        self,
        module: nn.Module,
        job: Session,
        optimizer: Rule | str,
        *,
        mode: Mode | str | None = None,
        groups: Iterable[Mapping[str, Any]] | None = None,
        wire: str = "",
        error_feedback: bool = False,
    ) -> None:
        self._places = parameters_of(module)
        self._rows = RowGroups(embeddings_of(module))
        self._names = {id(place.tensor): name for name, place in self._places.items()}
        self._buffers = buffers_of(module)
        given = self._given(groups)
        rule = chosen(optimizer)
        rule = with_groups(rule, [(settings_in(group, type(rule)), self._names_in(group["params"])) for group in given])
        self._rule = _with_buffers(rule, self._buffers)
        self._model: Parameters | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        #: What a tensor's counter of writes was when its values were those of the job.
        self._written: dict[str, int] = {}
        #: Fingerprint of the job's values, of each parameter that lies where they arrive.
        self._prints: dict[str, int] = {}
        #: Buffer -> its values when they came, or when its change since then was pushed last.
        self._told_buffers: dict[str, Array] = {}
        self._copies = Copies()
        self._pushed = Seen([])
        self._shown = ShownSettings()
        self._one_by_one = OneByOne()
        super().__init__([{**group} for group in given], shown(self._rule))
        self._have_groups_of_rows()
        # Some tools take an optimizer without any state for one that was never used, and try it out.
        for place in self._places.values():
            self.state[place.tensor] = {"version": torch.zeros(())}
        self._model = job.parameters(
            self._first_values(), optimizer=self._rule, mode=mode, wire=wire, error_feedback=error_feedback
        )
        self._require_own_tables()
        self._tensors = {name: tensor_of(self._model[name]) for name in self._model}
        for name, place in self._places.items():
            bind(place.tensor, self._tensors[name])
        self.values_came(list(self._tensors))
        self._pushed = Seen(self._gradients().values())
        self._model.listen(self)

    def _given(self, groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        if groups is None:
            return [{"params": [place.tensor for place in self._places.values()]}]
        given: list[dict[str, Any]] = []
        for group in groups:
            if not isinstance(group, Mapping) or "params" not in group:
                raise UsageError(f'groups has {group!r:.80}, but must have dicts such as {{"params": ..., "lr": 0.1}}')
            params = group["params"]
            tensors = [params] if isinstance(params, torch.Tensor) else list(params)
            dense = self._without_rows(group, tensors)
            if dense or not tensors:
                given.append({**group, "params": dense})
        return given

    def _without_rows(self, group: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows have groups of their own.

        Raises:
            UsageError: the group has settings for nothing but rows.
        """
        dense = [tensor for tensor in tensors if not self._rows.owns(tensor)]
        if tensors and not dense and group.keys() - {"params"}:
            raise UsageError(
                f"a group gives {', '.join(sorted(group.keys() - {'params'}))} for nothing but embeddings on tables, "
                "whose settings are those of the table: give them to job.table(..., optimizer=...)"
            )
        return dense

    def _names_in(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        names = []
        for tensor in tensors:
            name = self._names.get(id(tensor))
            if name is None:
                raise UsageError(
                    "a group has a parameter that the module has not: build all of the module, then the optimizer, and "
                    "put several modules into one nn.ModuleDict"
                )
            names.append(name)
        return names

    def _have_groups_of_rows(self) -> None:
        for module, rule in self._rows.rules():
            told = shown(rule)
            super().add_param_group({"params": [module.rows], **told})
            self._shown.add(rule, told)
            self._rows.has(module, self.param_groups[-1])
            self.state[module.rows] = {"version": torch.zeros(())}

    def _require_own_tables(self) -> None:
        """UsageError when rows would go to another job."""
        for module, _ in self._rows.rules():
            if module.table.declared[1] is not self.model:
                raise UsageError(f"table {module.table.name!r} is of another job: declare it with the same one's table")

    def _first_values(self) -> dict[str, Array]:
        tensors = {name: place.tensor.detach() for name, place in self._places.items()}
        for name, place in self._buffers.items():
            tensor = place.tensor.detach()
            tensors[name] = tensor if tensor.is_floating_point() else tensor.double().reshape(())
        return Copies().arrays(tensors)

    @property
    def model(self) -> Parameters:
        """The job's values by name, as ``job.parameters`` returns them; ``model.pull()`` brings the present ones."""
        if self._model is None:
            raise UsageError("this optimizer was not declared: making it has failed")
        return self._model

    # what PyTorch calls

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the current batch's gradients, then pull: the module has fresh values when this returns.

        Args:
            closure: Computes the loss and its gradients; called once.

        Returns:
            What the closure returned.

        Raises:
            GradientError: a gradient is not finite; nothing was sent. A loop that goes on gets the batch again.
            UsageError: no batch is current, or it was stepped already, or a parameter was changed from outside.
            UnavailableError: as of ``model.step``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._one_by_one.require_is_through()
        self._shown.require_unchanged(self.param_groups)
        self._require_unchanged()
        gradients, rows, told_buffers = self._gradients(), self._rows.gradients(), dict(self._told_buffers)
        arrays = self._copies.arrays(gradients | {name: used.leaf.grad for name, (_, used) in rows.items()})
        try:
            for name, (table, used) in rows.items():
                table.push_distinct(used.ids, used.gradients(arrays.pop(name)))
            self.model.step(arrays | self._changes_of_buffers())
        except GradientError:
            self.model.forget_rows()
            self._told_buffers = told_buffers
            raise
        self._pushed = Seen(gradients.values())
        self._rows.drop()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were in no group, under the settings that were declared for them.

        Raises:
            UsageError: they are not of the module, or the group has other settings than were declared.
        """
        params = param_group["params"]
        tensors = self._without_rows(param_group, [params] if isinstance(params, torch.Tensor) else list(params))
        names = self._names_in(tensors)
        rules = [self._rule.for_parameter(name) for name in names]
        settings = settings_in(param_group, type(self._rule))
        for name, rule in zip(names, rules, strict=True):
            for setting, value in settings.items():
                if self._model is not None and shown(rule)[setting] != value:
                    raise UsageError(
                        f"the servers have {setting}={shown(rule)[setting]!r} for {name!r}, not {value!r}: declare it "
                        f"from the start, as in fe.{type(rule).__name__}(..., overrides={{{name!r}: "
                        f"{{{setting!r}: {value!r}}}}})"
                    )
        rule = rules[0] if rules else self._rule
        told = shown(rule)
        super().add_param_group({**param_group, **told, "params": tensors})
        self._shown.add(rule, told)

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer: its groups, and of each parameter the version of its values.

        The servers have the rest. What a job is resumed from is its checkpoint.
        """
        versions = self.model.versions
        for name, place in self._places.items():
            if place.tensor in self.state:
                self.state[place.tensor]["version"].fill_(versions[name])
        state: dict[str, Any] = super().state_dict()
        for group, shown_group in zip(self.param_groups, state["param_groups"], strict=True):
            del shown_group["params"][len(self._lasting(group["params"])) :]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave, which changes nothing: the servers have the optimizer's state.

        Raises:
            UsageError: it is another optimizer's.
        """
        groups = state_dict.get("param_groups", ())
        sizes = [len(self._lasting(group["params"])) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes or not self._shown.are_of(groups):
            raise UsageError(
                "this state is another optimizer's, and the servers have that of this job: resume the job from its "
                "checkpoint, as with flightedl run --resume"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a job's optimizer can neither be pickled nor copied: it belongs to this trainer's session; keep what "
            "optimizer.state_dict() or job.save_model(...) gives"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(2)

    # what the job says

    def values_came(self, names: Collection[str]) -> None:
        """Have the job's values in the module."""
        with torch.no_grad():
            for name in names:
                tensor = (self._places.get(name) or self._buffers[name]).tensor
                values = self._tensors[name]
                if is_bound(tensor, values):
                    # They are there, and autograd has to know that they are not those of before.
                    increment_version(tensor)
                    self._prints[name] = fingerprint(values)
                else:
                    values = values.reshape(tensor.shape)
                    tensor.copy_(values if tensor.is_floating_point() else values.round())
                    self._prints.pop(name, None)
                self._written[name] = tensor._version
                if name in self._buffers:
                    self._told_buffers[name] = self.model[name].copy()
        self._tell_settings()

    def batch_ends(self, current: CurrentBatch) -> None:
        """The loop goes on to the next batch, or to the same batch once more."""
        if current.is_undone:
            self._rows.drop()
            self.values_came(list(self._buffers))
            return
        left = [] if current.has_gradient else self._left()
        try:
            self._one_by_one.batch_ends(current, was_used=current.has_gradient or bool(left))
            self._require_pushed(current, left)
        finally:
            self._rows.drop()

    def _left(self) -> list[torch.Tensor]:
        """Gradients that were computed since the last push."""
        left = [gradient for gradient in self._gradients().values() if gradient not in self._pushed]
        rows = [used.leaf.grad for _, used in self._rows.gradients().values()]
        return left + [gradient for gradient in rows if gradient is not None]

    def _require_pushed(self, current: CurrentBatch, left: Sequence[torch.Tensor]) -> None:
        plain = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in left]
        # A GradScaler leaves a batch out whose gradients are not finite.
        if any(bool(each.count_nonzero()) for each in plain) and all(bool(each.isfinite().all()) for each in plain):
            raise UsageError(
                f"the gradients of {current} were not pushed, and it would count as done without them: call "
                "optimizer.step() for every batch, or zero_grad() for one that is to be left out; to push several "
                "batches at once use mode=fe.Sync(push_every=n), which adds them up"
            )

    # pieces

    def _grouped(self) -> Iterable[torch.Tensor]:
        return (tensor for group in self.param_groups for tensor in group["params"])

    def _lasting(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a group that are there in every batch."""
        return [tensor for tensor in tensors if tensor in self.state]

    def _gradients(self) -> dict[str, torch.Tensor]:
        """By name, of what the servers have as parameters."""
        found: dict[str, torch.Tensor] = {}
        for tensor in self._grouped():
            if tensor.grad is not None and id(tensor) in self._names:
                found[self._names[id(tensor)]] = tensor.grad
        return found

    def _changes_of_buffers(self) -> dict[str, Array]:
        """By how much buffers changed here since the job gave them, or since the push before."""
        changes: dict[str, Array] = {}
        for name, place in self._buffers.items():
            # PyTorch's kernels write statistics without counting that as a write.
            given = self._told_buffers[name]
            now = array_of(place.tensor.detach().cpu()).reshape(given.shape).astype(given.dtype)
            change = now - given
            if change.any():
                changes[name] = np.asarray(change, given.dtype)
                self._told_buffers[name] = now
        return changes

    def _require_unchanged(self) -> None:
        """UsageError when somebody else wrote to a parameter."""
        for name, place in self._places.items():
            tensor, wanted = place.tensor, self._tensors[name]
            if not place.is_still_there or tensor.shape != wanted.shape:
                raise UsageError(
                    f"the module has another tensor as {name!r} than was declared: change the module before "
                    "fe.torch.Optimizer is made, in all trainers"
                )
            if tensor._version == self._written[name]:
                continue
            if not self._has_values_of_job(name, tensor):
                raise UsageError(
                    f"the value of {name!r} was changed in this trainer alone, as by load_state_dict: the servers have "
                    "the model; load values before fe.torch.Optimizer is made, or begin another job with them"
                )
            self._written[name] = tensor._version

    def _has_values_of_job(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the values that came last are in the tensor."""
        values, print_of_job = self._tensors[name], self._prints.get(name)
        if print_of_job is not None and fingerprint(values) != print_of_job:
            return False
        return is_bound(tensor, values) or torch.equal(tensor.detach().cpu(), values.to(tensor.dtype))

    def _tell_settings(self) -> None:
        """Show the rate of the next update."""
        versions: dict[str, int] = {}

        def version_of(number: int) -> int | None:
            params = self.param_groups[number]["params"]
            name = self._names.get(id(params[0])) if params else None
            if name is None or self._model is None:
                return None
            versions.update(versions or self._model.versions)
            return versions[name]

        self._shown.tell(self.param_groups, version_of)


def _with_buffers(rule: Rule, buffers: Mapping[str, Place]) -> Rule:
    """Buffers get what the trainers say that they changed by."""
    return replace(rule, overrides={**rule.overrides, **dict.fromkeys(buffers, Delta())}) if buffers else rule
