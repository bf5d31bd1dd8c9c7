"""What a predecessor left in etcd, read after the lock was taken: nobody else can write it any more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.chains import files_of
from flightedl.domain.checkpoint.manifest import ShardFile, manifest_name
from flightedl.domain.checkpoint.pointer import latest_of
from flightedl.domain.master.state import StoredState
from flightedl.errors import FlightedlError
from flightedl.messages.base import decode
from flightedl.messages.declarations import ArrivalRecord, JobDeclaration
from flightedl.messages.tasks import StopRecord
from flightedl.ports import Coordinator, Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """All that a master starts from."""

    #: What its core goes on from.
    stored: StoredState
    #: The files of a followed dataset, in the order in which they joined.
    arrivals: tuple[ArrivalRecord, ...]
    #: key -> (value, mod_revision), for the compare-and-swap chain of later writes.
    known: Mapping[str, tuple[bytes, int]]


def read_state(coordinator: Coordinator, keys: JobKeys, checkpoints: Storage | None = None) -> RecoveredState:
    """Read the declaration, the queue, the membership, and what the chains of tables' rows go on from."""
    read = (
        keys.job,
        keys.task_queues,
        keys.task_failures,
        keys.membership,
        keys.pserver_recovery,
        keys.checkpoint_latest,
        keys.evaluations,
        keys.stopped,
    )
    entries = {key: coordinator.get(key) for key in read}
    known = {key: (entry.value, entry.mod_revision) for key, entry in entries.items() if entry is not None}
    declared = known.get(keys.job)
    arrived = coordinator.list(keys.arrivals).entries
    known.update((entry.key, (entry.value, entry.mod_revision)) for entry in arrived)
    declaration = JobDeclaration() if declared is None else decode(declared[0], JobDeclaration)
    pointer = _value(known, keys.checkpoint_latest)
    stored = StoredState(
        declaration=declaration,
        queue=_value(known, keys.task_queues),
        failures=_value(known, keys.task_failures),
        evaluations=_value(known, keys.evaluations),
        membership=_value(known, keys.membership),
        recovery=_value(known, keys.pserver_recovery),
        checkpoints=pointer,
        files=_newest_files(checkpoints, pointer) if _has_tables(declaration) else (),
        stop=None if keys.stopped not in known else decode(known[keys.stopped][0], StopRecord),
        # The queue is as resuming put it there, in one transaction.
        is_resumed=keys.task_queues in known and known[keys.task_queues][1] == known.get(keys.job, (b"", 0))[1],
    )
    return RecoveredState(stored, tuple(decode(entry.value, ArrivalRecord) for entry in arrived), known)


def _has_tables(declaration: JobDeclaration) -> bool:
    return declaration.model is not None and bool(declaration.model.declaration.tables)


def _newest_files(storage: Storage | None, pointer: bytes | None) -> tuple[ShardFile, ...]:
    """Of the checkpoint that the pointer names; a master does not wait for a store that cannot be read."""
    latest = None if pointer is None else latest_of(pointer)
    if storage is None or latest is None:
        return ()
    try:
        return files_of(latest, storage.read(manifest_name(latest.number)))
    except FlightedlError as error:
        _log.warning("the next checkpoint has all rows of tables: the manifest of the newest is not there: %s", error)
        return ()


def _value(known: Mapping[str, tuple[bytes, int]], key: str) -> bytes | None:
    return known[key][0] if key in known else None
