"""An export always ends: written, or failed with a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.checkpoint.manifest import Manifest, manifest_name
from flightedl.errors import FencedError, UnavailableError
from flightedl.master import exporting
from flightedl.master.exporting import ModelExports
from flightedl.messages.base import encode
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest, SaveModelReply, SaveModelRequest
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryStorage


def ended(exports: ModelExports, table: str = "") -> SaveModelReply:
    replies: list[SaveModelReply] = []

    def has_ended() -> bool:
        replies.append(exports.ask(SaveModelRequest(url="/out/model.npz", table=table)))
        return replies[-1].state != "writing"

    eventually(has_ended)
    return replies[-1]


def exports_of(storage: MemoryStorage, error: Exception | None = None) -> ModelExports:
    def checkpoint(_: CheckpointRequest) -> CheckpointReply:
        if error is not None:
            raise error
        return CheckpointReply(ticket=1, complete=True)

    return ModelExports(storage, "j", checkpoint, lambda: None, SystemClock())


def test_an_export_that_fails_with_a_foreign_error_can_be_requested_again() -> None:
    exports = exports_of(MemoryStorage(), ZeroDivisionError())
    for _ in range(2):
        reply = ended(exports)
        assert (reply.state, reply.error) == ("failed", "export failed by ZeroDivisionError: see the log of the server")


def test_an_export_reports_that_its_checkpoint_was_deleted() -> None:
    assert ended(exports_of(MemoryStorage())).error == "its checkpoint was already deleted"


@pytest.mark.parametrize("point", ["list", "read"])
def test_a_store_that_fails_briefly_is_retried(point: str) -> None:
    storage = MemoryStorage()
    model = DeclaredModel(declaration=ModelDeclaration(parameters=[], optimizer={}, mode={}), pservers=0, plan_hash="p")
    manifest = Manifest(
        job="j",
        number=3,
        plan_hash="p",
        pserver_count=0,
        cut_for=1,
        round=None,
        created_s=0.0,
        shards=(),
        declaration=msgspec.Raw(encode(JobDeclaration(model=model))),
    )
    storage.publish(manifest_name(3), [manifest.encode()])
    storage.plan.fail_at(point, 1, UnavailableError("Connection reset by peer"))
    # The error is from the second attempt, which has read the checkpoint.
    assert "checkpoint 3 has no table 'users'" in ended(exports_of(storage), table="users").error


def publish_manifest(storage: MemoryStorage, number: int) -> None:
    manifest = Manifest(
        job="j", number=number, plan_hash="p", pserver_count=0, cut_for=1, round=None, created_s=0.0, shards=()
    )
    storage.publish(manifest_name(number), [manifest.encode()])


def test_a_model_is_not_written_from_a_checkpoint_before_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def write(_storage: object, manifest: Manifest, *_: object, **__: object) -> str:
        written.append(manifest.number)
        return "/out/model.npz"

    monkeypatch.setattr(exporting, "export_model", write)
    storage, tickets = MemoryStorage(), [5, 5, 5]
    exports = ModelExports(
        storage, "j", lambda _: CheckpointReply(ticket=tickets.pop(), complete=True), lambda: None, SystemClock()
    )
    publish_manifest(storage, 4)
    assert ended(exports).error == "its checkpoint was already deleted"
    publish_manifest(storage, 7)
    reply = ended(exports)
    assert (reply.state, reply.checkpoint) == ("written", 7)
    publish_manifest(storage, 8)
    assert ended(exports).checkpoint == 8, "a result was returned twice"
    assert (written, tickets) == ([7, 8], [])


@pytest.mark.parametrize("table", ["", "users"])
def test_a_deposed_master_writes_no_file(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    def write(*arguments: Any, require: Any = None, **_: object) -> str:
        (require or arguments[-1])()
        return "/out/model.npz"

    def require() -> None:
        raise FencedError("another master leads")

    monkeypatch.setattr(exporting, "export_model", write)
    monkeypatch.setattr(exporting, "export_table", write)
    storage = MemoryStorage()
    publish_manifest(storage, 1)
    exports = ModelExports(storage, "j", lambda _: CheckpointReply(ticket=1, complete=True), require, SystemClock())
    reply = ended(exports, table)
    assert (reply.state, reply.error) == ("failed", "another master leads")
