"""Optimizers: the users' settings, and the slots that each optimizer keeps. The arithmetic is in ``kernels``.

Rules for all of them:

* One update uses a block's values, its *slots* (arrays like the values) and one gradient.
* An update divides the gradient (for a mean), clips each element to ``clip_value``, adds ``weight_decay * values``, and
  applies the rule. AdamW and LAMB apply weight decay separately from the gradient, as in their papers.
* The client applies ``clip_norm``, because a pserver sees only the gradients of its own blocks. The norm covers all
  gradients, but not the differences that are pushed to parameters with a :class:`Delta` of their own.
* ``lr`` is a number, or a :class:`~flightedl.domain.model.schedules.Schedule` that depends on the block's version. The
  version also counts rounds or pushes without a gradient for the block, so it is the same for all blocks.
* Bias corrections depend on the number of the block's own updates.
* ``overrides`` change the settings of parameters whose names match a pattern: ``{"*.bias": {"lr": 0.1, "weight_decay":
  0}}``. In a pattern, ``*`` stands for any text and ``?`` for any character. After a backslash, they stand for
  themselves (:func:`exact`).
* All matching patterns apply, and later ones win. A pattern may also select another rule, as in ``{"*.running_mean":
  Delta()}``; other patterns then have no effect. Declaring the model fails if a pattern matches no parameter.

For rules that ``torch.optim`` contains, the defaults are the same as there.
"""

# ruff: noqa: RUF009 - number() makes a dataclass field, like field()

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flightedl.domain.model.schedules import Schedule, rate_at
from flightedl.domain.model.settings import Setting, checked, family, fields_of, number
from flightedl.errors import UsageError

#: Settings that apply to the whole model, and cannot be overridden for single parameters.
_WHOLE_MODEL = ("clip_norm", "overrides")


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """An array that an optimizer keeps for each block.

    Elements of a slot start as ``initial``. If ``per_element`` is False, it has one number per block or table row.
    """

    name: str
    initial: float = 0.0
    per_element: bool = True

    def width(self, dim: int) -> int:
        """Return how many numbers of the slot belong to a table row with ``dim`` values."""
        return dim if self.per_element else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(Setting):
    """Base class of all optimizers, with their common settings; see the module's docstring."""

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
        """Return the settings for one parameter, with all matching overrides applied."""
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
        """Return the parameters that ``clip_norm`` ignores."""
        if not self.overrides or isinstance(self, Delta):
            return frozenset()
        return frozenset(name for name in names if isinstance(self.for_parameter(name), Delta))

    def assigned(self, names: Iterable[str]) -> frozenset[str]:
        """Return the parameters to which trainers push new values instead of gradients."""
        rules = ((name, self.for_parameter(name)) for name in names)
        return frozenset(name for name, rule in rules if isinstance(rule, Delta) and rule.assign)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise UsageError if a pattern in ``overrides`` matches no parameter."""
        known = list(names)
        for pattern in self.overrides:
            if not any(map(_pattern(pattern).fullmatch, known)):
                raise UsageError(
                    f"overrides[{pattern!r}] matches none of the {len(known)} parameters, such as "
                    f"{', '.join(known[:3])}; correct or remove it"
                )


family(Optimizer)


def exact(name: str) -> str:
    """Return the pattern that matches only this name."""
    return re.sub(r"[*?\\]", r"\\\g<0>", name)


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.findall(r"\\[*?\\]|.", text, re.DOTALL)
    return re.compile("".join({"*": ".*", "?": "."}.get(part) or re.escape(part[-1]) for part in parts), re.DOTALL)


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Plain SGD: ``values -= lr * gradient``."""

    lr: float | Schedule = number(at_least=0)


@dataclass(frozen=True, slots=True)
class Delta(Optimizer):
    """Adds the pushed arrays to the values: ``values += gradient``. For trainers that run their own optimizer.

    Trainers with their own optimizers push the changes of their values. In sync mode with ``reduce="mean"``, the result
    is the mean of the trainers' values. ``weight_decay`` is rejected, because those optimizers should apply it.

    Args:
        assign: If set, trainers push new values, which replace the old ones. In sync mode, the new values are the
            ``"mean"`` of a round's values, weighted by the batches' weights, or those of the ``"latest"`` batch, which
            has the highest identity. Otherwise, each push replaces the values.
    """

    assign: Literal["", "mean", "latest"] = ""

    def rate_at(self, version: int) -> float:  # noqa: ARG002 - the protocol's argument
        return -1.0

    def check(self) -> None:
        if self.weight_decay:
            raise UsageError("Delta: weight_decay belongs to the optimizer that computes the differences")
        if self.assign and self.clip_value is not None:
            raise UsageError("Delta: clip_value limits differences, so it cannot be combined with assign")
        Optimizer.check(self)


@dataclass(frozen=True, slots=True)
class Momentum(Optimizer):
    """SGD with momentum (Polyak 1964), optionally Nesterov's, like torch's SGD with ``momentum`` and no dampening."""

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
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): values are scaled by ``1 - lr * weight_decay``."""

    weight_decay: float = number(0.01, at_least=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Ftrl(Optimizer):
    """FTRL-proximal (McMahan et al. 2013) with rate power -1/2, like TensorFlow's. ``l1`` produces exact zeros.

    ``l2`` adds the penalty ``l2 * |values|**2`` to the loss. As in TensorFlow, the first update replaces the initial
    values, which affect only the linear term.
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

    The norms are computed for each *block*, because no pserver sees a whole parameter. For a parameter with several
    blocks, the result therefore depends on the shard plan.
    """

    lr: float | Schedule = number(at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-6, at_least=0)
    weight_decay: float = number(0.01, at_least=0, kw_only=True)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("average"), SlotSpec("square_average"))
