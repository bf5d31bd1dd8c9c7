"""Notices by which a cloud announces the end of a machine. Pure.

``identification`` and ``questions`` return requests to the cloud's metadata service. From the answers, ``notice_in``
decides whether this machine is about to end:

* aws: interruption of a spot instance, two minutes ahead
* aws-rebalance: the same, or a rebalance recommendation. The latter only reports an elevated risk, and the instance may
  keep running for days. It is a notice for users whose machines are replaced because of it.
* gcp: preemption, 30 s ahead, or host maintenance that ends the machine. A live migration is no notice.
* azure: Preempt, 30 s ahead, and Terminate events that name this machine
* kubernetes: taints by which autoscalers and termination handlers mark a node, see ``notice_of_node``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flightedl.messages.decoding import from_json

_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_ENDING_EVENTS = {"Preempt", "Terminate"}
#: Prefixes of the keys of taints of nodes that are about to end.
_TAINTS = (
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    # "disruption" in older versions. Permanent taints of this autoscaler have other names.
    "karpenter.sh/disrupt",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/out-of-service",
)


class MetadataRequest(msgspec.Struct, frozen=True):
    """A request to a metadata service."""

    path: str
    headers: dict[str, str] = {}
    method: str = "GET"
    body: str = ""


class Notice(msgspec.Struct, frozen=True):
    """Announcement that this machine is about to end."""

    reason: str
    #: Request by which the cloud learns that the machine may end now; None if it does not wait for one.
    acknowledgement: MetadataRequest | None = None


class _SpotAction(msgspec.Struct):
    action: str
    time: str = ""


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    resources: list[str] = []


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: list[_AzureEvent] = []


_AZURE = {"Metadata": "true"}
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AWS_TOKEN = MetadataRequest("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
_IDENTIFICATIONS = {
    "aws": _AWS_TOKEN,
    "aws-rebalance": _AWS_TOKEN,
    "azure": MetadataRequest(_NAME, _AZURE),
}
_AWS, _GCP = "/latest/meta-data", "/computeMetadata/v1/instance"
_INTERRUPTION, _REBALANCE = f"{_AWS}/spot/instance-action", f"{_AWS}/events/recommendations/rebalance"
_PATHS = {
    "aws": (_INTERRUPTION,),
    "aws-rebalance": (_INTERRUPTION, _REBALANCE),
    "gcp": (f"{_GCP}/preempted", f"{_GCP}/maintenance-event"),
    "azure": (_AZURE_EVENTS,),
}


def identification(cloud: str) -> MetadataRequest | None:
    """Return the request whose answer is the ``identity`` for the questions; None if they need none."""
    return _IDENTIFICATIONS.get(cloud)


def questions(cloud: str, identity: str) -> tuple[MetadataRequest, ...]:
    """Return the requests whose answers contain the notices."""
    token = {"X-aws-ec2-metadata-token": identity}
    headers = {"aws": token, "aws-rebalance": token, "gcp": {"Metadata-Flavor": "Google"}, "azure": _AZURE}
    return tuple(MetadataRequest(path, headers[cloud]) for path in _PATHS[cloud])


def notice_in(cloud: str, identity: str, answers: Sequence[str]) -> Notice | None:
    """Return the notice in the answers to the questions, of which each is empty if the cloud has no such document.

    Raises:
        ValueError: an answer has an unknown form.
    """
    match cloud:
        case "aws" | "aws-rebalance":
            return _notice_of_aws(*answers)
        case "gcp":
            preempted, maintenance = (answer.strip() for answer in answers)
            if preempted == "TRUE":
                return Notice("the instance is being preempted")
            return Notice(f"host maintenance: {maintenance}") if maintenance.startswith("TERMINATE") else None
        case _:
            return _notice_of_azure(identity.strip(), *answers)


def _notice_of_aws(spot: str, rebalance: str = "") -> Notice | None:
    risk = Notice("the spot instance is at elevated risk of interruption") if rebalance else None
    try:
        found = from_json(spot, _SpotAction) if spot else None
    except ValueError:
        if risk is None:
            raise
        return risk
    return risk if found is None else Notice(f"spot interruption: {found.action} at {found.time}")


def _notice_of_azure(machine: str, document: str) -> Notice | None:
    for event in from_json(document or "{}", _AzureEvents).events:
        if event.event_type in _ENDING_EVENTS and machine in event.resources:
            start = msgspec.json.encode({"StartRequests": [{"EventId": event.event_id}]}).decode()
            acknowledgement = MetadataRequest(_AZURE_EVENTS, _AZURE, "POST", start)
            return Notice(f"scheduled event: {event.event_type}", acknowledgement)
    return None


def notice_of_node(node: Mapping[str, Any]) -> Notice | None:
    """Return the notice in the taints of a node, given in the JSON form of the Kubernetes API."""
    keys = (str(taint.get("key", "")) for taint in (node.get("spec") or {}).get("taints") or [])
    found = next((key for key in keys if key.startswith(_TAINTS)), None)
    return None if found is None else Notice(f"the node has the taint {found}")
