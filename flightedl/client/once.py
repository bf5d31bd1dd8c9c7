"""Names that one trainer of the job gets, for what must be done once, such as writing the final report.

A name lies in etcd on the lease of its winner; the key's create_revision is the *generation* of that win. A session
that ends cleanly takes the lease off first: what was done stays done.

A name belongs to a life of the model (``domain.recovery.lives``). A name that is taken before the trainer has declared
a model belongs to the job.

What ``once`` promises:

* At any time one trainer at most has the name, by etcd's account, and nobody else gets it after a clean end.
* A winner that dies, or is frozen or cut off for longer than its lease, before its session ends gives the name back:
  somebody else may win it and do all of it again. So what is done under a name is done *at least* once when the job
  ends well, and should be idempotent.
* A winner that was replaced does not notice by itself: ``require`` asks etcd, and ``publish`` and
  ``save_model(once=...)`` do so when all is written, right before the file appears. So a file is not replaced by
  somebody who lost the name.

Not guaranteed: anything about other effects, such as a mail that is sent or a file written in another way; and a moment
passes between the question and the file's appearance, as long as the upload on an object store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flightedl.client import arguments
from flightedl.client.connections import persistently
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.recovery.lives import name_in
from flightedl.errors import FencedError, FlightedlError
from flightedl.ports import Absent, Coordinator, CreatedAt, Put


class Once:
    """Whether this trainer won a name (it is true or false), and the fence of what is done under it.

    Attributes:
        name: The name.
        generation: Of this win: higher than that of any before it. 0: another trainer has the name.
    """

    def __init__(self, name: str, generation: int, holds: Callable[[int], bool]) -> None:
        self.name = name
        self.generation = generation
        self._holds = holds

    def __bool__(self) -> bool:
        return self.generation > 0

    def require(self) -> None:
        """Return if this trainer still has the name.

        Raises:
            FencedError: it was lost together with the trainer's lease, or never won; another trainer may have it.
            UnavailableError: etcd cannot be asked.
        """
        if not self or not self._holds(self.generation):
            raise FencedError(
                f"this trainer does not have {self.name!r} any more: leave to others what is done under it"
            )

    def publish(self, url: str | Path, data: bytes | Iterable[bytes | memoryview]) -> None:
        """Write a file, whole or not at all, and only if this trainer still has the name when it appears.

        Args:
            url: Path or URL; an existing file is replaced.
            data: Its bytes, in one piece or in several.

        Raises:
            FencedError: as of ``require``; nothing was changed.
            UnavailableError: the file could not be written, or etcd cannot be asked.
        """
        # Few trainers write, and it knows all files of checkpoints.
        from flightedl.coordination.checkpoint_places import write_file

        write_file(arguments.url_of("url", url), [data] if isinstance(data, bytes) else data, self.require)


@dataclass(slots=True)
class TrainerNames:
    """Names that one trainer takes in etcd, on its lease.

    Attributes:
        coordinator: Keeps the keys.
        keys: The job's.
        registration: Has the trainer's lease.
        waiting: Makes a wait that the user sees.
        life: Gives the life of the model that the trainer works on.
    """

    coordinator: Coordinator
    keys: JobKeys
    registration: Registration
    waiting: Callable[[], Waiting]
    life: Callable[[], int]


@dataclass(slots=True)
class OnceNames(TrainerNames):
    """The names that this trainer won."""

    #: True if the script has asked for a name, whoever won it.
    is_used: bool = field(init=False, default=False)
    _won: set[str] = field(init=False, default_factory=set)

    def take(self, name: str) -> Once:
        """Win the name, if nobody has it; true also when this trainer won it before."""
        self.is_used = True
        key = self.keys.once + name_in(self.life(), name)
        value = self.registration.trainer.encode()

        def attempt(held: HeldKey) -> int:
            result = self.coordinator.transact([Absent(key)], [Put(key, value, held.lease_id)])
            if result.committed:
                return result.revision
            entry = result.entries.get(key)
            return 0 if entry is None or entry.value != value else entry.create_revision

        generation = persistently(self.waiting(), lambda: self.registration.under_lease(attempt))
        if generation:
            self._won.add(key)
        return Once(name, generation, lambda generation: self._holds(key, generation))

    def _holds(self, key: str, generation: int) -> bool:
        entry = persistently(self.waiting(), lambda: self.coordinator.get(key))
        return entry is not None and entry.create_revision == generation

    def keep(self) -> None:
        """The session ends cleanly: nobody gets these names any more."""
        held = self.registration.held
        for key in sorted(self._won):
            try:
                entry = self.coordinator.get(key)
                if entry is not None and entry.lease_id == held.lease_id:
                    self.coordinator.transact(
                        [CreatedAt(key, entry.create_revision)], [Put(key, self.registration.trainer.encode())]
                    )
            except FlightedlError:
                return
