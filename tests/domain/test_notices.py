from __future__ import annotations

import json
from typing import Any

import pytest

from flightedl.config import NOTICES
from flightedl.domain.notices import MetadataRequest, Notice, identification, notice_in, notice_of_node, questions

SPOT = '{"action": "terminate", "time": "2026-11-26T08:22:00Z"}'
REBALANCE = '{"noticeTime": "2026-11-26T08:16:04Z"}'


def events(*events: tuple[str, str, str]) -> str:
    return json.dumps(
        {
            "DocumentIncarnation": 7,
            "Events": [
                {"EventId": name, "EventType": kind, "Resources": [machine], "EventStatus": "Started"}
                for name, kind, machine in events
            ],
        }
    )


@pytest.mark.parametrize(
    ("cloud", "answers", "reason"),
    [
        ("aws", [""], None),
        ("aws", [SPOT], "spot interruption: terminate at 2026-11-26T08:22:00Z"),
        ("aws-rebalance", ["", ""], None),
        ("aws-rebalance", ["", REBALANCE], "the spot instance is at elevated risk of interruption"),
        ("aws-rebalance", ["<html>", REBALANCE], "the spot instance is at elevated risk of interruption"),
        ("aws-rebalance", [SPOT, REBALANCE], "spot interruption: terminate at 2026-11-26T08:22:00Z"),
        ("gcp", ["FALSE", "NONE"], None),
        ("gcp", ["FALSE", "MIGRATE_ON_HOST_MAINTENANCE"], None),
        ("gcp", ["TRUE\n", "NONE"], "the instance is being preempted"),
        ("gcp", ["FALSE", "TERMINATE_ON_HOST_MAINTENANCE\n"], "host maintenance: TERMINATE_ON_HOST_MAINTENANCE"),
        ("azure", [""], None),
        ("azure", [events(("a", "Reboot", "me"), ("b", "Freeze", "me"), ("c", "Preempt", "me-2"))], None),
        ("azure", [events(("a", "Terminate", "other"), ("b", "Terminate", "me"))], "scheduled event: Terminate"),
        ("azure", [events(("a", "Preempt", "me"))], "scheduled event: Preempt"),
    ],
)
def test_only_announcements_of_the_end_of_this_machine_are_notices(
    cloud: str, answers: list[str], reason: str | None
) -> None:
    assert len(questions(cloud, "me")) == len(answers)
    notice = notice_in(cloud, "me\n", answers)
    assert (notice.reason if notice else None) == reason


def test_an_event_is_acknowledged_by_its_id() -> None:
    notice = notice_in("azure", "me", [events(("a", "Preempt", "you"), ("b", "Preempt", "me"))])
    assert notice is not None
    (question,) = questions("azure", "me")
    body = '{"StartRequests":[{"EventId":"b"}]}'
    assert notice.acknowledgement == MetadataRequest(question.path, {"Metadata": "true"}, "POST", body)


@pytest.mark.parametrize(("cloud", "answers"), [("aws", ["<html>"]), ("aws", ["{}"]), ("azure", ["[]"])])
def test_an_answer_of_an_unknown_form_is_no_notice(cloud: str, answers: list[str]) -> None:
    with pytest.raises(ValueError, match=r"JSON is malformed|Object missing|Expected"):
        notice_in(cloud, "me", answers)


@pytest.mark.parametrize("cloud", ["aws", "aws-rebalance"])
def test_a_token_is_requested_before_the_questions(cloud: str) -> None:
    first = identification(cloud)
    assert first is not None
    assert (first.method, first.path) == ("PUT", "/latest/api/token")
    assert all(each.headers == {"X-aws-ec2-metadata-token": "token"} for each in questions(cloud, "token"))
    assert identification("gcp") is None


@pytest.mark.parametrize(
    ("key", "is_notice"),
    [
        ("ToBeDeletedByClusterAutoscaler", True),
        ("DeletionCandidateOfClusterAutoscaler", False),
        ("aws-node-termination-handler/rebalance-recommendation", True),
        ("cloud.google.com/impending-node-termination", True),
        ("cloud.google.com/gke-spot", False),
        ("karpenter.sh/disrupted", True),
        ("karpenter.sh/disruption", True),
        ("karpenter.sh/unregistered", False),
        ("node.kubernetes.io/unschedulable", False),
        ("node.kubernetes.io/memory-pressure", False),
    ],
)
def test_only_taints_of_nodes_that_end_are_notices(key: str, is_notice: bool) -> None:
    node: dict[str, Any] = {"spec": {"taints": [{"key": "dedicated", "effect": "NoSchedule"}, {"key": key}]}}
    expected = Notice(f"the node has the taint {key}") if is_notice else None
    assert notice_of_node(node) == expected


def test_a_node_without_taints_gives_no_notice() -> None:
    assert notice_of_node({}) is None
    assert notice_of_node({"spec": None}) is None
    assert notice_of_node({"spec": {"taints": None}}) is None
    assert "kubernetes" in NOTICES
