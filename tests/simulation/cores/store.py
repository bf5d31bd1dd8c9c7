"""A model of the checkpoint store: atomic files, errors, unknown outcomes, and damaged files.

The store carries out every request after a delay, even if the client is frozen, dead or replaced by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.cores.rows import Moment, StoredTable
from tests.simulation.cores.world import Action, Process, Reply, World


@dataclass(frozen=True, slots=True)
class StoredShard:
    """Content of a pserver's file: each block's version, updates, values and slot, and the blocks' applied sets."""

    blocks: tuple[int, ...]
    versions: tuple[int, ...]
    updates: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    applied: bytes
    #: (life of the job, election) of the initial values from which the blocks descend; None if they have no values.
    model: tuple[int, int] | None = None
    #: History of each block's rows, and the rows of each span. ``chain`` includes the files below an increment.
    histories: tuple[tuple[Moment, ...], ...] = ()
    tables: tuple[StoredTable, ...] = ()
    chain: tuple[tuple[StoredTable, ...], ...] = ()
    #: Name of the file on which this increment is based. Elements that have not changed since then are ``UNCHANGED``.
    after: str = ""

    def part(self, numbers: Sequence[int], tables: Sequence[StoredTable] = ()) -> StoredShard:
        """Return the content of some of the blocks."""
        places = [self.blocks.index(number) for number in numbers]
        columns: dict[str, Any] = {
            name: tuple(column[place] for place in places) if (column := getattr(self, name)) else ()
            for name in _COLUMNS
        }
        return replace(self, **columns, tables=tuple(tables))

    def parts(self) -> list[StoredShard]:
        """Return the content of each block, and of each span of rows."""
        in_tables = {number for stored in self.tables for number in stored.numbers}
        single = [self.part([number]) for number in self.blocks if number not in in_tables]
        return [*single, *(self.part(stored.numbers, [stored]) for stored in self.tables)]

    @classmethod
    def merged(
        cls, content: Sequence[StoredShard], chain: Sequence[Sequence[StoredTable]], applied: bytes
    ) -> StoredShard:
        """Return the content of several parts. ``chain`` are the rows of the copies from which they come."""
        columns: dict[str, Any] = {
            name: tuple(each for part in content for each in getattr(part, name)) for name in _COLUMNS
        }
        model = next((part.model for part in content), None)
        return cls(**columns, applied=applied, model=model, chain=tuple(map(tuple, chain)))


#: Fields with an entry for each block.
_COLUMNS = ("blocks", "versions", "updates", "values", "slots", "histories")
#: Stands for a value that has not changed.
UNCHANGED = -1


def put_together(chain: Sequence[StoredShard]) -> StoredShard:
    """Merge a base with its increments. Since the base, blocks may have left the pserver, or arrived at it."""
    values = dict(zip(chain[0].blocks, chain[0].values, strict=True))
    for shard in chain[1:]:
        for block, changed in zip(shard.blocks, shard.values, strict=True):
            both = zip(values.get(block, changed), changed, strict=True)
            values[block] = tuple(old if new == UNCHANGED else new for old, new in both)
    last = chain[-1]
    return replace(last, values=tuple(map(values.__getitem__, last.blocks)), chain=tuple(each.tables for each in chain))


def whole(files: Mapping[str, Any], name: str) -> StoredShard | None:
    """Return a file merged with those on which it is based, or None if one of these is missing."""
    chain: list[StoredShard] = []
    while name:
        if name not in files:
            return None
        chain.append(files[name])
        name = files[name].after
    return put_together(chain[::-1])


class Store(Process):
    """Files by name. The content of a file is bytes or a shard."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "store")
        self.files: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        #: Names of damaged files.
        self.rotten: set[str] = set()
        #: Name of a damaged file -> its content and size before the damage.
        self._whole: dict[str, tuple[Any, int]] = {}
        #: Probability that a request fails.
        self.error_rate = 0.0
        self.is_down = False
        #: Time at which a request last failed.
        self.failed_s = -math.inf
        #: Called with the name of each file that is created or deleted.
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
        """Write a complete file or nothing. A write that succeeds may be reported as an error."""

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
        """Reply with (content, True if the file is damaged), or with None if the file does not exist."""

        def carry_out() -> None:
            if self._fails():
                process.deliver(failed)
            else:
                found = (self.files[name], name in self.rotten) if name in self.files else None
                process.deliver(lambda: done(found))

        self._soon(carry_out)

    def list(self, process: Process, done: Reply, failed: Action) -> None:
        """Reply with the sizes of all files: name -> size in bytes."""

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
        """Damage a file: truncate it, or change some of its bytes."""
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
        """Restore all damaged files from copies, as an operator would."""
        for name in self.rotten:
            self.files[name], self.sizes[name] = self._whole[name]
        self.rotten.clear()
