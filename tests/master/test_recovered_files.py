"""Files on which a new master bases the chains of tables' rows."""

from __future__ import annotations

import logging

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, checksum, manifest_name
from flightedl.domain.checkpoint.values import CheckpointSettings, Pointer
from flightedl.domain.tables.optimizers import RowAdagrad
from flightedl.domain.tables.spec import TableSpec
from flightedl.master.recovery import read_state
from flightedl.messages.base import encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration
from flightedl.ports import Put
from tests.support.memory import MemoryCoordinator, MemoryStorage

KEYS = JobKeys("j")
FILE = ShardFile(
    index=0,
    generation=7,
    name="c-3/a",
    size_bytes=1,
    hash="0" * 32,
    blocks=1,
    lowest_version=0,
    highest_version=0,
)
TABLE = TableSpec("users", 2, RowAdagrad(lr=0.1))


def stored(*tables: TableSpec) -> tuple[MemoryCoordinator, MemoryStorage]:
    """Return an etcd whose pointer names checkpoint 3, which is in the storage."""
    coordinator, storage = MemoryCoordinator(SystemClock()), MemoryStorage()
    data = Manifest(
        job="j", number=3, plan_hash="p", pserver_count=1, cut_for=1, round=None, created_s=0.0, shards=(FILE,)
    ).encode()
    storage.publish(manifest_name(3), [data])
    checkpoints = Checkpoints(
        CheckpointSettings(), 1, 1, 0.0, next_number=4, latest=Pointer(3, checksum(data)), first=1
    )
    declared = ModelDeclaration(parameters=[], optimizer={}, mode={}, tables=[each.to_json() for each in tables])
    model = DeclaredModel(declaration=declared, pservers=1, plan_hash="p")
    coordinator.transact(
        [],
        [Put(KEYS.job, encode(JobDeclaration(model=model))), Put(KEYS.checkpoint_latest, checkpoints.encode())],
    )
    return coordinator, storage


def test_the_files_of_the_newest_checkpoint_are_those_of_its_manifest() -> None:
    coordinator, storage = stored(TABLE)
    assert read_state(coordinator, KEYS, storage).stored.files == (FILE,)


def test_without_tables_nothing_is_read() -> None:
    coordinator, storage = stored()
    storage.plan.fail_at("read", 1)
    assert read_state(coordinator, KEYS, storage).stored.files == ()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_master_leads_without_files_that_cannot_be_read(is_gone: bool, caplog: pytest.LogCaptureFixture) -> None:
    coordinator, storage = stored(TABLE)
    name = manifest_name(3)
    if is_gone:
        storage.delete(name)
    else:
        storage.files[name] = storage.files[name][:-1]
    with caplog.at_level(logging.WARNING):
        recovered = read_state(coordinator, KEYS, storage)
    assert recovered.stored.files == ()
    assert ("will contain all rows" in caplog.text) is is_gone
    assert recovered.stored.checkpoints is not None
