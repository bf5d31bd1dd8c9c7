"""Convert PyTorch's parameter groups to settings of the servers' optimizer.

A group may set any option of the job's optimizer, for example ``lr``, ``weight_decay`` or ``momentum``. PyTorch's
``betas`` become ``beta1`` and ``beta2``. The settings of a group become ``overrides`` of the declared optimizer for the
group's parameters, and apply to the entire job. Changing them in one trainer is an error, because the change would not
reach the other trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flightedl.domain.model.optimizers import Optimizer, exact
from flightedl.domain.model.schedules import Schedule, rate_at
from flightedl.domain.model.settings import fields_of
from flightedl.errors import UsageError

_NOT_OF_GROUPS = ("clip_norm", "overrides")


def chosen(optimizer: Any) -> Optimizer:
    """Return the given optimizer in the form that the servers support.

    Raises:
        UsageError: the servers do not support the optimizer.
    """
    given = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(given, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss many times per step, which servers cannot do: use fe.Adam or fe.Momentum, or run "
            "LBFGS in the trainers and push the changes of the values with fe.Delta()"
        )
    if issubclass(given, torch.optim.Optimizer):
        raise UsageError(
            f"the servers run the optimizer: pass fe.{given.__name__}(lr=...) or another optimizer of fe instead of "
            f"torch.optim.{given.__name__}"
        )
    return Optimizer.chosen(optimizer)


def settings_in(group: Mapping[str, Any], kind: type[Optimizer]) -> dict[str, Any]:
    """Return the settings of a group.

    Raises:
        UsageError: the servers' optimizer lacks one of these settings.
    """
    allowed = [name for name in fields_of(kind) if name not in _NOT_OF_GROUPS]
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names", "initial_lr"):
            continue
        if name == "betas" and "beta1" in allowed:
            found["beta1"], found["beta2"] = (_number(each) for each in value)
        elif name in allowed:
            found[name] = _number(value)
        else:
            raise UsageError(f"a group sets {name!r:.80}, but {kind.__name__} only has {', '.join(allowed)}")
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def with_overrides(optimizer: Optimizer, found: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer with these settings or rules, by parameter. They win over other settings, but not rules."""
    overrides = dict(optimizer.overrides)
    for name, changes in found.items():
        before = overrides.pop(pattern := exact(name), {})
        if isinstance(changes, Mapping):
            changes = {**before, **changes} if isinstance(before, Mapping) else before  # noqa: PLW2901 - merged
        overrides[pattern] = changes
    return replace(optimizer, overrides=overrides) if overrides else optimizer


def shown(rule: Optimizer, version: int = 0) -> dict[str, Any]:
    """Return a rule's settings as ``param_groups`` shows them. ``lr`` is the learning rate of the next update."""
    found = {name: getattr(rule, name) for name in fields_of(type(rule)) if name not in _NOT_OF_GROUPS}
    if "lr" in found:
        found["lr"] = rate_at(found["lr"], version)
    return found


class ShownSettings:
    """Settings in an optimizer's parameter groups. Detects changes to these settings."""

    def __init__(self) -> None:
        self._rules: list[Optimizer] = []
        self._expected: list[dict[str, Any]] = []

    def add(self, rule: Optimizer, settings: dict[str, Any]) -> None:
        self._rules.append(rule)
        self._expected.append(settings)

    def require_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise UsageError if a group's settings have been changed."""
        for number, (group, expected, rule) in enumerate(zip(groups, self._expected, self._rules, strict=True)):
            for name, value in expected.items():
                now = group[name]
                if now is value or now == value:
                    continue
                raise UsageError(
                    f"{name} of group {number} was set to {now!r:.40}, but the servers use {value!r} for the whole "
                    "job: a PyTorch scheduler would start from 0 in a trainer that joins late; declare a schedule "
                    f"instead, for example fe.{type(rule).__name__}(lr=fe.StepDecay(0.1, 0.5, every=100))"
                )

    def update_rates(self, groups: Sequence[dict[str, Any]], version_of: Callable[[int], int]) -> None:
        """Show the learning rate of the next update.

        Args:
            groups: All groups of the optimizer.
            version_of: Returns the version of a group's parameters, given the group's number.
        """
        for number, (group, expected, rule) in enumerate(zip(groups, self._expected, self._rules, strict=True)):
            if "lr" not in expected or isinstance(getattr(rule, "lr", 0.0), float):
                continue
            rate = rule.rate_at(version_of(number))
            if group["lr"] == expected["lr"]:
                group["lr"] = rate
            expected["lr"] = rate

    def match(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """True if these groups have the expected settings, apart from settings that follow a schedule."""
        return len(groups) == len(self._expected) and all(
            group.get(name, value) == value or isinstance(getattr(rule, name), Schedule)
            for group, expected, rule in zip(groups, self._expected, self._rules, strict=True)
            for name, value in expected.items()
        )
