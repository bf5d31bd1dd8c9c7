"""Rules about trainers, and a list of the current waits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity, Wait
from flightedl.domain.diagnosis.observations import Observations
from flightedl.messages.status import StatusReply, TrainerStatus

BROKEN, HARMFUL, NOTE = Severity

#: Shorter waits are not reported.
WAITS_S = 3.0
#: A trainer reports every 5 s. If it is silent for this many seconds, its whole process is considered frozen.
_SILENT_S = 12.0
#: A batch counts as slow if it takes longer than this many seconds and this many times as long as other trainers'
#: batches.
_BATCH_S = 10.0
_SLOW_FACTOR = 3.0
_PSERVER = re.compile(r"pserver (\d+)")

#: A trainer's activity while its script waits for a pserver, or waits at a pserver for other trainers.
_WITH_SERVERS = "push"


def waits(seen: Observations) -> list[Wait]:
    """Return the current waits, longest first."""
    found: list[Wait] = []
    status = seen.status
    names = {} if status is None else {trainer.trainer: name_of(trainer) for trainer in status.trainers}
    if status is not None and status.waiting_for and status.state != "done":
        found.append(Wait("job", status.waiting_for.removeprefix("waiting for ")))
    for server in () if status is None else status.pservers:
        if server.waits_for and server.waits_s >= WAITS_S:
            awaited = ", ".join(names.get(each, each) for each in server.waits_for)
            found.append(Wait(f"round {server.waits_at} of {server.name}", awaited, server.waits_s))
    found.extend(
        Wait(name_of(trainer), trainer.waiting_for.removeprefix("waiting for "))
        for trainer in (() if status is None else status.trainers)
        if trainer.waiting_for
    )
    return sorted(found, key=lambda wait: -(wait.seconds or 0.0))


def name_of(trainer: TrainerStatus) -> str:
    """Return a trainer's name for display."""
    return f"{trainer.name} ({trainer.trainer})" if trainer.name else trainer.trainer


def trainers(seen: Observations) -> Iterator[Finding]:
    """Check that the job has trainers, and that they make progress."""
    status = seen.status
    if status is None or status.state == "done":
        return
    if not status.trainers:
        yield Finding(
            Cause.NO_TRAINERS,
            BROKEN,
            "job",
            "no trainer is registered, so nothing is trained",
            "Start trainers: run your script with fe.connect() and the job's FLIGHTEDL_ETCD and FLIGHTEDL_JOB.",
        )
    held_up = _held_up(status)
    for trainer in status.trainers:
        yield from _still(seen, trainer, held_up)
        yield from _cut_off(seen, trainer)
    yield from _stuck(seen, status)
    if status.mode_change:
        yield Finding(
            Cause.MODE_CHANGE_WAITS,
            HARMFUL,
            "job",
            f"the change of mode is waiting for {status.mode_change}",
            "All pservers must agree on the round of the change. Find out why this one does not answer.",
        )


def _held_up(status: StatusReply) -> dict[str, float]:
    found: dict[str, float] = {}
    for server in status.pservers:
        for trainer in server.waits_for if server.waits_s >= WAITS_S else ():
            found[trainer] = max(found.get(trainer, 0.0), server.waits_s)
    return found


def _still(seen: Observations, trainer: TrainerStatus, held_up: dict[str, float]) -> Iterator[Finding]:
    status = seen.status
    assert status is not None, "the trainer comes from a status"
    who, stack = trainer.trainer, seen.stacks.get(trainer.trainer, "")
    waited = f"; others have waited {held_up[who]:.0f} s for it" if who in held_up else ""
    if trainer.silent_s > _SILENT_S:
        yield Finding(
            Cause.TRAINER_STANDS_STILL,
            BROKEN if waited else HARMFUL,
            who,
            f"{name_of(trainer)} has been silent for {trainer.silent_s:.0f} s although its lease is alive: the process "
            f"or its machine is stopped, or a thread never releases Python's global lock{waited}",
            f"Check process {trainer.pid} on {trainer.host or 'its machine'}: continue it with kill -CONT if its state "
            "is T, or kill it. Other trainers get its tasks when its lease expires.",
            stack,
        )
        return
    if trainer.waiting_for or not trainer.holding or (trainer.doing == _WITH_SERVERS and not waited):
        return
    batch_s = trainer.batch_s + trainer.silent_s
    others = [each.batch_s for each in status.trainers if each.trainer != who and not each.waiting_for]
    usual_s = median(others) if others else 0.0
    if waited or (batch_s > _BATCH_S and batch_s > _SLOW_FACTOR * max(usual_s, 1.0)):
        where = _innermost(stack)
        yield Finding(
            Cause.TRAINER_IS_SLOW,
            HARMFUL,
            who,
            f"{name_of(trainer)} has spent {batch_s:.0f} s on one batch{waited}; its script is {where}",
            "If its machine is slow, see what else runs there. If the batch is large, even out batch sizes. Rounds of "
            "Sync(backup=1) close without the slowest trainer; Async and Bounded do not wait for it.",
            stack,
        )


def _innermost(stack: str) -> str:
    for part in stack.split("\n\n"):
        lines = part.splitlines()
        if lines and lines[0] == "thread MainThread" and len(lines) > 1:
            return f"in {lines[-1].strip()}"
    return "at work"


def _cut_off(seen: Observations, trainer: TrainerStatus) -> Iterator[Finding]:
    found = _PSERVER.search(trainer.waiting_for)
    if found is None or not any(word in trainer.waiting_for for word in ("answer", "reach", "connect")):
        return
    index = int(found[1])
    if index in seen.replies and seen.pservers[index].seconds is not None:
        address = seen.pservers[index].address
        yield Finding(
            Cause.TRAINER_CUT_OFF,
            BROKEN,
            trainer.trainer,
            f"{name_of(trainer)} is waiting for {trainer.waiting_for}, but {seen.pserver(index)} answers this machine: "
            "the trainer cannot reach it",
            f"Check that {trainer.host or 'its machine'} can connect to {address}. Firewalls, network policies, or an "
            "--advertise address that is valid on some machines only may prevent it.",
        )


def _stuck(seen: Observations, status: StatusReply) -> Iterator[Finding]:
    """Report rounds that wait for members whose trainers are unknown or have no tasks."""
    alive = {trainer.trainer: trainer for trainer in status.trainers}
    for index, reply in sorted(seen.replies.items()):
        if not reply.waits_for or reply.waits_s < WAITS_S:
            continue
        names = next((each.waits_for for each in status.pservers if each.index == index), [])
        unknown = len(reply.waits_for) - len(names)
        dead = [name for name in names if name not in alive]
        idle = [name for name in names if name in alive and not alive[name].holding]
        if unknown > 0 or dead:
            yield Finding(
                Cause.ROUND_STUCK,
                BROKEN,
                seen.pserver(index),
                f"round {reply.waits_at} of {seen.pserver(index)} has waited {reply.waits_s:.0f} s for members that "
                "the master does not know: the view without them has not reached the pserver",
                "Check that the master can reach the pserver. If it can, restart the pserver to get the newest view.",
            )
        elif idle:
            yield Finding(
                Cause.ROUND_STUCK,
                BROKEN,
                seen.pserver(index),
                f"round {reply.waits_at} of {seen.pserver(index)} has waited {reply.waits_s:.0f} s for "
                f"{', '.join(idle)}, which hold no tasks",
                "Restart the master; pushes continue without it. If it happens again, please report it with --report.",
            )
