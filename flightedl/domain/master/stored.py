"""The keys in which a master's state is stored: what a transaction has to write, and what its outcome means.

A write carries all keys whose values have changed, and compares the revision of each of them with that of the write
before. So a write of unknown outcome is harmless: it either happened, and then every key holds exactly the bytes that
were sent, or it never can, because the next write changes what it compares with.

The values are those of ``MasterCore.encode``, by name; ``values_of_checkpoint`` is what a job begins with that goes on
from a checkpoint, and ``state_in`` reads either.
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

#: key -> its value and the revision at which it was written last. An absent key is left out, or has None.
Found = Mapping[str, tuple[bytes, int]]


#: Values that a master keeps as they are stored.
_DOCUMENTS = ("queue", "failures", "evaluations", "membership", "recovery", "checkpoints", "group")


class Write(msgspec.Struct, frozen=True):
    """One transaction: all of it happens or nothing."""

    puts: dict[str, bytes]
    #: Key -> the revision at which it was written last; 0: the key is absent.
    compared: dict[str, int]


class StoredKeys:
    """The keys as they are stored, as far as their only writer knows."""

    def __init__(self, found: Found) -> None:
        """``found``: as read after the lock was taken."""
        self._values = {key: value for key, (value, _) in found.items()}
        self._revisions = {key: revision for key, (_, revision) in found.items()}

    def next_write(self, values: Mapping[str, bytes]) -> Write | None:
        """Return the write after which the keys have these values; None: they have."""
        puts = {key: value for key, value in values.items() if self._values.get(key) != value}
        return Write(puts, {key: self._revisions.get(key, 0) for key in puts}) if puts else None

    def committed(self, write: Write, revision: int) -> None:
        """Take note that a write has happened at a revision."""
        self._values.update(write.puts)
        self._revisions.update(dict.fromkeys(write.puts, revision))

    def adopt(self, write: Write, found: Mapping[str, tuple[bytes, int] | None]) -> bool:
        """Go on from what a refused write has found, if an earlier try of it has happened; False: it has not."""
        entries = {key: found.get(key) for key in write.puts}
        if any(entry is None or entry[0] != write.puts[key] for key, entry in entries.items()):
            return False
        self._values.update(write.puts)
        self._revisions.update((key, entry[1]) for key, entry in entries.items() if entry is not None)
        return True


def state_in(found: Found, files: Iterable[ShardFile] = ()) -> StoredState:
    """Return what a master goes on from.

    Args:
        found: The state's keys, by name.
        files: Of the newest checkpoint, with what they are built on; empty: that is not known.
    """
    values = {name: value for name, (value, _) in found.items()}
    stopped, declared = values.get("stopped"), values.get("declaration")
    return StoredState(
        declaration=JobDeclaration() if declared is None else decode(declared, JobDeclaration),
        files=tuple(files),
        stop=None if stopped is None else decode(stopped, StopRecord),
        # The queue is as resuming put it there, in one transaction.
        is_resumed="queue" in found and found["queue"][1] == found.get("declaration", (b"", 0))[1],
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
    """Return the values, by name, with which a job goes on from a checkpoint; they belong into one transaction.

    Args:
        manifest: The checkpoint's.
        data: The manifest as it is stored.
        declaration: The job's, from now on.
        generation: The master's.
        pserver_count: Of the job, from now on.
        names: The files that there are.
        rejected: Newer checkpoints, which cannot be loaded.
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
