"""Redaction of secrets in recordings."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.queue.failed import shortened
from flightedl.domain.queue.values import FailedPiece, Quarantined, QueueSettings
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, JobDeclaration
from flightedl.messages.tasks import FailedTask, TasksReply, TasksTicket
from flightedl.recording.redaction import field_without, stored_without
from flightedl.recording.texts import text_without, url_without
from flightedl.recording.values import encode, written

SECRET = "hunter2"


def line(value: object) -> str:
    return encode(written(value)).decode()


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("/data/train-*.parquet", "/data/train-*.parquet"),
        ("s3://bucket/a", "s3://bucket/a"),
        (f"https://me:{SECRET}@host/a", "https://host/a?"),
        (f"https://host/a?token={SECRET}", "https://host/a?"),
    ],
)
def test_a_url_is_recorded_without_credentials(url: str, without: str) -> None:
    assert url_without(url).startswith(without)
    assert SECRET not in url_without(url)


def test_an_error_text_is_recorded_as_its_class_and_a_digest() -> None:
    short = text_without(f"ValueError: {SECRET}")
    assert short.startswith("ValueError: #")
    assert SECRET not in short
    assert text_without(short) == short
    assert text_without(f"ValueError: {SECRET}") == short
    assert text_without("") == ""


def test_an_error_and_the_same_error_cut_by_a_core_have_one_replacement() -> None:
    error = "ValueError: " + "x" * 5_000
    assert field_without(error, None, "error") == field_without(shortened(error), None, "error")
    assert field_without(error, None, "error") == field_without(error[:2_000], None, "error")


def test_errors_of_a_script_are_not_recorded() -> None:
    failed = FailedTask(epoch=0, position=0, attempt=1, error=SECRET, batch=None, place=SECRET)
    assert SECRET not in line(events.Asked(1, TasksTicket(trainer="a", generation=1, failed=[failed])))
    piece = FailedPiece(0, 0, 0, 0, 1, 3, "a", SECRET)
    assert SECRET not in line(out.QueueNews("", Quarantined(piece)))


def test_errors_are_not_recorded_in_replies_either() -> None:
    waiting_for = f"a new attempt, because this trainer has failed 2 times in a row: ValueError: {SECRET}"
    lost = [f"records 1 to 3 of a.csv: ValueError: {SECRET}"]
    reply = TasksReply(assignments=[], outcome="none_now", waiting_for=waiting_for, lost_places=lost)
    recorded = line(out.Answer(1, reply, 0))
    assert SECRET not in recorded
    assert "failed 2 times in a row" in recorded


def test_declared_data_is_recorded_without_secrets() -> None:
    declared = DatasetDeclaration(urls=[f"https://host/a?token={SECRET}"], batch_size=1, filter=[("user", "=", SECRET)])
    assert SECRET not in line(events.Asked(1, declared))
    reply = DeclaredDataset(index_hash="i", task_count=1, record_count=1, schema="", declaration=declared)
    assert SECRET not in line(out.Answer(1, reply, 0))
    recorded = json.loads(line(events.Asked(1, declared)))["Asked"]["request"]["DatasetDeclaration"]
    again = msgspec.convert(recorded, DatasetDeclaration)
    assert line(events.Asked(1, again)) == line(events.Asked(1, declared))


def test_state_of_a_predecessor_is_recorded_without_secrets() -> None:
    declared = DatasetDeclaration(urls=[f"https://host/a?token={SECRET}"], batch_size=1)
    reply = DeclaredDataset(index_hash="i", task_count=1, record_count=1, schema="", declaration=declared)
    tasks = QueueSettings(1, lambda _: 1, attempts_limit=1, confirmations=0)
    settings = CoreSettings(generation=1, pserver_count=1, keeps_checkpoints=False)
    core = MasterCore(settings, 0.0, StoredState(declaration=JobDeclaration(dataset=reply)), tasks)
    core.apply(events.LeasesSeen({"a": 1}, {}, 1), 0.0)
    core.apply(events.Asked(1, TasksTicket(trainer="a", generation=1, want=1)), 0.0)
    failed = FailedTask(epoch=0, position=0, attempt=1, error=SECRET, batch=None)
    core.apply(events.Asked(2, TasksTicket(trainer="a", generation=1, want=0, failed=[failed])), 0.0)
    core.apply(events.EvaluationIndexed("e", reply, tasks), 0.0)
    encoded = core.encode()
    stored = StoredState(
        declaration=core.declaration,
        queue=encoded["queue"],
        failures=encoded["failures"],
        evaluations=encoded["evaluations"],
    )
    assert SECRET.encode() in encoded["failures"]
    assert SECRET.encode() in encoded["evaluations"]
    safe = stored_without(stored)
    recorded = (safe.failures, safe.evaluations, encode(safe.declaration))
    assert not any(SECRET.encode() in (each or b"") for each in recorded)
    MasterCore(dataclasses.replace(settings, generation=2), 0.0, safe, tasks).check()
