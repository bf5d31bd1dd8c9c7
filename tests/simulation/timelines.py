"""Timelines of docs/recovery.md: what the processes of a calm job log around one fault, in plain English.

``python -m tests.simulation --timelines`` prints them. ``pytest --rewrite tests/docs/test_timelines.py`` writes them to
the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.simulation import runs
from tests.simulation.scenario import Strike, Wanted

_FAULT_S = 9.0
#: A timeline ends so many seconds after the fault, except for the end of the job.
_SHOWN_S = 9.0
#: Lines within this time that differ only in their process become one.
_TOGETHER_S = 0.3
_JOB = {"epochs": 1, "records": 512, "batch_s": 1.0, "checkpoint_every_s": 3.0, "lease_ttl_s": 5.0}
_JOB |= {"trainers": 2, "pservers": 2, "masters": 1, "has_presence": True}
#: Heading of a timeline -> (seed; kind, role and extent of its fault; what differs from ``_JOB``).
TIMELINES: dict[str, tuple[int, tuple[str, str, float], dict[str, float]]] = {
    "A trainer is killed": (1, ("kill", "trainer", 1.0), {}),
    "A pserver is killed": (1, ("kill", "pserver", 1.0), {}),
    "A pserver with a standby is killed": (6, ("kill", "pserver", 1.0), {"standbys": 1}),
    "The master is killed": (1, ("kill", "master", 20.0), {"masters": 2}),
    "A trainer's machine freezes for 8 s": (1, ("freeze", "trainer", 8.0), {}),
    "etcd does not answer for 3 s": (1, ("etcd down", "master", 3.0), {}),
}
#: Kind of a fault -> what a timeline says when it begins, and when it ends.
_FAULTS = {
    "kill": ("is killed", "is started in its place"),
    "freeze": ("freezes", "wakes up"),
    "etcd down": ("does not answer", "answers again"),
}
_CHECKPOINT, _END = "checkpoint {} is complete", "the job is done"
_TRAINER = r"trainer=(\w+)-\w+"
#: What a process logs -> what a timeline says. All other lines are left out.
_SAYS = {
    r"checkpoint complete number=(\d+)": _CHECKPOINT,
    rf"trainer is gone {_TRAINER} .*held=(\d+)": "{} is gone: {} tasks return to the queue",
    rf"presumed dead, .*: {_TRAINER}": "presumes {} dead, because its connections have closed",
    r"presumed dead, .*: index=(\d+)": "presumes pserver {} dead, because its connections have closed",
    rf"trainer registered {_TRAINER}": "sees the registration of {}",
    rf"trainer left the rounds {_TRAINER}": "rounds no longer wait for {}",
    rf"trainer joined the rounds {_TRAINER}": "rounds wait for {} from now on",
    r"pserver is gone index=(\d+)": "pserver {} is gone",
    r"checkpoints: pserver (\d+) was lost .* checkpoint (\d+)": "gives up checkpoint {1}, because pserver {0} is lost",
    r"pserver is settled index=(\d+) .*repeat=([1-9]\d*)": "puts {1} tasks back, because pserver {0} lacks batches",
    r"a master has taken over": "takes over, with the queue that is stored in etcd",
    r"acquired the lock": "gets the master's lock",
    r"Cannot save state": "cannot save the queue, so it assigns no tasks",
    r"waiting for a free index": "waits for the index of a lost pserver",
    r"pserver ready index=": "gets the index",
    r"restored checkpoint=(\d+)": "loads its blocks from checkpoint {}",
    r"no copy of pserver (\d+) has arrived": "cannot reach pserver {}, whose blocks it copies",
    r"took over the blocks of pserver (\d+)": "takes its copy of the blocks of pserver {}",
    r"serving election": "serves its blocks",
    r"a lease could not be renewed": "cannot renew the lease",
    r"\w+ (?:exits|ends): ": "exits, because the lease is lost",
    r"the job is done": _END,
}
_LINE = re.compile(r" *([0-9.]+) (\S+) +(?:INFO|WARNING|ERROR) +\S+: (.*)")
_PROCESS = re.compile(r"\b([a-z]+)-(\d+)[.-](\d{3})\b")


@dataclass(slots=True)
class _Said:
    at_s: float
    processes: set[str]
    says: str
    about: list[str]

    def takes(self, other: _Said) -> bool:
        """Add an equal line, or one about another process, and return True. False if it is different."""
        is_same, is_soon = other.processes <= self.processes, other.at_s - self.at_s < _TOGETHER_S
        if other.says != self.says or not (is_soon or (is_same and other.about == self.about)):
            return False
        if other.about == self.about:
            self.processes |= other.processes
            return True
        if is_same and len(self.about) == 1:
            self.about = [" and ".join(sorted({*self.about[0].split(" and "), *other.about}))]
        return is_same and len(self.about) == 1

    def __str__(self) -> str:
        return self.says.format(*self.about).replace(" 1 tasks return ", " 1 task returns ")


def timeline(heading: str) -> str:
    """Run the job of a timeline, and return its lines. Must be called in a warm process."""
    seed, (kind, role, extent), changes = TIMELINES[heading]
    strikes = (Strike(0, _FAULT_S, kind, role, 0, extent),)
    changes = _JOB | changes
    wanted = Wanted(faults=False, is_exact=True, mode="sync", optimizer="sgd", changes=changes, strikes=strikes)
    outcome = runs.run_forked(seed, wanted, keeps_log=True)
    assert outcome.is_good, str(outcome)
    struck = "etcd" if kind == "etcd down" else f"{role} 0"
    begins, ends = _FAULTS[kind]
    again = f"new {struck}" if kind == "kill" else struck
    faults = [_Said(_FAULT_S, {struck}, begins, []), _Said(_FAULT_S + extent, {again}, ends, [])]
    shown = _chosen(sorted([*_said(outcome.log), *faults], key=lambda each: each.at_s))
    names = [", ".join(sorted(each.processes)) if len(each.processes) < 4 else "all processes" for each in shown]
    width = max(map(len, names))
    return "\n".join(f"{e.at_s - _FAULT_S:5.1f} s  {name:{width}}  {e}" for e, name in zip(shown, names, strict=True))


def _said(log: list[str]) -> Iterator[_Said]:
    """Yield what timelines may show. Processes that were started in the place of others are new."""
    first: dict[tuple[str, str], str] = {}
    for role, index, pid in sorted(_PROCESS.findall("\n".join(log)), key=lambda each: each[2]):
        first.setdefault((role, index), pid)

    def name(found: re.Match[str]) -> str:
        return f"{'' if first[found[1], found[2]] == found[3] else 'new_'}{found[1]}_{found[2]}"

    for line in log:
        if found := _LINE.fullmatch(_PROCESS.sub(name, line)):
            for pattern, says in _SAYS.items():
                if matched := re.match(pattern, found[3]):
                    about = [each.replace("_", " ") for each in matched.groups()]
                    yield _Said(float(found[1]), {found[2].replace("_", " ")}, says, about)


def _chosen(said: Iterable[_Said]) -> list[_Said]:
    """Return the newest checkpoint before the fault, what is said soon after it, and the end."""
    shown: list[_Said] = []
    for each in said:
        if each.at_s < _FAULT_S:
            shown = [each] if each.says == _CHECKPOINT else shown
        elif each.says == _END or each.at_s < _FAULT_S + _SHOWN_S:
            is_next = each.says == shown[-1].says == _CHECKPOINT
            if not (is_next or any(other.takes(each) for other in shown)):
                shown.append(each)
    return shown
