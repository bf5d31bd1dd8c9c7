"""Whether a new master may go on from what etcd says, or etcd has gone back behind what the job had reached.

Asked after the lock was taken and before anything is read from the job's state. A state that is older than the newest
checkpoint is refused; with ``--resume`` it is deleted, and the job begins another life from that checkpoint (see
``domain.recovery.store_history``). The state goes first and the life last, so a master that dies in between leaves
something that its successor finds out about in the same way.

Not guaranteed: that anything is found out where a job keeps no checkpoints, but for another cluster's id; or while the
checkpoints' store cannot be read, because a master does not wait for that.
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

#: Deletions of one transaction.
_OPERATIONS = 100


def settle(storage: Storage | None, coordinator: Coordinator, held: HeldKey, keys: JobKeys, *, resume: bool) -> bool:
    """Whether the job goes on in its present life. False: another one has begun, and the lock has to be taken in it.

    Raises:
        RolledBackError: the state is older than the newest checkpoint, or of another cluster.
        FencedError: the lock is lost.
    """
    # First: a predecessor that does not know yet that it is deposed may write a manifest at any time, which names
    # what it has seen of etcd by then. What is asked of etcd after the manifest was read is as new as that.
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
                _log.warning("the state in etcd is deleted, and the job goes on from checkpoint %d: %s", number, why)
            _begin_again(coordinator, held, keys, HistoryRecord(life=life, cluster=present.cluster))
            return False
    if not record.cluster:
        held.write([_put(keys, HistoryRecord(life=record.life, cluster=present.cluster))])
    return True


def _advice(number: int) -> str:
    stop = "Stop what is left of this job's processes"
    if number:
        return f"{stop}, and go on from checkpoint {number} with --resume"
    return f"{stop}, and begin it anew, after `flightedl forget` or under another name: there is no checkpoint"


def _newest(storage: Storage | None, job: str) -> tuple[int, Sighting | None]:
    """The newest checkpoint that names this job, and etcd as it was then; 0: there is none, or it cannot be told."""
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
        _log.warning("whether etcd is older than the newest checkpoint cannot be told: %s", error)
    except FlightedlError as error:
        _log.info("the newest checkpoint was deleted while it was looked for: %s", error)
    return 0, None


def _put(keys: JobKeys, record: HistoryRecord) -> Put:
    return Put(keys.history, msgspec.json.encode(record))


def _begin_again(coordinator: Coordinator, held: HeldKey, keys: JobKeys, record: HistoryRecord) -> None:
    """Delete the job's state and begin the life; what is leased names live processes, and stays."""
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
