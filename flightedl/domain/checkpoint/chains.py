"""Chains: a base, which contains all rows of a pserver, and increments with the rows changed since the previous file.

Every file contains all dense blocks. Rows of tables may be a thousand times as large, and few of them change from one
checkpoint to the next. Rules:

* A chain belongs to one process of a pserver, and its files to complete checkpoints. An increment is based on the file
  in the newest complete checkpoint. Only the process knows which rows have changed (``changes``). If it does not, it
  writes a base and reports that.
* The manifest lists the files on which an increment is based (its ``links``). A listing therefore shows whether a
  checkpoint is complete, and readers need no other manifest.
* A chain ends, and a new base is written, if it has the maximum number of increments, if its increments together are
  larger than its base, or if one of its files belongs to a checkpoint that could not be loaded. Reading thus takes at
  most twice the time and space.
* If rows are less than a third of a base, increments are not worth it.
* Checkpoints that are kept permanently are bases, so they need no other files.
* The name of an increment contains the number of its base's checkpoint (``manifest.shard_name``). Retention needs only
  the names: it keeps all files from the oldest one that a kept checkpoint needs.

A new master continues the chains in the newest checkpoint's manifest (``files_of``) if it can read it; the pservers
know what has changed since. A process that has loaded a checkpoint begins with a base, because it has no record of
changes since then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile, checksum
from flightedl.domain.checkpoint.values import Pointer
from flightedl.errors import CorruptError

#: At least one in this many bytes of a base must belong to rows.
_LEAST_SHARE = 3


@dataclass(frozen=True, slots=True)
class Offer:
    """File on which a pserver may base its next one."""

    #: The pserver's file in the newest complete checkpoint; empty if unknown, or written by another process.
    after: str
    #: True if the pserver must write a base.
    is_base: bool
    #: Number of the checkpoint with the chain's base.
    since: int


def files_of(latest: Pointer, data: bytes) -> tuple[ShardFile, ...]:
    """Return the files of the newest complete checkpoint, with their links; empty if ``data`` is not its manifest."""
    if checksum(data) != latest.manifest_checksum:
        return ()
    try:
        manifest = Manifest.decode(data)
    except CorruptError:
        return ()
    return manifest.shards if manifest.number == latest.number else ()


class Chains:
    """Files on which those of the next checkpoint may be based.

    Args:
        limit: Maximum number of consecutive increments; 0 disables them.
        keep_every: As in ``CheckpointSettings.keep_every``.
    """

    def __init__(self, limit: int, keep_every: int | None) -> None:
        self._limit = limit
        self._keep_every = keep_every
        #: Pserver index -> its file in the newest complete checkpoint.
        self._files: dict[int, ShardFile] = {}
        #: Number of that checkpoint.
        self._number = 0

    def completed(self, number: int, files: Iterable[ShardFile]) -> None:
        """Record a complete checkpoint, on which the next increments are based."""
        self._number = number
        self._files = {file.index: file for file in files}

    def offer(self, index: int, generation: int, number: int, rejected: Collection[int]) -> Offer:
        """Return the offer for a pserver's file.

        Args:
            index: Index of the pserver.
            generation: Generation of its process.
            number: Number of the ordered checkpoint.
            rejected: Numbers of checkpoints that could not be loaded.
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
        """Return a reported file with its links, or None if it is based on a file that was not offered."""
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
