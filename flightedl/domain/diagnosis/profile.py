"""Where the time of trainers goes, in words, with one sentence of advice."""

from __future__ import annotations

from collections.abc import Mapping

#: Less than this many seconds in all tell nothing.
_ENOUGH_S = 2.0
#: A part of the time from which on there is something to be gained.
_MUCH = 0.4

_NAMES = {"data": "waits for data", "script": "in the script", "servers": "with the parameter servers"}
_ADVICE = {
    "data": (
        "read fewer columns (columns=), keep the files nearer, or cut them into more chunks (`flightedl dataset split`)"
    ),
    "servers": (
        "larger batches, wire='bfloat16', Async(push_every=) or more pservers make it less; `flightedl doctor` says "
        "whether rounds wait for a slow trainer"
    ),
}


def shares(profile: Mapping[str, float]) -> dict[str, float]:
    """The parts, which together are 1; empty: too little is known."""
    total = sum(profile.get(what, 0.0) for what in _NAMES)
    if total < _ENOUGH_S:
        return {}
    return {what: profile.get(what, 0.0) / total for what in _NAMES}


def in_words(profile: Mapping[str, float]) -> str:
    """The parts for people; empty: too little is known."""
    return ", ".join(f"{part:.0%} {_NAMES[what]}" for what, part in shares(profile).items())


def advice(profile: Mapping[str, float]) -> str:
    """What to try; empty: nothing is to be gained, or too little is known."""
    parts = shares(profile)
    worst = max(_ADVICE, key=lambda what: parts.get(what, 0.0))
    part = parts.get(worst, 0.0)
    return f"{part:.0%} {_NAMES[worst]}: {_ADVICE[worst]}" if part >= _MUCH else ""
