"""Optimizers: the settings that users choose, and the slots that each optimizer keeps. Arithmetic is in ``kernels``.

Rules for all of them:

* One update of a block uses its values, one gradient and its *slots* (arrays like the values), and raises its version
  by 1.
* Order of an update: divide the gradient (for a mean), clip each element to ``clip_value``, add ``weight_decay *
  values`` (AdamW and LAMB decay separately from the gradient, as in their papers), apply the rule.
* The client applies ``clip_norm``, because it has the whole gradient, and a pserver only the part for its blocks. The
  norm covers all gradients; differences that are pushed to parameters with their own :class:`Delta` are not gradients.
* ``lr`` is a number or a :class:`~flightedl.domain.model.schedules.Schedule` of the block's version.
* ``overrides`` give other settings to the parameters whose names match a pattern (``*`` any text, ``?`` any character,
  nothing else is special): ``{"*.bias": {"lr": 0.1, "weight_decay": 0}}``. All matching patterns apply; later ones
  win. A pattern may also select a different rule, as in ``{"*.running_mean": Delta()}``; then the settings of other
  matching patterns do not apply. A pattern that matches no parameter is probably misspelled, so declaring the model
  fails.

Defaults are the same as in ``torch.optim``, for rules that it contains.
"""

# ruff: noqa: RUF009 - number() makes a dataclass field, like field()

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flightedl.domain.model.schedules import Schedule, rate_at
from flightedl.domain.model.settings import Setting, checked, family, fields_of, number
from flightedl.errors import UsageError

#: Settings of the whole model, which cannot be overridden for a parameter.
_WHOLE_MODEL = ("clip_norm", "overrides")


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One array that an optimizer keeps for each block.

    ``initial`` fills it. If ``per_element`` is False, it is a single number per block or table row.
    """

    name: str
    initial: float = 0.0
    per_element: bool = True

    def width(self, dim: int) -> int:
        """Return how many of the slot's numbers belong to a table row with ``dim`` values."""
        return dim if self.per_element else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(Setting):
    """Base of all optimizers, with their common settings. See the module's rules."""

    weight_decay: float = number(0.0, at_least=0)
    clip_value: float | None = number(None, above=0)
    clip_norm: float | None = number(None, above=0)
    overrides: Mapping[str, Mapping[str, Any] | Optimizer] = field(default_factory=dict, hash=False)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots, in the order of the update rule's arguments."""
        return ()

    def rate_at(self, version: int) -> float:
        rate: float | Schedule = getattr(self, "lr")  # noqa: B009 - a field of every concrete optimizer
        return rate_at(rate, version)

    def check(self) -> None:
        rules = fields_of(type(self))
        kind = type(self).__name__
        allowed = [name for name in rules if name not in _WHOLE_MODEL]
        copies: dict[str, Mapping[str, Any] | Optimizer] = {}
        for pattern, changes in self.overrides.items():
            if not isinstance(pattern, str) or not isinstance(changes, Mapping | Optimizer):
                raise UsageError(f"{kind}: overrides must map name patterns to settings, got {pattern!r:.80}")
            if isinstance(changes, Optimizer):
                if changes.clip_norm is not None or changes.overrides:
                    raise UsageError(f"{kind}: overrides[{pattern!r}] must have neither clip_norm nor overrides")
                copies[pattern] = changes
                continue
            checked_changes = copies[pattern] = {}
            for name, value in changes.items():
                if name not in allowed:
                    raise UsageError(f"{kind}: overrides[{pattern!r}] can set {', '.join(allowed)}, not {name!r:.80}")
                checked_changes[name] = checked(f"{kind}: overrides[{pattern!r}]: {name}", value, *rules[name])
        object.__setattr__(self, "overrides", copies)

    def for_parameter(self, name: str) -> Optimizer:
        """Return the settings of one parameter: this optimizer with all matching overrides applied."""
        rule: Optimizer | None = None
        changes: dict[str, Any] = {}
        for pattern, values in self.overrides.items():
            if not _pattern(pattern).fullmatch(name):
                continue
            if isinstance(values, Optimizer):
                rule = values
            else:
                changes |= values
        return replace(self, overrides={}, **changes) if rule is None else rule

    def unclipped(self, names: Iterable[str]) -> frozenset[str]:
        """Return the parameters to which ``clip_norm`` does not apply."""
        if not self.overrides or isinstance(self, Delta):
            return frozenset()
        return frozenset(name for name in names if isinstance(self.for_parameter(name), Delta))

    def check_names(self, names: Iterable[str]) -> None:
        """Raise UsageError if a pattern of ``overrides`` matches none of the parameters."""
        known = list(names)
        for pattern in self.overrides:
            if not any(map(_pattern(pattern).fullmatch, known)):
                raise UsageError(
                    f"overrides[{pattern!r}] matches none of the {len(known)} parameters, such as "
                    f"{', '.join(known[:3])}; correct or remove it"
                )


