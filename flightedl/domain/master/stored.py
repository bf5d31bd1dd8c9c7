"""The keys of the master's stored state: composes the next transaction, and interprets its outcome.

A transaction writes all keys whose values have changed, on condition that each key still has the revision of its
previous write. A write whose outcome is unknown is therefore harmless. If etcd applied the write, every key contains
exactly the bytes that were sent. Otherwise, etcd will never apply the write, because the next write changes the
revisions that this write requires.

``MasterCore.encode`` returns the values by name. For a resumed job, ``values_of_checkpoint`` returns the initial
values. ``state_in`` decodes both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from flightedl.domain.checkpoint.checkpoints import Checkpoints, next_number_after
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, checksum
from flightedl.domain.checkpoint.values import CheckpointSettings, Pointer
from flightedl.domain.master.state import StoredState
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.tasks import StopRecord

#: Key -> (its value, the revision of its last write), for the keys that exist.
Found = Mapping[str, tuple[bytes, int]]


#: Names of those fields of ``StoredState`` that contain encoded values.
_DOCUMENTS = ("queue", "failures", "evaluations", "membership", "recovery", "checkpoints", "group", "scaling")


class Write(msgspec.Struct, frozen=True):
    """One atomic transaction."""

    puts: dict[str, bytes]
    #: Key -> revision of its last write; 0 if the key does not exist.
    compared: dict[str, int]


class StoredKeys:
    """The stored keys, as known to their only writer.

    Args:
        found: The keys, read after this master had acquired the lock.
    """

    def __init__(self, found: Found) -> None:
        self._values = {key: value for key, (value, _) in found.items()}
        self._revisions = {key: revision for key, (_, revision) in found.items()}

    def revision_of(self, key: str) -> int:
        """Return the revision of a key's last write; 0 if the key is absent."""
        return self._revisions.get(key, 0)

    def next_write(self, values: Mapping[str, bytes]) -> Write | None:
        """Return the write that gives the keys these values, or None if they already have them."""
        puts = {key: value for key, value in values.items() if self._values.get(key) != value}
        return Write(puts, {key: self._revisions.get(key, 0) for key in puts}) if puts else None

    def committed(self, write: Write, revision: int) -> None:
        self._values.update(write.puts)
        self._revisions.update(dict.fromkeys(write.puts, revision))

    def adopt(self, write: Write, found: Mapping[str, tuple[bytes, int] | None]) -> bool:
        """Adopt the keys of a rejected write if an earlier attempt at it was applied; otherwise return False."""
        entries = {key: found.get(key) for key in write.puts}
        if any(entry is None or entry[0] != write.puts[key] for key, entry in entries.items()):
            return False
        self._values.update(write.puts)
        self._revisions.update((key, entry[1]) for key, entry in entries.items() if entry is not None)
        return True


def state_in(found: Found, files: Iterable[ShardFile] = ()) -> StoredState:
    """Decode a master's initial state.

    Args:
        found: The state's keys, by name.
        files: Files of the newest checkpoint, including those that they are based on; empty if unknown.
    """
    values = {name: value for name, (value, _) in found.items()}
    stopped, declared = values.get("stopped"), values.get("declaration")
    return StoredState(
        declaration=JobDeclaration() if declared is None else decode(declared, JobDeclaration),
        files=tuple(files),
        stop=None if stopped is None else decode(stopped, StopRecord),
        # Resuming writes both keys in one transaction; the queue has not changed since then.
        is_resumed="queue" in found and found["queue"][1] == found.get("declaration", (b"", 0))[1],
        placement=None,
        intent=None,
        **{name: values.get(name) for name in _DOCUMENTS},
    )


def values_of_checkpoint(
    manifest: Manifest,
    data: bytes,
    declaration: JobDeclaration,
    generation: int,
    pserver_count: int,
    names: Collection[str],
    rejected: Collection[int],
) -> dict[str, bytes]:
    """Return the initial values of a job resumed from a checkpoint, by name. Write all of them in one transaction.

    Args:
        manifest: Manifest of the checkpoint.
        data: The manifest's stored bytes.
        declaration: Declaration of the resumed job.
        generation: Generation of the master.
        pserver_count: Number of pservers of the resumed job.
        names: Names of all files in the store.
        rejected: Numbers of newer checkpoints that cannot be loaded.
    """
    checkpoints = Checkpoints(
        CheckpointSettings(),
        generation,
        pserver_count,
        0.0,
        next_number=next_number_after(list(names)),
        latest=Pointer(manifest.number, checksum(data)),
        rejected=rejected,
        first=manifest.first,
    )
    values = {"declaration": encode(declaration), "checkpoints": checkpoints.encode()}
    if manifest.stored_queue is not None:
        values["queue"] = manifest.stored_queue
    if manifest.stored_evaluations is not None:
        values["evaluations"] = manifest.stored_evaluations
    return values
