"""Brings a job to a cluster, takes it away again, and changes how many trainers it has.

The trainers' Job is created first, suspended: it owns everything else, whose owner has to be there before. When all is
there it goes on. So a submission that breaks off leaves nothing that a second one, or removing the Job, does not clear
away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flightedl.errors import FlightedlError, NotFoundError, UnavailableError, UsageError
from flightedl.launch.kubernetes.objects import owned
from flightedl.launch.kubernetes.pods import Object
from flightedl.launch.kubernetes.views import JobView, labels_of, view_of
from flightedl.ports import Clock, Cluster

_POLL_S = 0.5
#: How long a finished job of the same name may take to go.
_GONE_S = 120.0


def submit(cluster: Cluster, objects: Sequence[Object], clock: Clock) -> None:
    """Apply all objects of a job, its owner first.

    Raises:
        UsageError: a job of this name is there already and has not ended, or the cluster refuses an object.
    """
    owner, *others = objects
    kind, name = owner["kind"], owner["metadata"]["name"]
    known = cluster.get(kind, name)
    if known is not None:
        if not view_of(known).is_finished:
            raise UsageError(f"job {name} is there already: `flightedl cancel` ends it, or choose another name (--job)")
        cluster.delete(kind, name)
        wait_until(lambda: cluster.get(kind, name) is None, _GONE_S, f"the finished job {name} to go", clock)
    (made,) = cluster.apply([owner | {"spec": owner["spec"] | {"suspend": True}}])
    try:
        cluster.apply(owned(others, made, made["metadata"]["uid"]))
    except FlightedlError:
        cluster.delete(kind, name)
        raise
    cluster.patch(kind, name, {"spec": {"suspend": False}})


def scale(cluster: Cluster, job: str, trainers: int) -> JobView:
    """Have so many trainers from now on; those that are too many hand back what they hold.

    Raises:
        NotFoundError: there is no such job.
        UsageError: it has ended.
    """
    view = find(cluster, job)
    if view.is_finished:
        raise UsageError(f"job {job} has ended: there is nothing to train any more")
    return view_of(cluster.patch("Job", view.name, {"spec": {"parallelism": trainers}}))


def cancel(cluster: Cluster, job: str, clock: Clock, *, at_once: bool = False) -> None:
    """End a job and remove it: trainers first, then pservers, which leave a checkpoint, then everything else.

    Args:
        cluster: Where it runs.
        job: Its name.
        clock: Paces the waiting.
        at_once: Do not wait for a last checkpoint.

    Raises:
        NotFoundError: there is no such job.
    """
    view = find(cluster, job)
    if not at_once and not view.is_finished:
        # It would see to it that there are trainers again.
        cluster.delete("Deployment", f"{job}-autoscaler")
        cluster.patch("Job", view.name, {"spec": {"parallelism": 0}})
        _wait_for_the_end_of(cluster, job, "trainer", clock)
        cluster.delete("Deployment", f"{job}-pserver")
        _wait_for_the_end_of(cluster, job, "pserver", clock)
    cluster.delete("Job", view.name)


def find(cluster: Cluster, job: str) -> JobView:
    """The job of a name. NotFoundError: there is none."""
    name = f"{job}-trainer"
    found = cluster.get("Job", name)
    if found is None:
        raise NotFoundError(f"there is no job {job} in this namespace: `flightedl jobs` lists those that are there")
    return view_of(found)


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str, clock: Clock) -> None:
    """Ask until it is so. UnavailableError: it takes too long."""
    deadline = clock.now() + timeout_s
    while not is_so():
        if clock.now() >= deadline:
            raise UnavailableError(f"waited {timeout_s:.0f} s for {what}")
        clock.sleep(_POLL_S)


def _wait_for_the_end_of(cluster: Cluster, job: str, role: str, clock: Clock) -> None:
    def is_over() -> bool:
        pods = cluster.list("Pod", labels_of(job, role))
        return all(pod.get("status", {}).get("phase") in {"Succeeded", "Failed"} for pod in pods)

    wait_until(is_over, _GONE_S, f"{role}s to end", clock)
