"""Parameter groups as PyTorch has them, and the settings that the servers have.

A group's settings are those of the job's optimizer: ``lr``, ``weight_decay``, ``momentum``. PyTorch's ``betas`` are
``beta1`` and ``beta2``. They become ``overrides`` of the declared optimizer, by the parameters' names, and count for
the whole job: whoever changes them in a trainer is refused, because the others would not follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.schedules import Schedule, rate_at
from flightedl.domain.model.settings import fields_of
from flightedl.errors import UsageError

_NOT_OF_GROUPS = ("clip_norm", "overrides")


def chosen(optimizer: Any) -> Optimizer:
    """What the user gives as the rule.

    Raises:
        UsageError: it is nothing that servers can run.
    """
    given = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(given, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss many times for one step, which servers cannot: use fe.Adam or fe.Momentum, or "
            "run it in the trainers and push what it changed, with fe.Delta()"
        )
    if issubclass(given, torch.optim.Optimizer):
        raise UsageError(
            f"the servers run the optimizer: give fe.{given.__name__}(lr=...) or another of fe's instead of "
            f"torch.optim.{given.__name__}"
        )
    return Optimizer.chosen(optimizer)


def settings_in(group: Mapping[str, Any], kind: type[Optimizer]) -> dict[str, Any]:
    """The settings that a group gives.

    Raises:
        UsageError: it gives one that the servers' optimizer has not.
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
            raise UsageError(f"a group gives {name!r:.80}, but {kind.__name__} has {', '.join(allowed)}")
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def with_groups(optimizer: Optimizer, groups: Iterable[tuple[Mapping[str, Any], Iterable[str]]]) -> Optimizer:
    """The optimizer that gives each group's parameters the group's settings."""
    overrides = dict(optimizer.overrides)
    for settings, names in groups:
        for name in names if settings else ():
            before = overrides.get(name, {})
            overrides[name] = {**before, **settings} if isinstance(before, Mapping) else before
    return replace(optimizer, overrides=overrides) if overrides else optimizer


def shown(rule: Optimizer, version: int = 0) -> dict[str, Any]:
    """The settings of a group as ``param_groups`` shows them; ``lr`` is that of the next update."""
    found = {name: getattr(rule, name) for name in fields_of(type(rule)) if name not in _NOT_OF_GROUPS}
    if "lr" in found:
        found["lr"] = rate_at(found["lr"], version)
    return found


class ShownSettings:
    """What each parameter group of an optimizer shows of the servers' settings, and whether somebody has changed it."""

    def __init__(self) -> None:
        self._rules: list[Optimizer] = []
        self._told: list[dict[str, Any]] = []

    def add(self, rule: Optimizer, told: dict[str, Any]) -> None:
        """The next group has this rule, and shows this."""
        self._rules.append(rule)
        self._told.append(told)

    def require_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """UsageError when somebody changed what a group shows."""
        for number, (group, told, rule) in enumerate(zip(groups, self._told, self._rules, strict=True)):
            for name, value in told.items():
                now = group[name]
                if now is value or now == value:
                    continue
                raise UsageError(
                    f"{name} of group {number} was set to {now!r:.40}, but the servers have {value!r} for the whole "
                    "job: a PyTorch scheduler would start from 0 in a trainer that joins late; declare a schedule, as "
                    f"in fe.{type(rule).__name__}(lr=fe.StepDecay(0.1, 0.5, every=100)), which the servers follow"
                )

    def tell(self, groups: Sequence[dict[str, Any]], version_of: Callable[[int], int | None]) -> None:
        """Show the rate of the next update: that at the version of each group, by its number; None: not known."""
        for number, (group, told, rule) in enumerate(zip(groups, self._told, self._rules, strict=True)):
            if "lr" not in told or isinstance(getattr(rule, "lr", 0.0), float):
                continue
            if (version := version_of(number)) is None:
                continue
            rate = rule.rate_at(version)
            if group["lr"] == told["lr"]:
                group["lr"] = rate
            told["lr"] = rate

    def are_of(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these groups show the same, as far as it does not change while the job runs."""
        return len(groups) == len(self._told) and all(
            group.get(name, value) == value or isinstance(getattr(rule, name), Schedule)
            for group, told, rule in zip(groups, self._told, self._rules, strict=True)
            for name, value in told.items()
        )
