"""Advice that follows from how trainers spend their time."""

from __future__ import annotations

from collections.abc import Mapping

#: Profiles shorter than this many seconds are ignored.
_ENOUGH_S = 2.0
#: Smallest share of a trainer's time for which advice is given.
_MUCH = 0.4
#: Smaller shares are not shown.
_SHOWN = 0.005

_NAMES = {
    "data": "waiting for data",
    "script": "in the script",
    "push": "sending gradients",
    "wait": "waiting for others in the round",
    "pull": "receiving values",
}
#: Costs for which advice exists, each with the parts of the profile that make up the cost.
_COSTS = {"data": ("data",), "wait": ("wait",), "traffic": ("push", "pull")}
_ADVICE = {
    "data": "Read fewer columns, move the files closer, or split them into more chunks (`flightedl dataset split`).",
    "wait": (
        "`flightedl doctor` shows the slowest trainer. Even out batch sizes, or use Sync(backup=1), Bounded() or "
        "Async()."
    ),
    "traffic": "Use larger batches, wire='bfloat16', Async(push_every=) or more pservers.",
}


def shares(profile: Mapping[str, float]) -> dict[str, float]:
    """Return each part's share of the time; the shares add up to 1. Empty if the profile is too short."""
    total = sum(profile.get(what, 0.0) for what in _NAMES)
    if total < _ENOUGH_S:
        return {}
    return {what: profile.get(what, 0.0) / total for what in _NAMES}


def in_words(profile: Mapping[str, float]) -> str:
    """Describe the shares in words. Empty if the profile is too short."""
    return ", ".join(f"{part:.0%} {_NAMES[what]}" for what, part in shares(profile).items() if part >= _SHOWN)


def advice(profile: Mapping[str, float]) -> str:
    """Return advice on the largest cost; empty if no cost is high enough or the profile is too short."""
    parts = shares(profile)
    costs = {cost: sum(parts.get(what, 0.0) for what in its) for cost, its in _COSTS.items()}
    worst = max(costs, key=lambda cost: costs[cost])
    if costs[worst] < _MUCH:
        return ""
    worst_costs = " and ".join(f"{parts[what]:.0%} {_NAMES[what]}" for what in _COSTS[worst])
    return f"{worst_costs}. {_ADVICE[worst]}"
