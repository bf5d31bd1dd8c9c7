"""The control loop that adds and removes trainers, and adds pservers if it may.

The loop stores nothing: after a restart, it begins with the current number of trainers and measures again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flightedl.domain.diagnosis.servers import load_of
from flightedl.domain.scaling.marginal import MarginalScaling, Seen, Wish
from flightedl.domain.scaling.pservers import PserverScaling
from flightedl.errors import FlightedlError
from flightedl.launch.kubernetes.submitting import find, scale
from flightedl.launch.kubernetes.views import is_being_evicted, labels_of
from flightedl.messages.scaling import ScaleReply
from flightedl.messages.status import StatusReply
from flightedl.ports import Clock, Cluster

Read = Callable[[], StatusReply]


def look(cluster: Cluster, job: str, read: Read) -> tuple[Seen, StatusReply] | None:
    """Return the figures on which scaling decisions are based, and the job's status. None if the job has ended.

    Raises:
        FlightedlError: the cluster or the master does not answer.
    """
    view = find(cluster, job)
    if view.is_finished:
        return None
    leaving = sum(map(is_being_evicted, cluster.list("Pod", labels_of(job, "trainer"))))
    status = read()
    tasks = status.tasks
    is_last = status.epochs is not None and status.epoch + 1 >= status.epochs
    return Seen(
        records=status.records,
        running=len(status.trainers),
        wanted=view.wanted,
        leaving=leaving,
        tasks_left=tasks.todo + tasks.pending if is_last and not status.is_growing else None,
        is_training=status.state == "training" and tasks.todo + tasks.pending > 0,
    ), status


class PserverLoop:
    """Part of the loop that adds pservers.

    Args:
        scaling: Decides when pservers are added.
        grow: Adds pservers, and returns the outcome.
    """

    def __init__(self, scaling: PserverScaling, grow: Callable[[int], ScaleReply]) -> None:
        self._scaling = scaling
        self._grow = grow
        self._profile: dict[str, float] = {}

    def look(self, status: StatusReply, now: float) -> str:
        """Add pservers if they limit the job. Return a sentence about it, or an empty string.

        Raises:
            FlightedlError: the pservers cannot be changed.
        """
        recent = {part: seconds - self._profile.get(part, 0.0) for part, seconds in status.profile.items()}
        self._profile = dict(status.profile)
        load = load_of(status, recent) if min(recent.values(), default=-1.0) >= 0 else None
        wanted = None if load is None or status.scaling is not None else self._scaling.look(load, now)
        if load is None or wanted is None:
            return ""
        reply = self._grow(wanted)
        if reply.is_given_up:
            self._scaling.failed(now)
        return f"{load.pservers} -> {wanted} pservers, because they limit the throughput: {reply.text}"


def run(
    cluster: Cluster,
    job: str,
    read: Read,
    scaling: MarginalScaling,
    clock: Clock,
    stop: threading.Event,
    say: Callable[[str], None],
    every_s: float,
    pservers: PserverLoop | None = None,
) -> None:
    """Measure and scale until the job has ended or ``stop`` is set. ``pservers`` is None if pservers do not change."""
    shown = ""
    while not stop.wait(every_s):
        try:
            if (found := look(cluster, job, read)) is None:
                say(f"job {job} has ended")
                return
            seen, status = found
            wish = scaling.look(seen, clock.now())
            shown = _carry_out(cluster, job, seen, wish, say, shown)
            if pservers is not None and (text := pservers.look(status, clock.now())):
                say(text)
        except FlightedlError as error:
            # Without figures, nothing is changed.
            if str(error) != shown:
                say(str(error))
            shown = str(error)


def _carry_out(cluster: Cluster, job: str, seen: Seen, wish: Wish, say: Callable[[str], None], shown: str) -> str:
    if wish.trainers != seen.wanted:
        scale(cluster, job, wish.trainers)
        say(f"{seen.wanted} -> {wish.trainers} trainers: {wish.reason}")
    elif wish.reason != shown:
        say(f"{wish.trainers} trainers: {wish.reason}")
    return wish.reason
