"""Change the number of a job's pservers on a cluster: the master moves blocks, and a Deployment provides the pods.

Pods are added before blocks move to them, and removed after their blocks have moved away. When pods are removed, the
cluster deletes those first that have neither an index nor a copy of a pserver's blocks, and standbys before pservers
with an index, as their annotations ask. If it deletes another pod nevertheless, this pod drains, and a standby or spare
takes its index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from flightedl.errors import AuthenticationError, FlightedlError, UnavailableError, UsageError
from flightedl.launch.kubernetes.submitting import find
from flightedl.launch.kubernetes.views import is_ready, labels_of
from flightedl.launch.kubernetes.watching import status_of
from flightedl.launch.status import follow_change
from flightedl.messages.decoding import from_json
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.ports import Clock, Cluster

_TIMEOUT_S = 30.0
_POLL_S = 1.0
#: Maximum number of seconds that ``grow`` waits for new pods.
_GROW_S = 600.0
_COST = "controller.kubernetes.io/pod-deletion-cost"


def ask(cluster: Cluster, job: str, request: ScaleRequest) -> ScaleReply:
    """Send a request to the job's master with a command in a master's pod, so that no port need be open.

    Raises:
        UnavailableError: no master is ready, or it rejects the request.
    """
    command = ["flightedl", "scale", "pservers", "--json", "--no-wait", *(["--cancel"] if request.is_cancelled else [])]
    command += [str(request.pservers)] if request.pservers else []
    command += [f"--drain={index}" for index in request.drain]
    for pod in filter(is_ready, cluster.list("Pod", labels_of(job, "master"))):
        said = cluster.execute(pod["metadata"]["name"], command, _TIMEOUT_S)
        try:
            return from_json(said, ScaleReply)
        except msgspec.MsgspecError:
            raise UnavailableError(f"the master's pod runs another version of flightedl: {said!r:.80}") from None
    raise UnavailableError(f"no master of job {job} is ready: see `flightedl logs {job} --role master`")


def resize(
    cluster: Cluster,
    job: str,
    request: ScaleRequest,
    timeout_s: float,
    clock: Clock,
    show: Callable[[ScaleReply], None] = lambda _: None,
) -> ScaleReply:
    """Change the pservers of a job, and wait until the change has ended, at most ``timeout_s``. Return the last reply.

    An interruption (KeyboardInterrupt) ends the change.

    Raises:
        UsageError: the job has ended, or has no pservers.
        UnavailableError: the master does not answer, or rejects the change.
    """
    deployment = cluster.get("Deployment", _deployment(job))
    if deployment is None or find(cluster, job).is_finished:
        raise UsageError(f"job {job} has ended or has no pservers, so they cannot be scaled")
    replicas, before = deployment["spec"]["replicas"], ask(cluster, job, ScaleRequest())
    spares = max(replicas - max(before.pservers, before.wanted), 0)
    if request.pservers + spares > replicas:
        replicas = request.pservers + spares
        _set_replicas(cluster, job, replicas)

    def progress() -> ScaleReply:
        clock.sleep(_POLL_S)
        return ask(cluster, job, ScaleRequest())

    try:
        show(ask(cluster, job, request))
        reply = follow_change(progress, timeout_s, clock, show)
    except KeyboardInterrupt:
        reply = ask(cluster, job, ScaleRequest(is_cancelled=True))
    except FlightedlError:
        # The master may have begun the change although its reply was lost. Then the new pods are needed.
        with contextlib.suppress(FlightedlError):
            _fit(cluster, job, ask(cluster, job, ScaleRequest()), spares, replicas)
        raise
    _fit(cluster, job, reply, spares, replicas)
    return reply


def grow(cluster: Cluster, job: str, pservers: int, clock: Clock) -> ScaleReply:
    """Add pservers. Cancel the change if the cluster has no room for their pods. Return the last reply.

    Raises:
        FlightedlError: as ``resize``.
    """
    reply = resize(cluster, job, ScaleRequest(pservers=pservers), _GROW_S, clock)
    if reply.is_done or reply.moved:
        return reply
    return resize(cluster, job, ScaleRequest(is_cancelled=True), _TIMEOUT_S, clock)


def _fit(cluster: Cluster, job: str, reply: ScaleReply, spares: int, replicas: int) -> None:
    """Set the number of pods, of which there are ``replicas``, to the number needed after a change that has ended."""
    if not reply.is_done:
        return
    wanted = max(reply.pservers, reply.wanted) + spares
    if wanted < replicas:
        _prefer_spares(cluster, job)
    _set_replicas(cluster, job, wanted)


def _prefer_spares(cluster: Cluster, job: str) -> None:
    """Make the cluster delete spares first, and standbys next. Skipped if the user may not change pods."""
    status = status_of(cluster, job)
    servers = [] if status is None else status.pservers
    costs = {_host(each.standby): "0" for each in servers} | {_host(each.address): "100" for each in servers}
    with contextlib.suppress(AuthenticationError):
        for pod in cluster.list("Pod", labels_of(job, "pserver")):
            cost = costs.get(pod.get("status", {}).get("podIP"), "-100")
            cluster.patch("Pod", pod["metadata"]["name"], {"metadata": {"annotations": {_COST: cost}}})


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _set_replicas(cluster: Cluster, job: str, count: int) -> None:
    cluster.patch("Deployment", _deployment(job), {"spec": {"replicas": count}})


def _deployment(job: str) -> str:
    return f"{job}-pserver"
