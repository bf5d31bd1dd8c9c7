"""A predecessor's state in etcd. The master reads it while holding the lock, so no other process can write it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.chains import files_of
from flightedl.domain.checkpoint.manifest import ShardFile, manifest_name
from flightedl.domain.checkpoint.pointer import latest_of
from flightedl.domain.master.state import StoredState
from flightedl.domain.master.stored import state_in
from flightedl.errors import FlightedlError
from flightedl.master.moves import read_moves
from flightedl.messages.base import decode
from flightedl.messages.declarations import ArrivalRecord, JobDeclaration
from flightedl.ports import Coordinator, Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """Initial state of a master."""

    #: Initial state of its core.
    stored: StoredState
    #: Files of a followed dataset, in the order they were added.
    arrivals: tuple[ArrivalRecord, ...]
    #: Key -> (value, mod_revision). Later writes compare the revision.
    known: Mapping[str, tuple[bytes, int]]
    #: Revision at which the placement was last written; 0 if it is not stored.
    placed_at: int = 0


def read_state(coordinator: Coordinator, keys: JobKeys, checkpoints: Storage | None = None) -> RecoveredState:
    """Read the declaration, the queue and the membership; if there are tables, also the newest checkpoint's files."""
    names = keys.of_state
    entries = {name: coordinator.get(key) for name, key in names.items()}
    found = {name: (entry.value, entry.mod_revision) for name, entry in entries.items() if entry is not None}
    arrived = coordinator.list(keys.arrivals).entries
    known = {names[name]: entry for name, entry in found.items()}
    known.update((entry.key, (entry.value, entry.mod_revision)) for entry in arrived)
    stored = state_in(found)
    if _has_tables(stored.declaration):
        stored = replace(stored, files=_newest_files(checkpoints, stored.checkpoints))
    placed, moving = coordinator.get(keys.placement), coordinator.get(keys.moving)
    moves = read_moves(placed, moving, 0)
    stored = replace(stored, placement=moves.placement, intent=moves.stored)
    placed_at = 0 if placed is None else placed.mod_revision
    return RecoveredState(stored, tuple(decode(entry.value, ArrivalRecord) for entry in arrived), known, placed_at)


def _has_tables(declaration: JobDeclaration) -> bool:
    return declaration.model is not None and bool(declaration.model.declaration.tables)


def _newest_files(storage: Storage | None, pointer: bytes | None) -> tuple[ShardFile, ...]:
    """Return the newest checkpoint's files; empty if the store is unreadable, because a master does not wait for it."""
    latest = None if pointer is None else latest_of(pointer)
    if storage is None or latest is None:
        return ()
    try:
        return files_of(latest, storage.read(manifest_name(latest.number)))
    except FlightedlError as error:
        _log.warning("the next checkpoint will contain all rows, as the newest manifest cannot be read: %s", error)
        return ()
