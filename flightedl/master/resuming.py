"""Resume a job from its checkpoints if etcd has no state for it.

Before it serves requests, the master writes the declaration, the queue, the pointer and a completed election to etcd,
in one fenced transaction. After that, the job is in the same state as a job that has lost all its pservers. A trainer
declares the model again, possibly with different optimizer settings. The pservers load the checkpoint and report the
batches that it contains, and missing tasks are repeated. If the number of pservers has changed, the same blocks are
distributed differently.

If the storage contains checkpoints of a job with the same name, a new job is rejected unless it resumes from them.
Otherwise, its pservers might later load values of a different run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from flightedl.config import Resume
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.manifest import Manifest, Skipped, candidates, examine, manifest_name
from flightedl.domain.checkpoint.restoring import saved_plan
from flightedl.domain.master.stored import values_of_checkpoint
from flightedl.domain.model.declared import parameters_of, tables_of
from flightedl.domain.model.sharding import placed, placement_of, plan_for
from flightedl.errors import CorruptError, FencedError, NotFoundError, UnavailableError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import ArrivalRecord, ElectionRecord, JobDeclaration
from flightedl.ports import Absent, Coordinator, Delete, Put, Storage

_log = logging.getLogger(__name__)

_TRIED_BYTES = 1 << 16


def begin(
    storage: Storage | None,
    coordinator: Coordinator,
    held: HeldKey,
    keys: JobKeys,
    pserver_count: int,
    *,
    resume: Resume,
) -> None:
    """If the job should resume and etcd has no state for it, copy the newest checkpoint's state to etcd.

    Raises:
        UsageError: there are checkpoints but the job should not resume, or it should resume but there are none.
        UnavailableError: the storage cannot be read.
        FencedError: the lock was lost.
    """
    if coordinator.get(keys.job) is not None or coordinator.get(keys.checkpoint_latest) is not None:
        return
    if storage is None:
        if resume is Resume.ALWAYS:
            raise UsageError(
                f"etcd has no state of job {keys.job_name}: pass its --checkpoint, or run without --resume"
            )
        return
    sizes = _tried_out(storage, held.generation)
    if resume is Resume.NEVER and candidates(sizes):
        raise UsageError(
            f"{storage.url} has checkpoints of job {keys.job_name}. Add --resume to continue from them, "
            "or choose another --checkpoint or --job"
        )
    if resume is Resume.NEVER or (resume is Resume.AUTO and not candidates(sizes)):
        return
    manifest, data, rejected = newest(storage, keys.job_name, sizes)
    declaration = former(redeclared(manifest, pserver_count))
    _put_arrivals(coordinator, held, keys, declaration.arrivals)
    declaration = msgspec.structs.replace(declaration, arrivals=[])
    values = values_of_checkpoint(manifest, data, declaration, held.generation, pserver_count, sizes, rejected)
    puts = [Put(keys.of_state[name], value) for name, value in values.items()]
    puts.append(Put(keys.init_params, encode(ElectionRecord(trainer=f"checkpoint {manifest.number}", done=True))))
    if not held.write(puts, [Absent(keys.job)]).committed:
        raise FencedError("another master has already started this job")
    _log.info("resumed checkpoint=%d pservers=%d before=%d", manifest.number, pserver_count, manifest.pserver_count)


def _tried_out(storage: Storage, generation: int) -> dict[str, int]:
    """Check that the storage is writable and readable, before the job does any work. Return the files' sizes.

    Raises:
        UsageError: the storage cannot be used.
    """
    name = f"tried-out-{generation}"
    try:
        sizes = {file.name: file.size_bytes for file in storage.list("")}
        storage.publish(name, [bytes(_TRIED_BYTES)])
        storage.read(name)
        storage.delete(name)
    except (UnavailableError, NotFoundError, CorruptError) as error:
        raise UsageError(
            f"the job cannot start, because {storage.url} cannot store checkpoints: {error}. "
            "Repair it, or choose another --checkpoint"
        ) from None
    return sizes


def _put_arrivals(coordinator: Coordinator, held: HeldKey, keys: JobKeys, arrivals: Sequence[ArrivalRecord]) -> None:
    """Write the arrivals of a followed dataset, each in one transaction. They are read only once the job exists."""
    for entry in coordinator.list(keys.arrivals).entries:
        held.write([Delete(entry.key)], [Absent(keys.job)])
    for number, arrival in enumerate(arrivals):
        if not held.write([Put(keys.arrival(number), encode(arrival))], [Absent(keys.job)]).committed:
            raise FencedError("another master has already started this job")


def newest(storage: Storage, job: str, sizes: Mapping[str, int]) -> tuple[Manifest, bytes, list[int]]:
    """Return the newest complete checkpoint in a list of files, its manifest, and the newer unusable checkpoints.

    Raises:
        UsageError: the checkpoint does not exist. The message states the reason.
    """
    reasons: list[str] = []
    rejected: list[int] = []
    for number in candidates(sizes):
        try:
            data = storage.read(manifest_name(number))
        except NotFoundError as error:
            reasons.append(f"checkpoint {number}: {error}")
            rejected.append(number)
            continue
        found = examine(number, data, sizes, job)
        if isinstance(found, Manifest):
            return found, data, rejected
        assert isinstance(found, Skipped)
        _log.warning("skipping checkpoint %d: %s", number, found.reason)
        reasons.append(f"checkpoint {number}: {found.reason}")
        rejected.append(number)
    why = f" ({'; '.join(reasons)})"[:300] if reasons else ""
    raise UsageError(f"{storage.url} has no checkpoint from which job {job} can resume{why}. Run without --resume")


def redeclared(manifest: Manifest, pserver_count: int) -> JobDeclaration:
    """Return the checkpoint's declaration, adapted to the number of pservers, which may have changed.

    Raises:
        UsageError: this version divides the parameters into different blocks.
    """
    declaration = decode(manifest.declaration, JobDeclaration)
    if declaration.model is None:
        raise CorruptError(f"checkpoint {manifest.number} has no model")
    declared = declaration.model
    parameters = parameters_of(declared.declaration)
    saved_plan(manifest, parameters)
    plan = plan_for(parameters, pserver_count, manifest.cut_for, tables_of(declared.declaration))
    placement = placement_of(plan, 1 + (0 if declared.placement is None else declared.placement.version))
    model = msgspec.structs.replace(
        declared,
        pservers=pserver_count,
        plan_hash=placed(plan, placement).hash,
        cut_for=manifest.cut_for,
        placement=placement,
    )
    return msgspec.structs.replace(declaration, model=model)


def former(declaration: JobDeclaration) -> JobDeclaration:
    """Return the declaration, marked so that trainers declare its parts again and may change settings."""
    model = None if declaration.model is None else msgspec.structs.replace(declaration.model, is_former=True)
    return msgspec.structs.replace(declaration, model=model, is_resumed=True)
