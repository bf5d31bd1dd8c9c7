"""Notices that a machine is about to end, from metadata services over HTTP and from nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flightedl.adapters.notices import MetadataService, NoticeWatch, node_notice
from flightedl.domain.notices import MetadataRequest, Notice
from flightedl.errors import UnavailableError
from tests.support.contracts.coordinator import eventually
from tests.support.etcd_server import EtcdServer
from tests.support.memory_cluster import MemoryCluster

from .metadata_server import MACHINE, metadata_server

CLOUDS = ("aws", "gcp", "azure")

SCRIPT = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_is_asked_as_the_cloud_requires(cloud: str) -> None:
    with metadata_server(cloud) as server:
        service = MetadataService(cloud, server.url)
        assert service.look() is None
        server.announce()
        notice = service.look()
        assert notice is not None
        service.acknowledge(notice)
        assert server.posted == ([{"StartRequests": [{"EventId": "f020ba2e"}]}] if cloud == "azure" else [])


def test_a_rebalance_recommendation_is_a_notice_only_on_request() -> None:
    with metadata_server("aws") as server:
        server.documents["/latest/meta-data/events/recommendations/rebalance"] = (
            '{"noticeTime": "2026-11-26T08:16:04Z"}'
        )
        assert MetadataService("aws", server.url).look() is None
        notice = MetadataService("aws-rebalance", server.url).look()
        assert notice == Notice("the spot instance is at elevated risk of interruption")
        server.announce()
        assert MetadataService("aws", server.url).look() == MetadataService("aws-rebalance", server.url).look()


@pytest.mark.parametrize(
    ("cloud", "failing", "answers", "reason"),
    [
        ("gcp", "preempted", {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "host maintenance"),
        ("gcp", "maintenance-event", {"preempted": "TRUE"}, "preempted"),
        ("aws-rebalance", "spot/instance-action", {"rebalance": '{"noticeTime": ""}'}, "elevated risk"),
        ("aws-rebalance", "rebalance", {"spot/instance-action": '{"action": "stop"}'}, "spot interruption"),
    ],
)
def test_a_source_that_fails_does_not_hide_the_other(
    cloud: str, failing: str, answers: dict[str, str], reason: str
) -> None:
    class Service(MetadataService):
        def _answer(self, request: MetadataRequest) -> str:
            if request.path.endswith(failing):
                raise UnavailableError("the metadata service answered 503")
            return next((text for path, text in answers.items() if request.path.endswith(path)), "")

    notice = Service(cloud, "http://127.0.0.1").look()
    assert notice is not None
    assert reason in notice.reason
    answers.clear()
    with pytest.raises(UnavailableError, match="503"):
        Service(cloud, "http://127.0.0.1").look()


def test_answers_of_an_unknown_form_are_errors() -> None:
    with metadata_server("azure") as server:
        server.documents = dict.fromkeys(server.documents, "<html>")
        with pytest.raises(UnavailableError, match="unknown answer"):
            MetadataService("azure", server.url).look()
        with pytest.raises(UnavailableError, match="answered 400"):
            MetadataService("aws", server.url).look()
    with pytest.raises(UnavailableError, match="does not answer"):
        MetadataService("azure", server.url).look()


def test_a_taint_of_the_node_is_a_notice() -> None:
    cluster = MemoryCluster()
    node = {"kind": "Node", "metadata": {"name": "n1"}, "spec": {}}
    cluster.apply([node])
    assert node_notice(cluster, "n1") is None
    assert node_notice(cluster, "gone") is None
    taint = {"key": "aws-node-termination-handler/spot-itn", "value": "event-1", "effect": "NoSchedule"}
    cluster.patch("Node", "n1", {"spec": {"taints": [{"key": "spot", "effect": "NoSchedule"}, taint]}})
    assert node_notice(cluster, "n1") == Notice("the node has the taint aws-node-termination-handler/spot-itn")


@pytest.mark.parametrize("error", [UnavailableError("nobody is there"), ValueError("nobody is there")])
def test_a_source_that_does_not_answer_is_reported_once(error: Exception) -> None:
    looks, said = [0], list[str]()
    arrived = threading.Event()

    def look() -> Notice | None:
        looks[0] += 1
        if looks[0] < 5:
            raise error
        return Notice("spot")

    before = signal.signal(signal.SIGTERM, lambda *_: arrived.set())
    try:
        with contextlib.closing(NoticeWatch(look, 0.01, said.append)) as watch:
            assert arrived.wait(10)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert watch.notice == Notice("spot")
    assert said == [
        "cannot see notices about the end of this machine; retrying: nobody is there",
        "this machine is about to end, as if by SIGTERM: spot",
    ]


@contextlib.contextmanager
def started(directory: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *arguments]
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9"} | variables
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_trainer_that_sees_a_notice_cleans_up(tmp_path: Path, cloud: str) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    trainer = ("flightedl.launch.trainer", "program.py")
    with metadata_server(cloud) as server, started(tmp_path, *trainer, **server.environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        eventually(lambda: server.reads >= 2)
        server.announce()
        out, err = process.communicate(timeout=30)
        assert out == "cleaned up\n"
        assert process.returncode == 143
        assert re.fullmatch(r"flightedl trainer: this machine is about to end, as if by SIGTERM: .+\n", err)
        assert server.posted == []


def test_a_trainer_trains_although_the_metadata_service_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\ntime.sleep(3)\nprint('done')\n")
    unreachable = {"FLIGHTEDL_NOTICE": "aws", "FLIGHTEDL_NOTICE_URL": "http://127.0.0.1:9"}
    with started(tmp_path, "flightedl.launch.trainer", "program.py", **unreachable) as process:
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("done\n", 0)
    assert err.count("retrying") == len(err.splitlines()) == 1


@pytest.mark.etcd
@pytest.mark.parametrize("role", ["master", "pserver"])
def test_a_server_that_sees_a_notice_ends_as_after_sigterm(
    tmp_path: Path, etcd: EtcdServer, job_name: str, role: str
) -> None:
    options = ("--etcd", etcd.address, "--job", job_name, "--notice", "gcp")
    with (
        metadata_server("gcp") as server,
        started(tmp_path, "flightedl", role, *options, FLIGHTEDL_NOTICE_URL=server.url) as process,
    ):
        eventually(lambda: server.reads >= 2, timeout_s=30.0)
        server.announce()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "this machine is about to end, as if by SIGTERM: the instance is being preempted" in err


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_that_sees_a_notice_stops_and_then_lets_the_machine_end(tmp_path: Path) -> None:
    """The launcher's processes do not watch themselves: it stops them in order, and then acknowledges."""
    (tmp_path / "program.py").write_text(f"import flightedl as fe\nwith fe.connect():\n{_indented(SCRIPT)}")
    command = ("flightedl", "run", "--output", "out", "--lease-ttl-s", "2", "program.py")
    with metadata_server("azure") as server, started(tmp_path, *command, **server.environment()) as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        assert server.posted == []
        server.announce()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 143
        assert "this machine is about to end, as if by SIGTERM: scheduled event: Preempt" in out
        assert "cleaned up" in out
        assert "flightedl trainer: this machine" not in out
        assert server.posted == [{"StartRequests": [{"EventId": "f020ba2e"}]}]


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.strip().splitlines())


def test_events_of_other_machines_are_none_of_ours() -> None:
    with metadata_server("azure") as server:
        server.announce()
        name, events = server.documents
        server.documents[name] = f"{MACHINE}1"
        assert MetadataService("azure", server.url).look() is None
        assert events.startswith("/metadata/scheduledevents")


def test_a_notice_that_arrives_after_the_end_of_the_watch_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, sent = threading.Event(), threading.Event(), []

    def look() -> Notice:
        begun.set()
        assert go_on.wait(20.0)
        return Notice("the machine ends")

    monkeypatch.setattr(signal, "pthread_kill", lambda *each: sent.append(each))
    watch = NoticeWatch(look, 1.0, lambda _: None)
    assert begun.wait(20.0)
    watch._stop.set()
    go_on.set()
    watch.close()
    assert not sent, "a process that has ended its work gets a signal"
