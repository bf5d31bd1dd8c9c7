"""Init election: exactly one trainer's values become the model's first values.

The winner holds ``init_params`` on its lease while it uploads to every pserver, then overwrites the key without a
lease and with ``done`` in one transaction that names its election. A winner that dies leaves no key, and another one
wins; its upload, of a newer election, replaces whatever the first had sent. Losers wait for ``done``. A winner that was
overtaken while it was frozen or cut off becomes a loser: its upload is over, and it looks at the election again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from flightedl.client.connections import SLICE_S, Servers, persistently
from flightedl.client.model.declared import sendable
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.trainer.retries import is_transient
from flightedl.errors import FencedError, FlightedlError, NotReadyError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import ElectionRecord
from flightedl.messages.parameters import InitHeader, InitReply
from flightedl.ports import Absent, Coordinator, CreatedAt, Entry, Put
from flightedl.wire.rows import PUSH_SCHEMA, encode_rows, group_by_size

_UPLOAD_S = 120.0
#: Of a transaction.
_CONDITIONS_LIMIT = 127


class _OvertakenError(FencedError):
    """A newer election has begun since this trainer won one: nothing it sends counts any more."""


def elect_and_initialize(
    plan: ShardPlan,
    values: Mapping[str, npt.NDArray[np.generic]],
    *,
    registration: Registration,
    coordinator: Coordinator,
    keys: JobKeys,
    directory: Directory,
    servers: Servers,
    waiting: Callable[[], Waiting],
) -> Entry:
    """Return when the model has its first values, from this trainer or another; the election as it was then."""
    wait = waiting()
    for _ in wait.steps():
        try:
            entry = _stand(registration, coordinator, keys)
            record = decode(entry.value, ElectionRecord)
            if record.done:
                wait.over()
                return entry
            if record.trainer == registration.trainer:
                # A pserver that dies between its upload and the end takes its values along: then all is sent again.
                received = [
                    CreatedAt(
                        keys.pserver(index),
                        _upload(plan, index, values, entry, registration, directory, servers, waiting),
                    )
                    for index in range(plan.pserver_count)
                ]
                done = ElectionRecord(trainer=registration.trainer, done=True)
                won = coordinator.transact(
                    [CreatedAt(keys.init_params, entry.create_revision), *received[:_CONDITIONS_LIMIT]],
                    [Put(keys.init_params, encode(done))],
                )
                if won.committed:
                    wait.over()
                    return dataclasses.replace(entry, mod_revision=won.revision)
            else:
                directory.wait_until(functools.partial(_is_settled, keys.init_params, record), SLICE_S)
                wait.because(f"trainer {record.trainer} to send the first values")
        except FlightedlError as error:
            # Overtaken: somebody else gives the first values, so look at the election again.
            if not is_transient(error) and not isinstance(error, _OvertakenError):
                raise
            wait.because(error)
    raise AssertionError("unreachable")


def _stand(registration: Registration, coordinator: Coordinator, keys: JobKeys) -> Entry:
    """The election's key: this trainer's, if it was free."""
    entry = coordinator.get(keys.init_params)
    if entry is not None:
        return entry
    record = encode(ElectionRecord(trainer=registration.trainer))
    registration.under_lease(
        lambda held: coordinator.transact([Absent(keys.init_params)], [Put(keys.init_params, record, held.lease_id)])
    )
    entry = coordinator.get(keys.init_params)
    if entry is None:
        raise NotReadyError("who stood for the election of the first values is gone already: stand again")
    return entry


def _is_settled(key: str, seen: ElectionRecord, directory: Directory) -> bool | None:
    """True when it is worth looking again: done, or no longer the same candidate's."""
    entry = directory.entry(key)
    return True if entry is None or decode(entry.value, ElectionRecord) != seen else None


def _upload(
    plan: ShardPlan,
    index: int,
    values: Mapping[str, npt.NDArray[np.generic]],
    election: Entry,
    registration: Registration,
    directory: Directory,
    servers: Servers,
    waiting: Callable[[], Waiting],
) -> int:
    """The blocks of one pserver, until it says that it has them all; its generation.

    Raises:
        _OvertakenError: this trainer's election is over.
    """
    blocks = [plan.block(number) for number in plan.blocks_of(index).numbers.tolist()]
    slices = [sendable(values[plan.parameters[b.parameter].name]).reshape(-1)[b.start : b.stop] for b in blocks]
    groups = group_by_size([part.nbytes for part in slices])

    def attempt() -> int:
        newest = directory.entry(election.key)
        if newest is not None and newest.create_revision > election.create_revision:
            raise _OvertakenError("another trainer gives the first values")
        header = InitHeader(
            trainer=registration.trainer,
            generation=registration.generation,
            plan_hash=plan.hash,
            election=election.create_revision,
            rows=len(blocks),
        )
        batches = (
            (encode_rows([blocks[i].number for i in g], [0] * len(g), [slices[i] for i in g]), None) for g in groups
        )
        generation, connection = servers.pserver(index)
        reply = decode(connection.put(encode(header), PUSH_SCHEMA, batches, timeout_s=_UPLOAD_S), InitReply)
        if reply.initialized != reply.blocks:
            raise _OvertakenError("a pserver has values of a newer election")
        return generation

    return persistently(waiting(), attempt)
