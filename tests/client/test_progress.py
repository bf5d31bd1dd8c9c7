"""A trainer's reports about its batches to the master."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.client.participation import Participation
from flightedl.client.probe import DATA, SCRIPT, StepProbe
from flightedl.client.progress import ProgressReporter, metrics_page
from flightedl.client.session import has_process_group
from flightedl.config import TrainerSettings
from flightedl.domain.consistency.modes import Async, Mode
from flightedl.errors import UnavailableError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import LogReply, LogRequest

from .pserver_bench import Cluster


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for the reporting thread, which reports the first batch at once."""
    while not is_true():
        time.sleep(0.001)


def test_idle_batches_are_reported_and_survive_a_lost_message() -> None:
    sent: list[LogRequest] = []
    failures = [UnavailableError("no master")]

    def send(body: bytes) -> bytes:
        if failures:
            raise failures.pop()
        sent.append(decode(body, LogRequest))
        return encode(LogReply())

    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None)
    reporter.batch(10, is_idle=True)
    wait_until(lambda: not failures)
    reporter.batch(10, is_idle=False)
    reporter.batch(10, is_idle=True)
    reporter.close()
    assert sum(each.batches for each in sent) == 3
    assert sum(each.idle_batches for each in sent) == 2


def test_the_first_batch_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.client.progress.REPORT_EVERY_S", 3600.0)
    has_reported = threading.Event()

    def send(body: bytes) -> bytes:
        if decode(body, LogRequest).batches == 1:
            has_reported.set()
        return encode(LogReply(every_s=3600.0))

    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None)
    reporter.batch(10)
    assert has_reported.wait(10.0)
    reporter.close()


def test_a_script_that_has_not_asked_for_a_batch_reports_its_age() -> None:
    sent: list[LogRequest] = []
    now = 0.0

    def send(body: bytes) -> bytes:
        sent.append(decode(body, LogRequest))
        return encode(LogReply())

    probe = StepProbe(lambda: now)
    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None, lambda: now, probe)
    for now in (6.0, 12.0):  # noqa: B007 - read by the clock
        reporter._flush()
        probe.turn(DATA)
    reporter.close()
    assert sent[0].starting_s > 0.0
    assert [each.starting_s for each in sent[1:]] == [0.0] * (len(sent) - 1)


def test_times_of_a_lost_report_are_in_the_next_one() -> None:
    sent: list[LogRequest] = []
    failures = [UnavailableError("no master")]
    now = 0.0

    def send(body: bytes) -> bytes:
        if failures:
            raise failures.pop()
        sent.append(decode(body, LogRequest))
        return encode(LogReply())

    probe = StepProbe(lambda: now)
    probe.turn(DATA)
    now = 2.0
    probe.turn(SCRIPT)
    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None, lambda: now, probe)
    reporter.batch(1)
    wait_until(lambda: not failures)
    reporter.batch(1)
    reporter.close()
    assert sum(each.profile.get(DATA, 0.0) for each in sent) == 2.0


def test_the_last_report_of_a_script_says_that_it_had_a_process_group() -> None:
    sent: list[LogRequest] = []

    def send(body: bytes) -> bytes:
        sent.append(decode(body, LogRequest))
        return encode(LogReply())

    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None)
    shares = False
    reporter.shares_model = lambda: shares
    reporter.metrics({"loss": 1.0}, 1)
    reporter._flush()
    reporter.batch(10)
    wait_until(lambda: len(sent) == 2)
    shares = True
    reporter.close()
    assert [each.model for each in sent] == ["", "own", "common"]


def test_a_member_of_a_process_group_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert not has_process_group()
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_initialized=lambda: True))
    assert has_process_group()
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())
    assert not has_process_group(), "torch is missing, or only partly imported"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert has_process_group()


def test_a_trainer_reports_regularly_and_sends_its_stacks_on_request() -> None:
    sent: list[LogRequest] = []
    now = 0.0

    def send(body: bytes) -> bytes:
        sent.append(decode(body, LogRequest))
        return encode(LogReply(wants_stacks=len(sent) == 1))

    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None, lambda: now)
    reporter._flush()
    assert sent == []
    now = 2.0
    reporter.advanced()
    now = 6.0
    reporter._flush()
    assert (sent[0].batch_s, sent[0].stacks) == (4.0, "")
    assert sent[0].facts is not None
    reporter._flush()
    reporter._flush()
    reporter.close()
    assert len(sent) == 2
    assert "ProgressReporter._flush" in sent[1].stacks


@pytest.mark.parametrize("mode", [Async(), Async(push_every=2)], ids=str)
def test_a_batch_without_a_gradient_is_idle(mode: Mode) -> None:
    nobody: Any = None  # This test uses neither the master nor the registration.
    done: list[bool] = []
    with Cluster({"w": (4,)}, mode) as cluster:
        trainer = cluster.trainer()
        participation = Participation(
            nobody, nobody, nobody, nobody, lambda _records, is_idle: done.append(is_idle), nobody
        )
        participation.set_model(trainer.parameters, mode)
        for batch in range(4):
            participation._current = trainer.begin(batch)
            if batch % 2:
                trainer.parameters.step({"w": np.ones(4, np.float32)})
            participation.close_batch()
    assert done == [True, False, True, False]


def test_a_trainer_serves_metrics_only_on_request() -> None:
    reporter = ProgressReporter(lambda _: encode(LogReply()), lambda: ("t", 1), lambda: None)
    reporter.batch(10, is_idle=True)
    reporter.skipped(3)
    reporter.metrics({"loss": 0.5}, 10)
    with contextlib.closing(reporter):
        threads = threading.active_count()
        with metrics_page(TrainerSettings(), lambda: reporter.figures(2.0)):
            assert threading.active_count() == threads
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        chosen = TrainerSettings(job="demo", metrics_port=port, process_name="trainer-3")
        with (
            metrics_page(chosen, lambda: reporter.figures(2.0)),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply,
        ):
            page = reply.read().decode()
    assert 'flightedl_loop_records_total{index="trainer-3",job="demo",role="trainer"} 10.0' in page
    assert 'flightedl_logged{index="trainer-3",job="demo",name="loss",role="trainer"} 0.5' in page
    assert "flightedl_lease_slack_seconds" in page


def test_a_page_beyond_loopback_requires_tls() -> None:
    assert TrainerSettings(bind="0.0.0.0").metrics_port == 0
    with pytest.raises(UsageError, match=r"bind is 0\.0\.0\.0, and without TLS"):
        TrainerSettings(bind="0.0.0.0", metrics_port=9000)


def test_a_reason_that_changes_during_a_report_is_in_the_next_one() -> None:
    sent: list[LogRequest] = []

    def send(body: bytes) -> bytes:
        sent.append(decode(body, LogRequest))
        reporter.waiting_for("the next one")
        return encode(LogReply())

    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None)
    reporter.waiting_for("the first one")
    reporter._flush()
    reporter._flush()
    reporter.close()
    assert [each.waiting_for for each in sent] == ["the first one", "the next one"]
