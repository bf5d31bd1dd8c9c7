"""Rules about trainers: who waits for whom, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity, Wait
from flightedl.domain.diagnosis.observations import Observations
from flightedl.messages.status import StatusReply, TrainerStatus

BROKEN, HARMFUL, NOTE = Severity

#: Who waits for so long is told of.
WAITS_S = 3.0
#: A trainer says something every 5 s; one that has not for so long stands still as a whole.
_SILENT_S = 12.0
#: A batch that takes longer than this, and so many times longer than those of others, holds them up.
_BATCH_S = 10.0
_SLOW_FACTOR = 3.0
_PSERVER = re.compile(r"pserver (\d+)")

#: What a trainer does that waits for a parameter server, or by way of it for others: its script is not at work.
_WITH_SERVERS = "push"


def waits(seen: Observations) -> list[Wait]:
    """Who waits for whom now, the longest first."""
    found: list[Wait] = []
    status = seen.status
    names = {} if status is None else {trainer.trainer: name_of(trainer) for trainer in status.trainers}
    if status is not None and status.waiting_for and status.state != "done":
        found.append(Wait("job", status.waiting_for.removeprefix("waiting for ")))
    for server in () if status is None else status.pservers:
        if server.waits_for and server.waits_s >= WAITS_S:
            awaited = ", ".join(names.get(each, each) for each in server.waits_for)
            found.append(Wait(f"round {server.waits_at} of pserver-{server.index}", awaited, server.waits_s))
    found.extend(
        Wait(name_of(trainer), trainer.waiting_for.removeprefix("waiting for "))
        for trainer in (() if status is None else status.trainers)
        if trainer.waiting_for
    )
    return sorted(found, key=lambda wait: -(wait.seconds or 0.0))


def name_of(trainer: TrainerStatus) -> str:
    """What people call it."""
    return f"{trainer.name} ({trainer.trainer})" if trainer.name else trainer.trainer


def trainers(seen: Observations) -> Iterator[Finding]:
    """Whether trainers get on."""
    status = seen.status
    if status is None or status.state == "done":
        return
    if not status.trainers:
        yield Finding(
            Cause.NO_TRAINERS,
            BROKEN,
            "job",
            "no trainer is registered: nobody works",
            "Start some: your script with fe.connect(), with the same FLIGHTEDL_ETCD and FLIGHTEDL_JOB.",
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
            f"the change of the mode waits for {status.mode_change}",
            "It begins at a round that all pservers agree on: see why that one does not answer.",
        )


def _held_up(status: StatusReply) -> dict[str, float]:
    """Trainer -> how long others have been waiting for it."""
    found: dict[str, float] = {}
    for server in status.pservers:
        for trainer in server.waits_for if server.waits_s >= WAITS_S else ():
            found[trainer] = max(found.get(trainer, 0.0), server.waits_s)
    return found


def _still(seen: Observations, trainer: TrainerStatus, held_up: dict[str, float]) -> Iterator[Finding]:
    status = seen.status
    assert status is not None, "its trainers are looked at"
    who, stack = trainer.trainer, seen.stacks.get(trainer.trainer, "")
    waited = f"; others wait for it for {held_up[who]:.0f} s" if who in held_up else ""
    if trainer.silent_s > _SILENT_S:
        yield Finding(
            Cause.TRAINER_STANDS_STILL,
            BROKEN if waited else HARMFUL,
            who,
            f"{name_of(trainer)} has said nothing for {trainer.silent_s:.0f} s though its lease is alive: the "
            f"process is stopped, or its machine is, or something holds Python's lock all the time{waited}",
            f"Look at process {trainer.pid} on {trainer.host or 'its machine'} (state T is stopped: kill -CONT), or "
            "kill it: its work goes to others as soon as its lease ends.",
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
            f"{name_of(trainer)} is at one batch for {batch_s:.0f} s{waited}; its script is {where}",
            "If that is its machine, see what else runs there; if it is one batch, make batches more alike. "
            "Sync(backup=1) lets rounds close without the slowest, Async and Bounded do not wait.",
            stack,
        )


def _innermost(stack: str) -> str:
    """What the main thread does, in a few words."""
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
            f"{name_of(trainer)} waits for {trainer.waiting_for}, and pserver-{index} answers here: the way between "
            "the two is cut",
            f"See that {trainer.host or 'its machine'} may connect to {address}: a firewall, a network policy, or an "
            "--advertise address that is right for some machines only.",
        )


def _stuck(seen: Observations, status: StatusReply) -> Iterator[Finding]:
    """Rounds that wait for somebody that nothing else is known of, or that waits for the round itself."""
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
                f"pserver-{index}",
                f"round {reply.waits_at} of pserver-{index} waits for {reply.waits_s:.0f} s for members that the "
                "master does not have: the view that says that they have left has not come there",
                "See that the master reaches the pserver; if it does, restart the pserver: it gets the newest view.",
            )
        elif idle:
            yield Finding(
                Cause.ROUND_STUCK,
                BROKEN,
                f"pserver-{index}",
                f"round {reply.waits_at} of pserver-{index} waits for {reply.waits_s:.0f} s for {', '.join(idle)}, "
                "which hold no work",
                "Restart the master: pushes go on meanwhile. If it happens again, please report it with --report.",
            )
