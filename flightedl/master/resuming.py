"""Beginning a job from its checkpoints, where etcd knows nothing of it.

The declaration, the queue, the pointer and "the first values are there" are put into etcd in one transaction under the
master's fence, before anybody is served. From then on it is an ordinary job whose pservers have all been lost: once a
trainer has declared the model again, which may give the optimizer other settings, they load the checkpoint and announce
what they have, and what is done elsewhere is dispatched again. The number of pservers
may be another one: the blocks stay what they are and are dealt out anew.

A job that is new, at a place where a job of its name has left checkpoints, is refused unless it is to go on from them:
its pservers would otherwise load another run's values one day.
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
    """Put the newest checkpoint's state into etcd, if that is wanted and etcd has none.

    Raises:
        UsageError: there are checkpoints that the job is not to go on from, or none that it could.
        UnavailableError: the storage cannot be read.
        FencedError: the lock is lost.
    """
    if storage is None or coordinator.get(keys.job) is not None or coordinator.get(keys.checkpoint_latest) is not None:
        return
    sizes = _tried_out(storage, held.generation)
    if resume is Resume.NEVER and candidates(sizes):
        raise UsageError(
            f"{storage.url} has checkpoints of job {keys.job_name}: add --resume to go on from them, "
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
        raise FencedError("another master has begun this job meanwhile")
    _log.info("resumed checkpoint=%d pservers=%d before=%d", manifest.number, pserver_count, manifest.pserver_count)


def _tried_out(storage: Storage, generation: int) -> dict[str, int]:
    """The files of a storage, which can be read and written: a job that begins must not train for a day to find out.

    Raises:
        UsageError: it cannot.
    """
    name = f"tried-out-{generation}"
    try:
        sizes = {file.name: file.size_bytes for file in storage.list("")}
        storage.publish(name, [bytes(_TRIED_BYTES)])
        storage.read(name)
        storage.delete(name)
    except (UnavailableError, NotFoundError, CorruptError) as error:
        raise UsageError(
            f"checkpoints cannot be kept at {storage.url}, so the job does not begin: {error}; "
            "repair that, or choose another --checkpoint"
        ) from None
    return sizes


def _put_arrivals(coordinator: Coordinator, held: HeldKey, keys: JobKeys, arrivals: Sequence[ArrivalRecord]) -> None:
    """The files of a followed dataset, a transaction each: nobody reads them before the job is there."""
    for entry in coordinator.list(keys.arrivals).entries:
        held.write([Delete(entry.key)], [Absent(keys.job)])
    for number, arrival in enumerate(arrivals):
        if not held.write([Put(keys.arrival(number), encode(arrival))], [Absent(keys.job)]).committed:
            raise FencedError("another master has begun this job meanwhile")


def newest(storage: Storage, job: str, sizes: Mapping[str, int]) -> tuple[Manifest, bytes, list[int]]:
    """The newest checkpoint that is complete as far as a listing shows, with its manifest's bytes.

    And the numbers of newer ones, which are not.

    Raises:
        UsageError: there is none; says why.
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
        _log.warning("checkpoint %d is skipped: %s", number, found.reason)
        reasons.append(f"checkpoint {number}: {found.reason}")
        rejected.append(number)
    why = f" ({'; '.join(reasons)})"[:300] if reasons else ""
    raise UsageError(f"{storage.url} has no checkpoint of job {job} to go on from{why}: run without --resume")


def redeclared(manifest: Manifest, pserver_count: int) -> JobDeclaration:
    """The declaration of the checkpoint, for another number of pservers.

    Raises:
        UsageError: this version cuts the parameters otherwise.
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
    """The declaration as it is until trainers have declared its parts again, some of it with other settings."""
    model = None if declaration.model is None else msgspec.structs.replace(declaration.model, is_former=True)
    return msgspec.structs.replace(declaration, model=model, is_resumed=True)
