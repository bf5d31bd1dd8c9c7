"""Limits on the time that a job takes to recover from a single fault, in virtual seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from tests.simulation.scenario import Scenario, Strike

_LINE = re.compile(r" *([0-9.]+) (\S+) +(\S+) +(.*)", re.DOTALL)
_STRUCK = re.compile(r".* -> (?P<role>[a-z]+)-(?P<index>[0-9]+)\.(?P<pid>[0-9]+)")
#: Kind and role of the fault -> (event that ends the recovery, its limit beyond the time of the fault).
_LIMITS: dict[tuple[str, str], tuple[str, Callable[[Scenario, Strike], float]]] = {
    ("kill", "trainer"): (
        r"trainer is gone trainer=trainer-{index}-{pid}-",
        lambda scenario, _: scenario.lease_ttl_s + 1.5,
    ),
    ("kill", "pserver"): (
        r"pserver is settled index={index} ",
        lambda scenario, strike: max(scenario.lease_ttl_s, strike.extent) + 1.0,
    ),
    ("kill", "master"): (
        r"acquired the lock ",
        lambda scenario, strike: max(scenario.lease_ttl_s, strike.extent) + 1.0,
    ),
    ("etcd down", "master"): (r"master ready ", lambda _, strike: strike.extent + 5.0),
}


def problems(scenario: Scenario, lines: Iterable[str]) -> list[str]:
    """Describe a recovery that took too long, given the log. Return nothing unless one fault with a limit happens."""
    faults = scenario.strikes
    limit = _LIMITS.get((faults[0].kind, faults[0].role)) if len(faults) == 1 else None
    if limit is None or scenario.calm_after_s:
        return []
    event, seconds = limit
    allowed_s, began_s, pattern = seconds(scenario, faults[0]), math.inf, ""
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        at_s, _, level, text = float(found[1]), *found.groups()[1:]
        struck = _STRUCK.fullmatch(text) if level == "STRIKE" else None
        if struck is not None:
            began_s, pattern = at_s, event.format(**struck.groupdict())
        elif at_s > began_s and re.match(rf"\S+ {pattern}", text):
            return [] if at_s - began_s <= allowed_s else [f"{faults[0]}: recovered after {at_s - began_s:.2f} s"]
    return [] if math.isinf(began_s) else [f"{faults[0]}: never recovered"]
