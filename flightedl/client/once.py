"""Names that only one trainer of a job can claim, for work that is done once, such as writing the final report.

A name is a key in etcd on the lease of the trainer that claimed it; the key's create_revision is the *generation* of
the claim. A session that ends cleanly, without an exception of the script, first detaches the key from the lease, so
that no other trainer repeats the work.

A name belongs to one life of the model (``domain.recovery.lives``). A name that is claimed before the trainer has
declared a model belongs to the job.

Guarantees of ``once``:

* According to etcd, at most one trainer holds the name at any time. After a clean end, no other trainer gets it.
* A holder loses the name if it dies or its script fails before its session ends, or if it is frozen or disconnected
  for longer than its lease. Another trainer may then claim the name and repeat the work. So the work is done *at least*
  once if the job succeeds, and should be idempotent.
* A trainer is not notified when it loses a name. ``require`` asks etcd, and so do ``publish`` and
  ``save_model(once=...)`` after writing, just before the file appears. So a trainer that has lost the name does not
  replace a file.

Other side effects, such as sending mail or writing a file by other means, are not protected if the name is lost. Some
time passes between the check and the file's appearance: on an object store, the duration of the upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flightedl.client import arguments
from flightedl.client.connections import persistently
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.recovery.lives import name_in
from flightedl.errors import FencedError, FlightedlError, NotReadyError
from flightedl.ports import Absent, Coordinator, CreatedAt, Put


class Once:
    """Result of claiming a name, truthy if this trainer holds it. Its methods fence the holder's work.

    Attributes:
        name: The claimed name.
        generation: Generation of the claim, higher than that of any earlier claim; 0 if another trainer holds the name.
    """

    def __init__(self, name: str, generation: int, holds: Callable[[int], bool]) -> None:
        self.name = name
        self.generation = generation
        self._holds = holds

    def __bool__(self) -> bool:
        return self.generation > 0

    def require(self) -> None:
        """Raise an error if this trainer has lost the name.

        Raises:
            FencedError: the name was lost with the trainer's lease, or never claimed. Another trainer may hold it.
            UnavailableError: etcd is unreachable.
        """
        if not self or not self._holds(self.generation):
            raise FencedError(f"this trainer no longer has {self.name!r}: leave the work under it to others")

    def publish(self, url: str | Path, data: bytes | Iterable[bytes | memoryview]) -> None:
        """Write a file atomically. The file appears only if this trainer still holds the name.

        Args:
            url: Path or URL. An existing file is replaced.
            data: Content of the file, in one or several pieces.

        Raises:
            FencedError: see ``require``; nothing was changed.
            UnavailableError: the file could not be written, or etcd is unreachable.
        """
        # Imported lazily: this module imports all checkpoint formats, and few trainers write files.
        from flightedl.coordination.checkpoint_places import write_file

        write_file(arguments.url_of("url", url), [data] if isinstance(data, bytes) else data, self.require)


@dataclass(slots=True)
class TrainerNames:
    """Names that one trainer has claimed in etcd, on its lease.

    Attributes:
        coordinator: Access to etcd.
        keys: The job's keys.
        registration: Registration with the trainer's lease.
        waiting: Creates a wait that is reported to the user.
        life: Returns the life of the model that this trainer trains.
    """

    coordinator: Coordinator
    keys: JobKeys
    registration: Registration
    waiting: Callable[[], Waiting]
    life: Callable[[], int]


@dataclass(slots=True)
class OnceNames(TrainerNames):
    """Names that this trainer holds."""

    #: True if the script has tried to claim a name, with or without success.
    is_used: bool = field(init=False, default=False)
    #: Generations of the names that were won, by the key.
    _won: dict[str, int] = field(init=False, default_factory=dict)

    def claim(self, name: str) -> Once:
        """Claim the name if it is free. The result is also truthy if this trainer already holds the name.

        If the name is held by a dead trainer that this one replaces, wait until that trainer's lease has ended. No
        other trainer may be left to claim the name.
        """
        self.is_used = True
        key = self.keys.once + name_in(self.life(), name)
        value = self.registration.trainer.encode()

        def attempt(held: HeldKey) -> int:
            result = self.coordinator.transact([Absent(key)], [held.attached(key, value)])
            if result.committed:
                return result.revision
            entry = result.entries.get(key)
            if entry is not None and self.registration.has_replaced(entry.value.decode()):
                raise NotReadyError(f"a trainer died while it had the name {name!r}, and its lease has not ended yet")
            return 0 if entry is None or entry.value != value else entry.create_revision

        generation = persistently(self.waiting(), lambda: self.registration.under_lease(attempt))
        if generation:
            self._won[key] = generation
        return Once(name, generation, lambda generation: self._holds(key, generation))

    def _holds(self, key: str, generation: int) -> bool:
        entry = persistently(self.waiting(), lambda: self.coordinator.get(key))
        return entry is not None and entry.create_revision == generation

    def keep(self) -> None:
        """Make all held names permanent. Called when the session ends cleanly."""
        for key, generation in self._won.items():
            operation = Put(key, self.registration.trainer.encode())
            transact = partial(self.coordinator.transact, [CreatedAt(key, generation)], [operation])
            try:
                persistently(self.waiting(), transact)
            except FlightedlError:
                return
