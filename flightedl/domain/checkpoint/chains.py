"""Chains of checkpoint files: a base with all of a pserver's rows, then increments with the rows changed since.

Every file contains all dense blocks. Rows of tables may take up a thousand times as much space, but few of them change
between two checkpoints. The rules are:

* A chain belongs to a single process of a pserver, and all of its files belong to complete checkpoints. An increment is
  based on that process's file in the newest complete checkpoint. Only the process knows which rows have changed since
  that file (``changes``). If it does not know, it writes a base and says so in its report.
* The manifest lists the files on which an increment is based (its ``links``). A listing of the storage is therefore
  enough to check that a checkpoint is complete, and readers need no other checkpoint's manifest.
* A chain ends, and a new base is written, when one of these is true: the chain has the maximum number of increments;
  its increments together are larger than its base; or one of its files belongs to a checkpoint that could not be
  loaded. Reading a chain thus takes at most twice as much time and space as reading a base.
* If rows make up less than a third of a base, no increments are written, because they would save too little.
* Checkpoints that are kept permanently consist only of bases, so they do not depend on files of other checkpoints.
* The name of an increment contains the number of the checkpoint in which its chain's base was written
  (``manifest.shard_name``). Retention therefore needs only file names: it keeps the oldest base that a retained
  checkpoint needs, and all later files.

A new master continues the chains listed in the newest checkpoint's manifest (``files_of``) if it can read that
manifest; the pservers know which rows have changed since that checkpoint. A process that has loaded a checkpoint starts
with a base, because it has no record of the changes since then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile, checksum
from flightedl.domain.checkpoint.values import Pointer
from flightedl.errors import CorruptError

#: Minimum share of a base that must consist of rows for increments to be written, as a reciprocal: 3 means a third.
_LEAST_SHARE = 3


@dataclass(frozen=True, slots=True)
class Offer:
    """The file on which a pserver may base its next file."""

    #: The pserver's file in the newest complete checkpoint; empty if unknown or written by another process.
    after: str
    is_base: bool
    #: Number of the checkpoint that contains the chain's base.
    since: int


def files_of(latest: Pointer, data: bytes) -> tuple[ShardFile, ...]:
    """Return the newest complete checkpoint's files and their links; empty if ``data`` is not its manifest."""
    if checksum(data) != latest.manifest_checksum:
        return ()
    try:
        manifest = Manifest.decode(data)
    except CorruptError:
        return ()
    return manifest.shards if manifest.number == latest.number else ()


class Chains:
    """The files on which the next checkpoint's increments may be based.

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
        """Record a complete checkpoint. The next increments are based on it."""
        self._number = number
        self._files = {file.index: file for file in files}

    def offer(self, index: int, generation: int, number: int, rejected: Collection[int]) -> Offer:
        """Return the file on which a pserver's next file may be based.

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
        """Return a reported file with its links, or None if it is based on a file that the master did not offer."""
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
