"""A model of the store of checkpoints: whole files or none, errors, unknown outcomes, and rot.

What was asked for is done some time later, also when the asker is frozen or dead by then: nothing fences a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flightedl.testing.simulation.rows import Moment, StoredTable
from flightedl.testing.simulation.world import Action, Process, Reply, World


@dataclass(frozen=True, slots=True)
class StoredShard:
    """What a pserver's file holds: of each block version, updates, values and slot, and the blocks' applied sets."""

    blocks: tuple[int, ...]
    versions: tuple[int, ...]
    updates: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    applied: bytes
    #: (life of the job, election): which first values they grew from; None: zeros of nobody.
    model: tuple[int, int] | None = None
    #: Of the rows of each block, where there are some, and the rows of each span; of those it is an increment on too.
    histories: tuple[tuple[Moment, ...], ...] = ()
    tables: tuple[StoredTable, ...] = ()
    chain: tuple[tuple[StoredTable, ...], ...] = ()
    #: The file that it is an increment on, if it is one: elements that have not changed since are ``UNCHANGED``.
    after: str = ""


#: In the place of a value.
UNCHANGED = -1


def put_together(chain: Sequence[StoredShard]) -> StoredShard:
    """What a base and the increments on it say."""
    values = chain[0].values
    for shard in chain[1:]:
        values = tuple(
            tuple(old if new == UNCHANGED else new for old, new in zip(*both, strict=True))
            for both in zip(values, shard.values, strict=True)
        )
    return replace(chain[-1], values=values, chain=tuple(shard.tables for shard in chain))


def whole(files: Mapping[str, Any], name: str) -> StoredShard | None:
    """What a file says with what it is an increment on; None: some of that is gone."""
    chain: list[StoredShard] = []
    while name:
        if name not in files:
            return None
        chain.append(files[name])
        name = files[name].after
    return put_together(chain[::-1])


class Store(Process):
    """Files by name, each bytes or a shard."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "store")
        self.files: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        #: Files whose bytes are no longer those that were written.
        self.rotten: set[str] = set()
        #: What they were.
        self._whole: dict[str, tuple[Any, int]] = {}
        #: The chance that a request fails.
        self.error_rate = 0.0
        self.is_down = False
        #: When a request failed last.
        self.failed_s = -math.inf
        #: Told of each new and each deleted file.
        self.written: Callable[[str], None] = lambda _: None
        self.deleted: Callable[[str], None] = lambda _: None

    def _fails(self) -> bool:
        if self.is_down or (self.world.are_faults_on and self.world.random.random() < self.error_rate):
            self.world.fault("store error")
            self.failed_s = self.world.now
            return True
        return False

    def _soon(self, action: Action) -> None:
        self.world.after(0.005 + 0.05 * self.world.random.random(), action)

    def publish(self, process: Process, name: str, content: Any, size_bytes: int, done: Action, failed: Action) -> None:
        """Write a file, all of it or none; an error may come although it is there."""

        def carry_out() -> None:
            fails = self._fails()
            if not fails or self.world.random.random() < 0.3:
                self.files[name] = content
                self.sizes[name] = size_bytes
                self.rotten.discard(name)
                self.written(name)
            process.deliver(failed if fails else done)

        self._soon(carry_out)

    def read(self, process: Process, name: str, done: Reply, failed: Action) -> None:
        """(content, whether it is rotten); None: there is none."""

        def carry_out() -> None:
            if self._fails():
                process.deliver(failed)
            else:
                found = (self.files[name], name in self.rotten) if name in self.files else None
                process.deliver(lambda: done(found))

        self._soon(carry_out)

    def list(self, process: Process, done: Reply, failed: Action) -> None:
        """All files: name -> size in bytes."""

        def carry_out() -> None:
            if self._fails():
                process.deliver(failed)
            else:
                found = dict(self.sizes)
                process.deliver(lambda: done(found))

        self._soon(carry_out)

    def delete(self, process: Process, name: str, done: Action, failed: Action) -> None:
        def carry_out() -> None:
            if self._fails():
                process.deliver(failed)
            else:
                self.remove(name)
                process.deliver(done)

        self._soon(carry_out)

    def remove(self, name: str) -> None:
        if self.files.pop(name, None) is not None:
            del self.sizes[name]
            self.rotten.discard(name)
            self.deleted(name)

    def rot(self, name: str, is_torn: bool) -> None:
        """A file is no longer what was written: shorter, or with other bytes."""
        content = self.files[name]
        if name not in self.rotten:
            self._whole[name] = (content, self.sizes[name])
        self.rotten.add(name)
        if isinstance(content, bytes):
            middle = len(content) // 2
            self.files[name] = content[:middle] if is_torn else content[:middle] + b"\0" + content[middle + 1 :]
        elif content.values:
            flipped = (content.values[0][0] ^ 1, *content.values[0][1:])
            self.files[name] = replace(content, values=(flipped, *content.values[1:]))
        if is_torn:
            self.sizes[name] //= 2

    def mend(self) -> None:
        """Somebody puts copies of all damaged files back."""
        for name in self.rotten:
            self.files[name], self.sizes[name] = self._whole[name]
        self.rotten.clear()
