"""Which checkpoint a pserver loads: the newest of those that may be loaded, and can be.

Every checkpoint of the model will do, because what it says is applied belongs to its values: an older one only means
more batches to be done again. So one that is torn, truncated or changed is skipped and reported, and the one before it
is tried. Newer ones than etcd names a deposed master may have left, and ones before the first that it named may be of a
model that was given first values again; neither is looked at. Nor is one that any pserver could not load: where all
go back to one checkpoint, they would else never agree on it, and retention does not count on it either. Where a file is
damaged, all checkpoints that are increments on it are passed over without reading what they have.

The search asks for one thing at a time (a ``Step``), and is told what came of it. Where all that was listed could not
be loaded, the store is listed once more: retention may have deleted it while it was read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Manifest, Skipped, candidates, examine, number_of, without_manifest


@dataclass(frozen=True, slots=True)
class ListFiles:
    """List the store; then tell ``listed``."""


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """Read the manifest of a checkpoint; then tell ``manifest_read``, or ``unusable`` where there is none."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Load this pserver's blocks from the files of a checkpoint; then tell ``loaded`` or ``unusable``."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Found:
    """The blocks are those of this checkpoint; newer ones were skipped."""

    number: int
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class NothingFound:
    """No checkpoint can be loaded."""

    skipped: tuple[Skipped, ...]


Step = ListFiles | ReadManifest | LoadBlocks | Found | NothingFound


class CheckpointSearch:
    """One search. A store that cannot be reached ends it: begin another one.

    Args:
        job: The job's name.
        loadable: The numbers that may be loaded; None: all.
        rejected: Those of them that some pserver could not load.
    """

    def __init__(self, job: str, loadable: range | None, rejected: Container[int] = ()) -> None:
        self._job = job
        self._loadable = loadable
        self._rejected = rejected
        self._sizes: dict[str, int] = {}
        #: Newest first, as listed last.
        self._listed: tuple[int, ...] = ()
        #: Those that were not tried yet.
        self._left: tuple[int, ...] = ()
        self._skipped: list[Skipped] = []
        #: Files that could not be read.
        self._damaged: set[str] = set()

    def begin(self) -> Step:
        """The first step."""
        return ListFiles()

    def listed(self, sizes: Mapping[str, int]) -> Step:
        """All files of the store, name -> size in bytes."""
        self._sizes = {name: size for name, size in sizes.items() if self._may_load(number_of(name))}
        found = candidates(self._sizes)
        if found == self._listed:
            return NothingFound((*self._skipped, *without_manifest(self._sizes)))
        self._listed = self._left = found
        self._skipped = []
        self._damaged.clear()
        return self._next()

    def _may_load(self, number: int | None) -> bool:
        return self._loadable is None or number in self._loadable

    def _next(self) -> Step:
        if not self._left:
            return ListFiles()
        if self._left[0] in self._rejected:
            return self.unusable("a pserver could not load it")
        return ReadManifest(self._left[0])

    def manifest_read(self, data: bytes) -> Step:
        """The bytes of the manifest that was asked for."""
        found = examine(self._left[0], data, self._sizes, self._job)
        if isinstance(found, Skipped):
            return self._skip(found)
        needed = (file.name for shard in found.shards for file in shard.chain)
        damaged = next((name for name in needed if name in self._damaged), None)
        return LoadBlocks(found) if damaged is None else self.unusable(f"it needs {damaged}, too")

    def unusable(self, reason: str, file: str = "") -> Step:
        """What was asked for of this checkpoint is not there, or is not what it was; ``file``: which one, if one is."""
        if file:
            self._damaged.add(file)
        return self._skip(Skipped(self._left[0], reason))

    def _skip(self, skipped: Skipped) -> Step:
        self._skipped.append(skipped)
        self._left = self._left[1:]
        return self._next()

    def loaded(self) -> Step:
        """All blocks are there."""
        return Found(self._left[0], tuple(self._skipped))
