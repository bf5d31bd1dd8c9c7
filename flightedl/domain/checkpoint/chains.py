"""Chains: a base, which has all rows of a pserver, and increments, which have what has changed since the file before.

Blocks are whole in every file; rows may be a thousand times as much, of which little changes from one checkpoint to the
next. Rules:

* A chain is of one process of a pserver, and its files are in complete checkpoints: an increment is made on the file
  that is in the newest one. Which changes that are is known to the process alone (``changes``): where it does not know,
  it makes a base, and says so.
* What is needed beside a file, its ``links``, is in the manifest: so whether a checkpoint is whole shows in a listing,
  and who reads it need not look at others.
* A chain ends, and is replaced by a base, when it has as many increments as allowed, when these are together larger
  than its base, or when one of its files belongs to a checkpoint that could not be loaded. So reading takes at most
  twice as long, and takes at most twice as much room.
* Where rows are less than a third of a base, increments would save too little: there are none.
* Checkpoints that are kept for ever are bases: they need no others.
* A file's name says with which checkpoint its chain begins (``manifest.shard_name``), so retention needs no other
  memory than the names: it keeps all files from the oldest one on that a kept checkpoint needs.

A master that takes over goes on with the chains that the newest checkpoint's manifest describes (``files_of``), where
it can read that; pservers have gone on meanwhile, and know what has changed since. A process that has loaded a
checkpoint, as all have where a job is resumed, begins with a base: what it has put together, maybe from the files of
several, is no cut of its own, and nobody has noted what changed since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile, checksum
from flightedl.domain.checkpoint.values import Pointer
from flightedl.errors import CorruptError

#: One of so many bytes of a base must be of rows.
_LEAST_SHARE = 3


@dataclass(frozen=True, slots=True)
class Offer:
    """What a pserver may make its file of."""

    #: Its file in the newest complete checkpoint; empty: that is not known, or of another process.
    after: str
    #: Everything is wanted.
    is_base: bool
    #: The number of the checkpoint that the chain begins with.
    since: int


def files_of(latest: Pointer, data: bytes) -> tuple[ShardFile, ...]:
    """The files of the newest complete checkpoint, with what they are built on; empty: that is not its manifest."""
    if checksum(data) != latest.manifest_checksum:
        return ()
    try:
        manifest = Manifest.decode(data)
    except CorruptError:
        return ()
    return manifest.shards if manifest.number == latest.number else ()


class Chains:
    """What the files of the next checkpoint may be built on.

    Args:
        limit: Increments in a row, at most; 0: none.
        keep_every: As ``CheckpointSettings.keep_every``.
    """

    def __init__(self, limit: int, keep_every: int | None) -> None:
        self._limit = limit
        self._keep_every = keep_every
        #: Index -> file in the newest complete checkpoint.
        self._files: dict[int, ShardFile] = {}
        #: Of that checkpoint.
        self._number = 0

    def completed(self, number: int, files: Iterable[ShardFile]) -> None:
        """A checkpoint is complete, and no older one is built on any more."""
        self._number = number
        self._files = {file.index: file for file in files}

    def offer(self, index: int, generation: int, number: int, rejected: Collection[int]) -> Offer:
        """For the file of a pserver's process in the checkpoint ``number``.

        Args:
            index: Of the pserver.
            generation: Of its process.
            number: Of the checkpoint that is ordered.
            rejected: Checkpoints that could not be loaded.
        """
        known = self._files.get(index)
        if known is None or known.generation != generation:
            return Offer("", is_base=True, since=number)
        chain = [*known.links, self._link(known)]
        is_lasting = bool(self._keep_every) and number % (self._keep_every or 1) == 0
        is_base = (
            is_lasting
            or len(chain) > self._limit
            or _LEAST_SHARE * chain[0].row_bytes < chain[0].size_bytes
            or sum(link.size_bytes for link in chain[1:]) > chain[0].size_bytes
            or any(link.number in rejected for link in chain)
        )
        return Offer(known.name, is_base, number if is_base else chain[0].number)

    def linked(self, file: ShardFile, offer: Offer) -> ShardFile | None:
        """A file that was reported, with its links; None: it is built on something that was not offered."""
        if not file.after:
            return file
        known = self._files.get(file.index)
        if offer.is_base or known is None or file.after != offer.after:
            return None
        return replace(file, links=(*known.links, self._link(known)))

    def _link(self, file: ShardFile) -> Link:
        return Link(
            number=self._number, name=file.name, size_bytes=file.size_bytes, hash=file.hash, row_bytes=file.row_bytes
        )
