"""Submits a job to a cluster, removes it, and changes its number of trainers.

The trainers' Job is created first, because an owner must exist before the objects that it owns. It is suspended and
marked as incomplete. When all other objects exist, the mark is removed, and the Job is resumed or gets the label of its
queue, which then decides when it starts.

A submission that fails or is interrupted deletes its Job, and with it the objects that the Job owns. If the mark is
left, the next submission knows that the previous one was killed.

The cluster's garbage collector identifies objects by UID and works in the background, so it may still delete an object
that has been applied again. Therefore a job starts only after all of its predecessor's objects are gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from flightedl.errors import FlightedlError, NotFoundError, UnavailableError, UsageError
from flightedl.launch.kubernetes.objects import owned
from flightedl.launch.kubernetes.pods import Object
from flightedl.launch.kubernetes.views import INSTANCE, QUEUE, JobView, labels_of, view_of
from flightedl.ports import Clock, Cluster

_POLL_S = 0.5
#: Maximum number of seconds until a job's objects are gone, in addition to its pods' longest grace period.
_GONE_S = 120.0
#: Maximum duration, in seconds, of another submission with the same name. After this time it counts as killed.
_SUBMITTING_S = 15.0
#: Annotation of a Job whose other objects do not all exist yet.
INCOMPLETE = "flightedl/incomplete"
_CLAIM = "PersistentVolumeClaim"
#: Kinds of a job's objects, including those that controllers create for the job.
_KINDS = (
    "Job,Deployment,StatefulSet,Pod,ConfigMap,Secret,Service,ServiceAccount,NetworkPolicy,PodDisruptionBudget," + _CLAIM
)
#: Kinds of objects that only jobs with an autoscaler have. Some users may not list the last two.
_KINDS_WITH_RIGHTS = f"{_KINDS},Role,RoleBinding"


def submit(cluster: Cluster, objects: Sequence[Object], clock: Clock) -> None:
    """Apply all objects of a job, starting with their owner.

    Raises:
        UsageError: a job of this name exists and has not ended, or the cluster rejects an object.
    """
    owner, *others = objects
    kind, name = owner["kind"], owner["metadata"]["name"]
    _make_room(cluster, owner["metadata"]["labels"][INSTANCE], clock)
    # Omit the queue's label at first, because a queue could admit the trainers as soon as it sees them.
    labels = owner["metadata"]["labels"]
    queue = {QUEUE: labels[QUEUE]} if QUEUE in labels else {}
    draft = owner["metadata"] | {
        "annotations": {INCOMPLETE: "true"},
        "labels": {name: value for name, value in labels.items() if name != QUEUE},
    }
    uid = ""
    try:
        (made,) = cluster.apply([owner | {"metadata": draft, "spec": owner["spec"] | {"suspend": True}}])
        uid = made["metadata"]["uid"]
        cluster.apply(owned(others, made, uid))
        # The UID makes sure that no other submission's Job is deleted.
        complete = {"uid": uid, "annotations": {INCOMPLETE: None}, "labels": queue}
        cluster.patch(kind, name, {"metadata": complete, "spec": {} if queue else {"suspend": False}})
    except BaseException:
        with contextlib.suppress(FlightedlError):
            known = cluster.get(kind, name)
            if known is not None and uid in {"", known["metadata"]["uid"]}:
                cluster.delete(kind, name)
        raise


def _make_room(cluster: Cluster, job: str, clock: Clock) -> None:
    """Remove the objects of an earlier job of this name that has ended, or whose submission was killed.

    Raises:
        UsageError: the job is running, or has objects that no Job owns.
    """
    deadline = clock.now() + _SUBMITTING_S
    while (known := _job(cluster, job)) is not None and _is_incomplete(known) and clock.now() < deadline:
        clock.sleep(_POLL_S)
    if known is not None and not (_is_incomplete(known) or _is_going(known) or view_of(known).is_finished):
        raise UsageError(
            f"job {job} exists already: end it with `flightedl cancel {job}`, or choose another name (--job)"
        )
    # On a cluster without support for retention policies of volume claims, an etcd's claims have no owner.
    kinds = _kinds(cluster, job)
    left = cluster.list(kinds, labels_of(job))
    kept = [each for each in left if _is_unowned(each) and each["kind"] not in {"Job", _CLAIM}]
    if kept:
        raise UsageError(
            f"there are objects of a job {job} that were not submitted ({_names(kept)}): "
            f"remove them with `flightedl cancel {job}`, or choose another name (--job)"
        )
    _remove(cluster, job, kinds, clock)


def scale(cluster: Cluster, job: str, trainers: int) -> JobView:
    """Change the number of trainers. Trainers that are removed return their work to the master.

    Raises:
        NotFoundError: there is no such job.
        UsageError: it has ended.
    """
    view = find(cluster, job)
    if view.is_finished:
        raise UsageError(f"job {job} has ended, so its trainers cannot be scaled")
    return view_of(cluster.patch("Job", view.name, {"spec": {"parallelism": trainers}}))


def cancel(cluster: Cluster, job: str, clock: Clock, *, at_once: bool = False) -> None:
    """End a job and remove it: first the trainers, then the pservers, which write a checkpoint, then everything else.

    Returns when all objects of the job are gone.

    Args:
        cluster: The job's cluster.
        job: The job's name.
        clock: Paces the waiting.
        at_once: Do not wait for a last checkpoint.

    Raises:
        NotFoundError: there is no such job.
    """
    known, kinds = _job(cluster, job), _kinds(cluster, job)
    if known is None and not cluster.list(kinds, labels_of(job)):
        raise _unknown(job)
    if known is not None and not at_once and not view_of(known).is_finished:
        # Delete the autoscaler first, because it would add trainers again.
        cluster.delete("Deployment", f"{job}-autoscaler")
        cluster.patch("Job", _name(job), {"spec": {"parallelism": 0}})
        _wait_for_the_end_of(cluster, job, "trainer", clock)
        cluster.delete("Deployment", f"{job}-pserver")
        _wait_for_the_end_of(cluster, job, "pserver", clock)
    _remove(cluster, job, kinds, clock)


def find(cluster: Cluster, job: str) -> JobView:
    """Return the job with this name. Raises NotFoundError if there is none."""
    found = _job(cluster, job)
    if found is None:
        raise _unknown(job)
    return view_of(found)


def _remove(cluster: Cluster, job: str, kinds: str, clock: Clock) -> None:
    """Delete a job's Job and all objects without an owner, then wait until all objects are gone."""

    def left() -> list[dict[str, Any]]:
        found = cluster.list(kinds, labels_of(job))
        for each in found:
            if _is_unowned(each) and not _is_going(each):
                cluster.delete(each["kind"], each["metadata"]["name"])
        return found

    _wait_until_none(left, clock)


