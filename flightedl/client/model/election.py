"""Driver of the election of initial values (``domain.trainer.first_values``): etcd access, uploads, and waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, assert_never

import numpy as np
import numpy.typing as npt

from flightedl.client.connections import SLICE_S, Servers
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.trainer.first_values import (
    Candidate,
    Confirm,
    CreateKey,
    Elected,
    ElectionOfFirstValues,
    Pause,
    ReadKey,
    Upload,
    WaitFor,
)
from flightedl.errors import FlightedlError
from flightedl.kernels.half_precision import ITEM_BYTES
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import ElectionRecord
from flightedl.messages.parameters import InitHeader, InitReply
from flightedl.ports import Absent, Coordinator, CreatedAt, Entry, Put
from flightedl.recording.recorded import recorded
from flightedl.wire.rows import PUSH_SCHEMA, encode_rows, group_by_size

if TYPE_CHECKING:
    from flightedl.recording.writer import Recorder

_UPLOAD_S = 120.0
#: Maximum number of conditions in an etcd transaction.
_CONDITIONS_LIMIT = 127


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
    recorder: Recorder | None = None,
) -> Elected:
    """Return once the model has initial values, from this trainer or another one."""
    driver = _Driver(plan, values, registration, coordinator, keys, directory, servers, recorder)
    wait = waiting()
    uploading: Upload | None = None
    while True:
        match driver.election.next_step(driver.newest()):
            case Elected() as elected:
                wait.over()
                return elected
            case Pause(why):
                wait.because(why)
                wait.pause()
            case WaitFor(candidate):
                driver.await_other(candidate)
                wait.because(f"trainer {candidate.trainer} to send the initial values")
                wait.pause()
            case step:
                if isinstance(step, Upload) and step != uploading:
                    # Each upload is a separate wait, which is reported to the user.
                    uploading, wait = step, waiting()
                try:
                    driver.carry_out(step)
                except FlightedlError as error:
                    driver.election.failed(error)


class _Driver:
    """Performs the steps of the election, one at a time. For the arguments see ``elect_and_initialize``."""

    def __init__(
        self,
        plan: ShardPlan,
        values: Mapping[str, npt.NDArray[np.generic]],
        registration: Registration,
        coordinator: Coordinator,
        keys: JobKeys,
        directory: Directory,
        servers: Servers,
        recorder: Recorder | None,
    ) -> None:
        self.election = recorded(recorder, {}, ElectionOfFirstValues, registration.trainer, plan.pserver_count)
        self._plan = plan
        self._values = values
        self._registration = registration
        self._coordinator = coordinator
        self._keys = keys
        self._directory = directory
        self._servers = servers

    def newest(self) -> int:
        """Return the number of the newest election in the directory; 0 if there is none."""
        entry = self._directory.entry(self._keys.init_params)
        return 0 if entry is None else entry.create_revision

    def carry_out(self, step: ReadKey | CreateKey | Upload | Confirm) -> None:
        match step:
            case ReadKey():
                entry = self._coordinator.get(self._keys.init_params)
                self.election.key_read(None if entry is None else _candidate(entry))
            case CreateKey():
                self._stand()
                self.election.creation_attempted()
            case Upload(index, election):
                generation, reply = self._upload(index, election)
                self.election.uploaded(generation, reply.initialized, reply.blocks)
            case Confirm(election, generations):
                self.election.confirmed(self._confirm(election, generations))
            case _:
                assert_never(step)

    def await_other(self, candidate: Candidate) -> None:
        def has_changed(directory: Directory) -> bool | None:
            entry = directory.entry(self._keys.init_params)
            return True if entry is None or entry.mod_revision != candidate.modified else None

        self._directory.wait_until(has_changed, SLICE_S)

    def _stand(self) -> None:
        key, record = self._keys.init_params, encode(ElectionRecord(trainer=self._registration.trainer))
        self._registration.under_lease(
            lambda held: self._coordinator.transact([Absent(key)], [held.attached(key, record)])
        )

    def _upload(self, index: int, election: int) -> tuple[int, InitReply]:
        """Upload the initial values of one pserver's blocks. Return the pserver's generation and its reply."""
        plan = self._plan
        blocks = [plan.block(number) for number in plan.blocks_of(index).tolist()]
        slices = [
            _sendable(self._values[plan.parameters[b.parameter].name]).reshape(-1)[b.start : b.stop] for b in blocks
        ]
        header = InitHeader(
            trainer=self._registration.trainer,
            generation=self._registration.generation,
            plan_hash=plan.hash,
            election=election,
            rows=len(blocks),
        )
        groups = group_by_size([part.nbytes for part in slices])
        batches = (
            (encode_rows([blocks[i].number for i in g], [0] * len(g), [slices[i] for i in g]), None) for g in groups
        )
        generation, connection = self._servers.pserver(index)
        return generation, decode(connection.put(encode(header), PUSH_SCHEMA, batches, timeout_s=_UPLOAD_S), InitReply)

    def _confirm(self, election: int, generations: tuple[int, ...]) -> int | None:
        """Record in etcd that the election is complete. Return the revision, or None if a condition was not met."""
        done = ElectionRecord(trainer=self._registration.trainer, done=True)
        received = [CreatedAt(self._keys.pserver(index), made) for index, made in enumerate(generations)]
        won = self._coordinator.transact(
            [CreatedAt(self._keys.init_params, election), *received[:_CONDITIONS_LIMIT]],
            [Put(self._keys.init_params, encode(done))],
        )
        return won.revision if won.committed else None


def _candidate(entry: Entry) -> Candidate:
    record = decode(entry.value, ElectionRecord)
    return Candidate(record.trainer, record.done, entry.create_revision, entry.mod_revision)


def _sendable(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the array in a dtype that Arrow accepts: 16-bit floats as their bits, other dtypes unchanged."""
    return array.view(np.uint16) if array.dtype.itemsize == ITEM_BYTES else array
