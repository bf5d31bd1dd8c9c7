"""An earlier job with the same name: its state in etcd, and the rules for resuming it.

If a stopped job is started again, it is resumed. A finished job is not: its trainers would have nothing to do, and
without checkpoints its new pservers would train on everything again. The user decides with ``--resume``, ``flightedl
forget`` or another name.
"""

from __future__ import annotations

import msgspec

from flightedl.coordination.keys import JobKeys, jobs_in
from flightedl.domain.checkpoint.manifest import candidates, manifest_name
from flightedl.domain.checkpoint.pointer import latest_of
from flightedl.domain.queue.storage import has_failed, is_over
from flightedl.errors import NotFoundError, UsageError
from flightedl.launch.liveness import names_process
from flightedl.messages.base import decode
from flightedl.messages.declarations import JobDeclaration
from flightedl.ports import Absent, Condition, Coordinator, CreatedAt, Delete, Entry, ModifiedAt, Put, Storage

#: Maximum number of operations in one transaction.
_OPERATIONS_LIMIT = 100
_SHOWN = 10


class FormerJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job's state in etcd."""

    name: str
    #: The job's number of epochs if all of them are finished, otherwise None.
    finished_epochs: int | None = None
    #: True if the job's script stopped it with ``job.stop``.
    is_stopped: bool = False
    #: Number of the newest complete checkpoint; None if there is none.
    checkpoint: int | None = None
    #: True if the job has no model, so that etcd has all of its state, and batches were set aside.
    can_retry: bool = False

    @property
    def is_over(self) -> bool:
        """True if the job's trainers would have no work."""
        return self.finished_epochs is not None or self.is_stopped


def former_job(coordinator: Coordinator, keys: JobKeys) -> FormerJob | None:
    """Return the state of a job in etcd, or None. Ignores the key of the launcher that is starting the job."""
    entries = {entry.key: entry for entry in _entries(coordinator, keys)}
    if not entries:
        return None
    pointer = entries.get(keys.checkpoint_latest)
    latest = None if pointer is None else latest_of(pointer.value)
    return FormerJob(
        name=keys.job_name,
        finished_epochs=_finished_epochs(entries.get(keys.job), entries.get(keys.task_queues)),
        is_stopped=keys.stopped in entries,
        checkpoint=None if latest is None else latest.number,
        can_retry=_can_retry(entries.get(keys.job), entries.get(keys.task_failures)) and keys.stopped not in entries,
    )


def _finished_epochs(job: Entry | None, queue: Entry | None) -> int | None:
    dataset = None if job is None else decode(job.value, JobDeclaration).dataset
    if dataset is None or queue is None or not is_over(queue.value, dataset.declaration.epochs):
        return None
    return dataset.declaration.epochs


def _can_retry(job: Entry | None, failures: Entry | None) -> bool:
    has_model = job is None or decode(job.value, JobDeclaration).model is not None
    return not has_model and failures is not None and has_failed(failures.value)


def mark_resumed(coordinator: Coordinator, keys: JobKeys) -> None:
    """Let the next master return the batches that were set aside, once.

    It does so if the declaration and the queue were written in the same transaction.
    """
    entries = [entry for key in (keys.job, keys.task_queues) if (entry := coordinator.get(key)) is not None]
    unchanged: list[Condition] = [Absent(keys.master_lock)]
    unchanged += [ModifiedAt(entry.key, entry.mod_revision) for entry in entries]
    coordinator.transact(unchanged, [Put(entry.key, entry.value) for entry in entries])


def require_startable(former: FormerJob | None, etcd: str, storage: Storage | None, *, resume: bool) -> None:
    """Raise an error if this job, which is not running, may not be started.

    Raises:
        UsageError: it has finished, or was stopped and its checkpoints are elsewhere; names the alternatives.
    """
    if former is None:
        return
    name = former.name
    ways = f"`flightedl forget {name} --etcd {etcd}` lets it start from scratch; --job gives another name"
    if former.is_over and not (resume and (former.can_retry or former.checkpoint is not None)):
        ended = "was stopped by its script"
        if former.finished_epochs is not None:
            ended = f"has finished, with {former.finished_epochs} epoch{'' if former.finished_epochs == 1 else 's'}"
        resuming = (
            "--resume continues from its last checkpoint" if former.checkpoint is not None else "it has no checkpoint"
        )
        if former.can_retry:
            resuming = "--resume retries the batches that were set aside"
        raise UsageError(f"job {name} {ended}: {resuming}; {ways}")
    if former.checkpoint is not None:
        where = "no --checkpoint is given" if storage is None else f"{storage.url} does not have it"
        # An etcd restored from a backup may refer to a deleted checkpoint. With --resume, the master detects this.
        if storage is None or not (
            storage.list(manifest_name(former.checkpoint)) or (resume and _has_later(storage, former.checkpoint))
        ):
            raise UsageError(
                f"job {name} was run before, and its newest checkpoint is c-{former.checkpoint}, but {where}: "
                f"pass the --checkpoint it was run with; {ways}"
            )


def _has_later(storage: Storage, number: int) -> bool:
    return any(found > number for found in candidates(file.name for file in storage.list("")))


def forget(coordinator: Coordinator, keys: JobKeys) -> int:
    """Delete all keys of a job that is not running. Return the number of keys. Checkpoints are kept.

    Raises:
        NotFoundError: etcd has no keys of the job.
        UsageError: processes of the job have leases, so it may be running (see ``liveness``).
    """
    entries = _entries(coordinator, keys)
    if not entries:
        others = [name for name in jobs_in(coordinator) if name != keys.job_name]
        known = f"it has {', '.join(others[:_SHOWN])}" if others else "it has no job"
        raise NotFoundError(f"etcd has no job named {keys.job_name}: {known}")
    if any(names_process(entry, keys) for entry in entries):
        raise UsageError(f"job {keys.job_name} has just been started: stop it first")
    for start in range(0, len(entries), _OPERATIONS_LIMIT):
        some = entries[start : start + _OPERATIONS_LIMIT]
        unchanged = [CreatedAt(entry.key, entry.create_revision) for entry in some]
        if not coordinator.transact(
            [Absent(keys.master_lock), *unchanged], [Delete(entry.key) for entry in some]
        ).committed:
            raise UsageError(f"job {keys.job_name} has just been started: stop it first")
    return len(entries)


def _entries(coordinator: Coordinator, keys: JobKeys) -> list[Entry]:
    found = [entry for prefix in (keys.prefix, keys.state_prefix) for entry in coordinator.list(prefix).entries]
    return [entry for entry in found if entry.key != keys.launcher]
