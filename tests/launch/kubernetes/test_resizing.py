"""Changing the number of pservers on a cluster: the order of patches, and what remains after failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from flightedl.errors import DeadlineError, UnavailableError, UsageError
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.resizing import ask, grow, resize
from flightedl.launch.kubernetes.submitting import submit
from flightedl.launch.kubernetes.values import ClusterJob
from flightedl.launch.kubernetes.views import labels_of
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.messages.status import ServerStatus, StatusReply
from tests.support.clock import FakeClock
from tests.support.memory_cluster import MemoryCluster

JOB = ClusterJob(job="demo", image="demo:1", target="train.py", pservers=2, spares=1, tls=False, insecure=True)
COST = "controller.kubernetes.io/pod-deletion-cost"


class Master(MemoryCluster):
    """Cluster with a master that carries out changes in several polls. ``log`` has its requests and all replicas."""

    def __init__(self, polls: int = 2, pservers: int = 2) -> None:
        super().__init__()
        self.reply = ScaleReply(wanted=pservers, pservers=pservers)
        self.error: BaseException | None = None
        self.pservers_if_cancelled = 3
        #: Index of a pserver -> address of its standby.
        self.standbys = ["", "", "", ""]
        self.log: list[object] = []
        self._left = polls
        submit(self, render(JOB), FakeClock(jumps=True))
        self.apply([pod("demo-master-a", "master")])
        self.log.clear()

    def patch(self, kind: str, name: str, changes: Any) -> dict[str, Any]:
        if "replicas" in changes.get("spec", {}):
            self.log.append(changes["spec"]["replicas"])
        return super().patch(kind, name, changes)

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:
        assert pod == "demo-master-a"
        if "status" in command:
            servers = [
                ServerStatus(
                    index=index, address=f"10.0.0.{index}:7070", generation=1, state="serving", standby=standby
                )
                for index, standby in enumerate(self.standbys[: self.reply.pservers])
            ]
            return msgspec.json.encode(StatusReply(job="demo", state="training", pservers=servers)).decode()
        assert list(command[:5]) == ["flightedl", "scale", "pservers", "--json", "--no-wait"]
        return msgspec.json.encode(self._answer(list(command[5:]))).decode()

    def _answer(self, arguments: list[str]) -> ScaleReply:
        if arguments == ["--cancel"]:
            self.log.append("cancel")
            count = self.pservers_if_cancelled
            self.reply = ScaleReply(wanted=2, pservers=count, is_given_up=True, waiting_for="the change was cancelled")
        elif arguments:
            self.log.append(" ".join(arguments))
            is_lost = isinstance(self.error, DeadlineError)
            if self.error is not None and not is_lost:
                raise self.error
            wanted = int(arguments[0]) if arguments[0].isdigit() else self.reply.pservers
            self.reply = msgspec.structs.replace(self.reply, wanted=wanted, is_done=False)
            if is_lost:
                raise DeadlineError("kubectl did not finish within 30 s")
        elif not self.reply.is_done:
            self._left -= 1
            if self._left <= 0:
                self.log.append("done")
                self.reply = ScaleReply(wanted=self.reply.wanted, pservers=self.reply.wanted)
        return self.reply


def pod(name: str, component: str, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": labels_of("demo", component)}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "status": {"conditions": [{"type": "Ready", "status": "True"}]} | status,
    }


def changed(cluster: Master, request: ScaleRequest, timeout_s: float = 60.0) -> ScaleReply:
    return resize(cluster, "demo", request, timeout_s, FakeClock(jumps=True))


def test_pods_are_added_before_blocks_move() -> None:
    cluster = Master()
    assert changed(cluster, ScaleRequest(pservers=4)).pservers == 4
    assert cluster.log == [5, "4", "done", 5]


def test_pods_are_removed_after_blocks_have_moved_and_spares_first() -> None:
    cluster = Master()
    cluster.apply([pod(f"demo-pserver-{index}", "pserver", podIP=f"10.0.0.{index}") for index in range(3)])
    assert changed(cluster, ScaleRequest(pservers=1)).pservers == 1
    assert cluster.log == ["1", "done", 2]
    costs = [cluster.objects["Pod", f"demo-pserver-{index}"]["metadata"]["annotations"][COST] for index in range(3)]
    assert costs == ["100", "-100", "-100"]


def test_pods_with_copies_are_removed_after_spares_and_before_pservers() -> None:
    """Pod 2 was a standby and has taken over index 0, whose former pod is now its standby."""
    cluster = Master()
    addresses = ["10.0.0.1", "10.0.0.9", "10.0.0.0", "10.0.0.8", ""]
    cluster.standbys = ["10.0.0.9:7070", "10.0.0.8:7070"]
    pods = [pod(f"demo-pserver-{place}", "pserver", podIP=address) for place, address in enumerate(addresses)]
    cluster.apply([*pods[:4], pod("demo-pserver-4", "pserver")])
    assert changed(cluster, ScaleRequest(pservers=1)).pservers == 1
    costs = [cluster.objects["Pod", f"demo-pserver-{place}"]["metadata"]["annotations"][COST] for place in range(5)]
    assert costs == ["-100", "0", "100", "-100", "-100"]


def test_draining_keeps_all_pods() -> None:
    cluster = Master()
    changed(cluster, ScaleRequest(drain=[1]))
    assert cluster.log == ["--drain=1", "done", 3]


def test_a_rejected_change_takes_the_new_pods_back() -> None:
    cluster = Master()
    cluster.error = UnavailableError("flightedl in pod demo-master-a failed (2): the model has only 3 blocks")
    with pytest.raises(UnavailableError, match="only 3 blocks"):
        changed(cluster, ScaleRequest(pservers=9))
    assert cluster.log == [10, "9", 3]


def test_the_new_pods_remain_if_only_the_reply_to_the_request_is_lost() -> None:
    cluster = Master(polls=5)
    cluster.error = DeadlineError()
    with pytest.raises(DeadlineError, match="did not finish"):
        changed(cluster, ScaleRequest(pservers=4))
    assert cluster.log == [5, "4"]


def test_a_poll_that_times_out_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, failures = Master(), [DeadlineError("kubectl did not finish within 30 s")]
    answer = cluster._answer

    def slow(arguments: list[str]) -> ScaleReply:
        if not arguments and not cluster.reply.is_done and failures:
            raise failures.pop()
        return answer(arguments)

    monkeypatch.setattr(cluster, "_answer", slow)
    assert changed(cluster, ScaleRequest(pservers=4)).pservers == 4
    assert not failures
    assert cluster.log == [5, "4", "done", 5]


def test_an_interrupted_change_is_cancelled_and_keeps_the_pods_that_may_have_blocks() -> None:
    cluster = Master()
    cluster.error = KeyboardInterrupt()
    assert changed(cluster, ScaleRequest(pservers=4)).is_given_up
    assert cluster.log == [5, "4", "cancel", 4]


def test_pservers_for_which_the_cluster_has_no_room_are_not_added() -> None:
    cluster = Master(polls=10_000)
    cluster.pservers_if_cancelled = 2
    reply = grow(cluster, "demo", 4, FakeClock(jumps=True))
    assert reply.text == "the job has 2 pservers; the last change ended early: the change was cancelled"
    assert cluster.log == [5, "4", "cancel", 3]


def test_a_change_that_is_too_slow_keeps_all_pods() -> None:
    cluster = Master(polls=1000)
    assert not changed(cluster, ScaleRequest(pservers=1), timeout_s=5.0).is_done
    assert cluster.log == ["1"]


def test_a_job_without_a_ready_master_is_reported() -> None:
    cluster = Master()
    cluster.delete("Pod", "demo-master-a")
    with pytest.raises(UnavailableError, match="no master of job demo is ready"):
        ask(cluster, "demo", ScaleRequest())
    cluster.patch("Job", "demo-trainer", {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    with pytest.raises(UsageError, match="has ended"):
        changed(cluster, ScaleRequest(pservers=3))
    assert cluster.log == []