family(Optimizer)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(letter) or re.escape(letter) for letter in text), re.DOTALL)


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``values -= lr * gradient``."""

    lr: float | Schedule = number(at_least=0)


@dataclass(frozen=True, slots=True)
class Delta(Optimizer):
    """Adds the pushed values: ``values += gradient``, for trainers that run their own optimizer.

    Such trainers push the changes of their values. In synchronous mode with ``reduce="mean"``, the result is the mean
    of the trainers' values. ``weight_decay`` is rejected, because weight decay is up to the trainers' own optimizer.
    """

    def rate_at(self, version: int) -> float:  # noqa: ARG002 - the protocol's argument
        return -1.0

    def check(self) -> None:
        if self.weight_decay:
            raise UsageError("Delta: weight_decay belongs to the optimizer that computes the differences")
        Optimizer.check(self)


@dataclass(frozen=True, slots=True)
class Momentum(Optimizer):
    """SGD with a velocity (Polyak 1964), optionally Nesterov's, like torch's SGD with ``momentum`` and no dampening."""

    lr: float | Schedule = number(at_least=0)
    momentum: float = number(0.9, at_least=0, below=1)
    nesterov: bool = False

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("velocity"),)


@dataclass(frozen=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011)."""

    lr: float | Schedule = number(0.01, at_least=0)
    eps: float = number(1e-10, at_least=0)
    initial_accumulator: float = number(0.0, at_least=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("square_sum", self.initial_accumulator),)


@dataclass(frozen=True, slots=True)
class Adadelta(Optimizer):
    """Adadelta (Zeiler 2012)."""

    lr: float | Schedule = number(1.0, at_least=0)
    rho: float = number(0.9, at_least=0, below=1)
    eps: float = number(1e-6, above=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("square_average"), SlotSpec("step_average"))


@dataclass(frozen=True, slots=True)
class RMSprop(Optimizer):
    """RMSprop (Hinton, lecture 6e), optionally ``centered`` (Graves 2013) and with momentum, like torch's."""

    lr: float | Schedule = number(0.01, at_least=0)
    alpha: float = number(0.99, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)
    momentum: float = number(0.0, at_least=0, below=1)
    centered: bool = False

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        centre = (SlotSpec("average"),) if self.centered else ()
        velocity = (SlotSpec("velocity"),) if self.momentum else ()
        return (SlotSpec("square_average"), *centre, *velocity)


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba 2015), optionally AMSGrad (Reddi et al. 2018). ``weight_decay`` is added to the gradient."""

    lr: float | Schedule = number(1e-3, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)
    amsgrad: bool = False

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        largest = (SlotSpec("largest_square_average"),) if self.amsgrad else ()
        return (SlotSpec("average"), SlotSpec("square_average"), *largest)


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): values shrink by ``lr * weight_decay``."""

    weight_decay: float = number(0.01, at_least=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Ftrl(Optimizer):
    """FTRL-proximal (McMahan et al. 2013) with rate power -1/2, like TensorFlow's. ``l1`` produces exact zeros.

    ``l2`` adds the penalty ``l2 * |values|**2`` to the loss. As in TensorFlow, the first update replaces the initial
    values, which enter only its linear term.
    """

    lr: float | Schedule = number(at_least=0)
    l1: float = number(0.0, at_least=0)
    l2: float = number(0.0, at_least=0)
    beta: float = number(0.0, at_least=0)
    initial_accumulator: float = number(0.1, at_least=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("square_sum", self.initial_accumulator), SlotSpec("linear"))


@dataclass(frozen=True, slots=True)
class LAMB(Optimizer):
    """LAMB (You et al. 2020): Adam's direction, scaled by the ratio of the norms of values and direction.

    The norms are those of a *block*, not of the whole parameter, because no pserver sees the whole parameter. For
    parameters with more than one block, the result depends on the shard plan.
    """

    lr: float | Schedule = number(at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-6, at_least=0)
    weight_decay: float = number(0.01, at_least=0, kw_only=True)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("average"), SlotSpec("square_average"))
