"""Check that a new master may continue from the state in etcd, which may have been restored from an older backup.

The master checks etcd after it has acquired the lock, and before it reads the job's state. It refuses to continue from
a state that is older than the newest checkpoint. With ``--resume``, it deletes that state, and the job begins a new
life from the checkpoint (see ``domain.recovery.store_history``). The new life is written last: if the master dies
before that, its successor detects the older state again.

Limitations: without checkpoints, an older state is detected only if the cluster id has changed. While the checkpoint
storage is unreadable, an older state is not detected, because the master does not wait for the storage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import HistoryRecord
from flightedl.domain.checkpoint.manifest import Manifest, candidates, manifest_name
from flightedl.domain.checkpoint.pointer import decode_pointer
from flightedl.domain.recovery.store_history import BeginLife, Refuse, Sighting, judge
from flightedl.errors import CorruptError, FlightedlError, RolledBackError, UnavailableError
from flightedl.messages.decoding import from_json
from flightedl.ports import Coordinator, Delete, Operation, Put, Storage

_log = logging.getLogger(__name__)

#: Maximum number of deletions in a transaction.
_OPERATIONS = 100


def settle(storage: Storage | None, coordinator: Coordinator, held: HeldKey, keys: JobKeys, *, resume: bool) -> bool:
    """Return True if the job continues its current life, or False if a new life has begun, which needs a new lock.

    Raises:
        RolledBackError: the state is older than the newest checkpoint, or belongs to another cluster.
        FencedError: the lock was lost.
    """
    # Read the manifest first. A deposed predecessor may write a manifest at any time, with its latest observation of
    # etcd. So etcd's answers are sure to be at least as new as that observation only if they are requested after
    # reading the manifest.
    number, newest = _newest(storage, keys.job_name)
    stored = coordinator.get(keys.history)
    record = HistoryRecord() if stored is None else from_json(stored.value, HistoryRecord)
    pointer = coordinator.get(keys.checkpoint_latest)
    next_number: int | None = None
    if pointer is not None:
        next_number = decode_pointer(pointer.value).next_number
    elif coordinator.get(keys.job) is not None:
        next_number = 1
    present = coordinator.sighting()
    assert present is not None, "etcd was asked a moment ago"
    match judge(present, record.life, record.cluster, next_number, number, newest, resume=resume):
        case Refuse(why):
            raise RolledBackError(f"{why}. {_advice(number)}")
        case BeginLife(life, why):
            if why:
                _log.warning("deleting the state in etcd and continuing from checkpoint %d: %s", number, why)
            _begin_again(coordinator, held, keys, HistoryRecord(life=life, cluster=present.cluster))
            return False
    if not record.cluster:
        held.write([_put(keys, HistoryRecord(life=record.life, cluster=present.cluster))])
    return True


def _advice(number: int) -> str:
    stop = "Stop the remaining processes of this job"
    if number:
        return f"{stop}, and continue from checkpoint {number} with --resume"
    return f"{stop}. As there is no checkpoint, run `flightedl forget` and start again, or use another job name"


def _newest(storage: Storage | None, job: str) -> tuple[int, Sighting | None]:
    """Return the number of the newest checkpoint (0 if none is known) and the state of etcd that it records."""
    if storage is None:
        return 0, None
    try:
        for number in candidates(file.name for file in storage.list("")):
            try:
                manifest = Manifest.decode(storage.read(manifest_name(number)))
            except CorruptError:
                continue
            if manifest.job == job:
                return number, manifest.etcd
    except UnavailableError as error:
        _log.warning("cannot check if etcd is older than the newest checkpoint: %s", error)
    except FlightedlError as error:
        _log.info("the newest checkpoint was deleted during the check of etcd: %s", error)
    return 0, None


def _put(keys: JobKeys, record: HistoryRecord) -> Put:
    return Put(keys.history, msgspec.json.encode(record))


def _begin_again(coordinator: Coordinator, held: HeldKey, keys: JobKeys, record: HistoryRecord) -> None:
    """Delete the job's state and begin a new life. Keep leased keys, which belong to live processes."""
    kept = {keys.history, keys.ps_desired}
    last = [keys.job, keys.checkpoint_latest, keys.init_params]
    found = [*coordinator.list(keys.state_prefix).entries, *coordinator.list(keys.prefix).entries]
    going = [entry.key for entry in found if not entry.lease_id and entry.key not in {*kept, *last}]
    for start in range(0, len(going), _OPERATIONS):
        held.write(_deletions(going[start : start + _OPERATIONS]))
    held.write([*_deletions(last), _put(keys, record)])
    _log.warning("the job begins life %d on cluster %s", record.life, record.cluster)


def _deletions(keys: Sequence[str]) -> list[Operation]:
    return [Delete(key) for key in keys]
