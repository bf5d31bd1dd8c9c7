"""Judges a simulated run: what is wrong with what its processes did, said and computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.simulation.cluster import RESTARTED, Cluster
from tests.simulation.programs import PARAMETERS, Array, Programs
from tests.simulation.scenario import Scenario

_INCIDENT = re.compile(r"incident=\w+")
_REFUSED = "cannot store checkpoints"
_TRACEBACK = "Traceback (most recent call last)"
#: Work that a pserver has lost is repeated.
_REPEATED = re.compile(r"tasks_to_repeat=[1-9]")
_MISSING = "repeating work that was reported as done"
_CLOSE = 1e-3
#: Number of wrong values that are described.
_NAMED = 6


def problems(cluster: Cluster, programs: Programs, recorded: Path) -> list[str]:
    """Describe everything that is wrong, one sentence each. The run has ended by itself."""
    from tests.simulation import bounds, ranks, stored

    pointer = cluster.etcd.store.entries.get(programs.pointer_key())
    saved = None if pointer is None else pointer.value
    scenario = programs.scenario
    is_short = scenario.stop_at_s > 0
    if cluster.launcher is not None:
        return [
            *_of_processes(cluster),
            *ranks.problems(cluster.launcher, scenario, cluster.etcd.store.entries[programs.group_key()].value),
            *_of_evaluations(programs),
            *_of_replays(recorded),
            *_of_batches(recorded, may_be_empty=True, may_lack_losses=False, has_blocks=False),
        ]
    # The contents of checkpoints are known only if each element has one update, and all of them.
    has_others = scenario.repeats or scenario.eviction or scenario.grows or scenario.poison or scenario.deadly
    is_plain = not (has_others or cluster.has_gone_back)
    return [
        *_of_processes(cluster),
        *bounds.problems(programs.scenario, cluster.told.lines),
        *_of_values(programs, has_repeated=any(_REPEATED.search(line) for line in cluster.told.lines)),
        *_of_losses(programs),
        *_of_replays(recorded),
        *_of_batches(recorded, may_be_empty=is_short, may_lack_losses=_may_lack_losses(cluster)),
        *(stored.problems(cluster.store, programs.scenario, saved, programs.results) if is_plain else ()),
        *(() if cluster.has_gone_back else stored.of_copies(cluster.store, scenario, programs.copies)),
        *(stored.of_saves(cluster.store, scenario, programs.results) if scenario.saves and not is_short else ()),
    ]


def crashes(cluster: Cluster) -> list[str]:
    """Return the last line of each crash, and of each incident and traceback in the logs."""
    found = [f"crash: {each.strip().splitlines()[-1]}" for each in cluster.told.crashes]
    found += cluster.etcd.store.problems
    for line in cluster.told.lines:
        if _INCIDENT.search(line):
            first, _, trace = line.partition("\n")
            found.append(f"incident: {_INCIDENT.sub('', first[24:])} {trace.strip().rpartition(chr(10))[2]}")
        elif _TRACEBACK in line and " CRASH " not in line:
            found.append(f"traceback: {line.partition(chr(10))[0][24:]} {line.strip().rpartition(chr(10))[2]}")
        if _MISSING in line:
            # The audit repeats the work, and hides the bug.
            found.append(f"lost work: {line[24:]}")
    return sorted(set(found))


def _of_processes(cluster: Cluster) -> list[str]:
    """Servers that are asked to end do so with 0, or with 75 after a fault. No process makes a usage error.

    If no sound checkpoint is left, pservers end the job with 3.
    """
    good = {0, 75} if cluster.scenario.strikes else {0}
    if cluster.has_gone_back:
        # After the end of the job, nobody is left to go on from a checkpoint.
        good.add(3)
    found = [
        f"{each.name} ended with {each.result!r}: {each.said}"
        for each in cluster.last_servers
        if each.result not in good and each.role != "standby"
    ]
    good = {0, 75, 3} if cluster.store.has_damage else {0, 75}
    if cluster.scenario.poison:
        # Poison ends the script that reads it.
        good.add(1)
    if cluster.has_gone_back:
        good.add(3)
    for each in cluster.told.ends:
        if each.group_start is not None and each.result == 1 and each.said.startswith("PeerError"):
            continue
        # A master tries the store out before a job begins.
        is_refused = each.result == 2 and _REFUSED in each.said and cluster.store.failure_count
        if each.role in RESTARTED and each.result not in good and not is_refused:
            found.append(f"{each.name} ended with {each.result!r}: {each.said}")
        if each.result != 0 and (not each.said or "\n" in each.said):
            found.append(f"{each.name} ended with {each.result!r}, and did not say why in one sentence: {each.said}")
    return [*found, *(f"a thread was left: {each}" for each in cluster.told.left)]


def _of_values(programs: Programs, *, has_repeated: bool) -> list[str]:
    """Each element has the gradient of its one batch, once, in all parameters alike."""
    scenario = programs.scenario
    found = [_wrong_values(values, scenario, has_repeated=has_repeated) for values in programs.results]
    if len(programs.results) < scenario.trainers:
        found.append(f"{len(programs.results)} of {scenario.trainers} trainers read the final values")
    found += _of_evaluations(programs)
    return [each for each in found if each]


def _of_evaluations(programs: Programs) -> list[str]:
    mean = (programs.scenario.records - 1) / 2
    return [f"an evaluation is {each}, not {mean}" for each in programs.metrics if abs(each["k"] - mean) > 1e-6]


def _wrong_values(values: Array, scenario: Scenario, *, has_repeated: bool) -> str:
    """Describe values that are wrong; empty if none are."""
    dense = len(PARAMETERS)
    expected = scenario.value_after(scenario.updates)
    right = abs(values - expected) < _CLOSE
    if scenario.depends_on_values and has_repeated:
        # A batch that is repeated, and one of a later epoch, may both be computed from the values before them.
        right |= (values >= scenario.updates) & (values <= expected) & (values == values.round())
    if scenario.stop_at_s or scenario.poison or scenario.deadly:
        for updates in range(scenario.updates):
            right |= abs(values - scenario.value_after(updates)) < _CLOSE
        if right.all() and np.ptp(values[:dense], axis=0).max() > _CLOSE:
            return "some parameters have batches that others have not"
    if scenario.grows:
        # Files join the present epoch, not earlier ones.
        right[:, :-1] |= values[:, :-1] == 0.0
    if scenario.eviction == "versions":
        # A row that was evicted may have begun again.
        for updates in range(scenario.updates):
            right[dense:] |= abs(values[dense:] - scenario.value_after(updates)) < _CLOSE
    elif scenario.eviction == "epochs" and not scenario.repeats:
        # Rows of the last two epochs are in use.
        right[dense:, :-2] |= values[dense:, :-2] == 0.0
    wrong = values[~right]
    counts = zip(*np.unique(wrong, return_counts=True), strict=True)
    named = [(round(float(value), 3), int(count)) for value, count in counts]
    return f"values that should be {expected}: (value, count) {named[:_NAMED]}" if named else ""


def _of_losses(programs: Programs) -> list[str]:
    """Poison is set aside, and nothing else if nothing else fails."""
    scenario = programs.scenario
    if not (scenario.poison or scenario.deadly):
        return [f"{count} records were set aside" for count in programs.lost_records if count]
    if scenario.stop_at_s:
        return []
    poison = (*scenario.poison, *scenario.deadly)
    goals = np.array([scenario.value_after(updates) for updates in range(scenario.updates + 1)])
    found: list[str] = []
    for values, told in zip(programs.results, programs.lost_records, strict=True):
        updates = abs(values[0][..., None] - goals).argmin(axis=-1)
        # Files join the present epoch, so earlier ones lack more.
        missing = int((scenario.updates - updates[-1:] if scenario.grows else scenario.updates - updates).sum())
        if present := sorted(record for record in poison if updates[:, record].any()):
            found.append(f"records {present} are poison, but were trained on")
        if missing > told or (missing < told and not (scenario.strikes or scenario.grows)):
            found.append(f"{missing} updates are missing, but {told} records were set aside")
        if not scenario.strikes and told > scenario.batch_size * scenario.epochs * len(poison):
            found.append(f"{told} records were set aside for {len(poison)} poison ones")
    return found


def _may_lack_losses(cluster: Cluster) -> bool:
    """True if a master may have died before it had recorded that it has set a batch aside. ``_of_losses`` knows it."""
    has_poison = bool(cluster.scenario.poison or cluster.scenario.deadly)
    return has_poison and any(" KILL    master" in line for line in cluster.told.lines)


def _of_replays(recorded: Path) -> Iterator[str]:
    """Each recorded core decides the same again, and checks its invariants after each event."""
    from flightedl.recording.reader import recordings_in
    from flightedl.recording.replay import replay

    for recording in recordings_in(recorded):
        found = replay(recording).difference
        if found is not None:
            last = found.trace.strip().rpartition("\n")[2] or f"{found.actual}, not {found.expected}"
            yield f"event {found.number} of {found.process} ({found.core} {found.event}), replayed: {last}"


def _of_batches(recorded: Path, *, may_be_empty: bool, may_lack_losses: bool, has_blocks: bool = True) -> list[str]:
    """Every block applied every batch once, according to the recordings."""
    from flightedl.recording.account import account
    from flightedl.recording.reader import recordings_in

    found = account(recordings_in(recorded))
    if bool(found.blocks) != has_blocks or not (found.expected or may_be_empty):
        return ["the recordings name no blocks or batches"]
    findings = {kind: text for kind, text in found.findings.items() if not (kind == "lost" and may_lack_losses)}
    return [f"account: {sentence}" for sentence in findings.values()]
