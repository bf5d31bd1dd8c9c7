"""What a predecessor left in etcd, read after the lock was taken: nobody else can write it any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flightedl.coordination.keys import JobKeys
from flightedl.messages.base import decode
from flightedl.messages.declarations import ArrivalRecord, JobDeclaration
from flightedl.ports import Coordinator


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """All that a master starts from. The bytes are the state's own encodings; None: there is none yet."""

    declaration: JobDeclaration
    queue: bytes | None
    failures: bytes | None
    membership: bytes | None
    pserver_recovery: bytes | None
    checkpoints: bytes | None
    evaluations: bytes | None
    #: Whether a trainer has stopped the job.
    is_stopped: bool
    #: The files of a followed dataset, in the order in which they joined.
    arrivals: tuple[ArrivalRecord, ...]
    #: key -> (value, mod_revision), for the compare-and-swap chain of later writes.
    known: Mapping[str, tuple[bytes, int]]
    #: Whether the queue is that of a checkpoint, as resuming put it there: who held work then is of another run.
    is_resumed: bool = False


def read_state(coordinator: Coordinator, keys: JobKeys) -> RecoveredState:
    """Read the declaration, the queue and the membership."""
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
    return RecoveredState(
        declaration=JobDeclaration() if declared is None else decode(declared[0], JobDeclaration),
        queue=_value(known, keys.task_queues),
        failures=_value(known, keys.task_failures),
        membership=_value(known, keys.membership),
        pserver_recovery=_value(known, keys.pserver_recovery),
        checkpoints=_value(known, keys.checkpoint_latest),
        evaluations=_value(known, keys.evaluations),
        is_stopped=keys.stopped in known,
        arrivals=tuple(decode(entry.value, ArrivalRecord) for entry in arrived),
        known=known,
        is_resumed=keys.task_queues in known and known[keys.task_queues][1] == known.get(keys.job, (b"", 0))[1],
    )


def _value(known: Mapping[str, tuple[bytes, int]], key: str) -> bytes | None:
    return known[key][0] if key in known else None