def _wait_for_the_end_of(cluster: Cluster, job: str, role: str, clock: Clock) -> None:
    def running() -> list[dict[str, Any]]:
        pods = cluster.list("Pod", labels_of(job, role))
        return [pod for pod in pods if pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}]

    _wait_until_none(running, clock)


def _wait_until_none(ask: Callable[[], Sequence[Object]], clock: Clock) -> None:
    """Poll until no object is left. Raises UnavailableError if this takes too long."""
    begun, grace_s = clock.now(), 0
    while left := ask():
        pods = (each["spec"] for each in left if each["kind"] == "Pod" and "spec" in each)
        grace_s = max([grace_s, *(pod.get("terminationGracePeriodSeconds", 0) for pod in pods)])
        waited_s = clock.now() - begun
        if waited_s >= _GONE_S + grace_s:
            raise UnavailableError(f"waited {waited_s:.0f} s for {_names(left)} to end")
        clock.sleep(_POLL_S)


def _names(objects: Sequence[Object]) -> str:
    return ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in objects[:3])


def _kinds(cluster: Cluster, job: str) -> str:
    has_rights = cluster.get("ServiceAccount", f"{job}-autoscaler") is not None
    return _KINDS_WITH_RIGHTS if has_rights else _KINDS


def _job(cluster: Cluster, job: str) -> dict[str, Any] | None:
    return cluster.get("Job", _name(job))


def _name(job: str) -> str:
    return f"{job}-trainer"


def _unknown(job: str) -> NotFoundError:
    return NotFoundError(f"there is no job {job} in this namespace: `flightedl jobs` lists the existing ones")


def _is_incomplete(known: Object) -> bool:
    return INCOMPLETE in known["metadata"].get("annotations", {})


def _is_going(each: Object) -> bool:
    return "deletionTimestamp" in each["metadata"]


def _is_unowned(each: Object) -> bool:
    return not each["metadata"].get("ownerReferences")
