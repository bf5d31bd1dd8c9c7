"""What a predecessor left in etcd, read after the lock was taken: nobody else can write it any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.state import StoredState
from flightedl.messages.base import decode
from flightedl.messages.declarations import ArrivalRecord, JobDeclaration
from flightedl.ports import Coordinator


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """All that a master starts from."""

    #: What its core goes on from.
    stored: StoredState
    #: The files of a followed dataset, in the order in which they joined.
    arrivals: tuple[ArrivalRecord, ...]
    #: key -> (value, mod_revision), for the compare-and-swap chain of later writes.
    known: Mapping[str, tuple[bytes, int]]


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
    stored = StoredState(
        declaration=JobDeclaration() if declared is None else decode(declared[0], JobDeclaration),
        queue=_value(known, keys.task_queues),
        failures=_value(known, keys.task_failures),
        evaluations=_value(known, keys.evaluations),
        membership=_value(known, keys.membership),
        recovery=_value(known, keys.pserver_recovery),
        checkpoints=_value(known, keys.checkpoint_latest),
        is_stopped=keys.stopped in known,
        # The queue is as resuming put it there, in one transaction.
        is_resumed=keys.task_queues in known and known[keys.task_queues][1] == known.get(keys.job, (b"", 0))[1],
    )
    return RecoveredState(stored, tuple(decode(entry.value, ArrivalRecord) for entry in arrived), known)


def _value(known: Mapping[str, tuple[bytes, int]], key: str) -> bytes | None:
    return known[key][0] if key in known else None
