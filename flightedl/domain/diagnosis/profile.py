"""Where the time of trainers goes, in words, with one sentence of advice."""

from __future__ import annotations

from collections.abc import Mapping

#: Less than this many seconds in all tell nothing.
_ENOUGH_S = 2.0
#: A part of the time from which on there is something to be gained.
_MUCH = 0.4
#: A smaller one is not told.
_SHOWN = 0.005

_NAMES = {
    "data": "waits for data",
    "script": "in the script",
    "push": "sends gradients",
    "wait": "waits for others of the round",
    "pull": "receives values",
}
#: What may be too much, and the parts that it has.
_COSTS = {"data": ("data",), "wait": ("wait",), "traffic": ("push", "pull")}
_ADVICE = {
    "data": (
        "read fewer columns (columns=), keep the files nearer, or cut them into more chunks (`flightedl dataset split`)"
    ),
    "wait": (
        "a round is as slow as its slowest trainer: `flightedl doctor` names it; make batches more alike, or do not "
        "wait for it: Sync(backup=), Bounded() or Async()"
    ),
    "traffic": "larger batches, wire='bfloat16', Async(push_every=) or more pservers make it less",
}


def shares(profile: Mapping[str, float]) -> dict[str, float]:
    """The parts, which together are 1; empty: too little is known."""
    total = sum(profile.get(what, 0.0) for what in _NAMES)
    if total < _ENOUGH_S:
        return {}
    return {what: profile.get(what, 0.0) / total for what in _NAMES}


def in_words(profile: Mapping[str, float]) -> str:
    """The parts for people; empty: too little is known."""
    return ", ".join(f"{part:.0%} {_NAMES[what]}" for what, part in shares(profile).items() if part >= _SHOWN)


def advice(profile: Mapping[str, float]) -> str:
    """What to try; empty: nothing is to be gained, or too little is known."""
    parts = shares(profile)
    costs = {cost: sum(parts.get(what, 0.0) for what in its) for cost, its in _COSTS.items()}
    worst = max(costs, key=lambda cost: costs[cost])
    if costs[worst] < _MUCH:
        return ""
    told = " and ".join(f"{parts[what]:.0%} {_NAMES[what]}" for what in _COSTS[worst])
    return f"{told}: {_ADVICE[worst]}"
