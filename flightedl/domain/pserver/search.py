"""Search for the checkpoint that a pserver loads: the newest one that is allowed and readable.

Any checkpoint of the model is correct, because it stores the applied batches together with the values; the older it is,
the more batches are repeated. If a checkpoint is torn, truncated or modified, it is skipped and reported, and the
previous checkpoint is tried.

Only checkpoints named in etcd are allowed. Newer ones may come from a deposed master, and older ones may belong to a
model that has been initialized again since. Checkpoints that any pserver failed to load are not allowed either:
otherwise, pservers that must all load the same checkpoint might never agree on one.

If a file is damaged, all checkpoints whose increments depend on it are skipped without being read.

The search requests one action at a time (a ``Step``), and the caller reports the result. If no listed checkpoint can be
loaded, the search lists the store once more, because retention may have deleted files while they were being read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Manifest, Skipped, candidates, examine, number_of, without_manifest
from flightedl.marks import sometimes


@dataclass(frozen=True, slots=True)
class ListFiles:
    """List the store, then call ``listed``."""


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """Read the manifest of a checkpoint. Then call ``manifest_read``, or ``unusable`` if there is no manifest."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Load this pserver's blocks from the checkpoint's files. Then call ``loaded`` or ``unusable``."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Found:
    """The blocks of this checkpoint have been loaded. The newer checkpoints in ``skipped`` were unusable."""

    number: int
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class NothingFound:
    """No checkpoint can be loaded."""

    skipped: tuple[Skipped, ...]


Step = ListFiles | ReadManifest | LoadBlocks | Found | NothingFound


class CheckpointSearch:
    """State machine of one search. If the store is unreachable, start a new search later.

    Args:
        job: The job's name.
        loadable: Numbers of the checkpoints that may be loaded; None allows all.
        rejected: Numbers of checkpoints that some pserver failed to load.
    """

    def __init__(self, job: str, loadable: range | None, rejected: Container[int] = ()) -> None:
        self._job = job
        self._loadable = loadable
        self._rejected = rejected
        self._sizes: dict[str, int] = {}
        #: Checkpoints in the latest listing, newest first.
        self._listed: tuple[int, ...] = ()
        #: Listed checkpoints that remain to be tried.
        self._left: tuple[int, ...] = ()
        self._skipped: list[Skipped] = []
        #: Files that turned out to be unreadable.
        self._damaged: set[str] = set()

    def begin(self) -> Step:
        """Return the first step."""
        return ListFiles()

    def listed(self, sizes: Mapping[str, int]) -> Step:
        """Accept a listing of the store's files: name -> size in bytes."""
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
        """Accept the manifest that was requested."""
        found = examine(self._left[0], data, self._sizes, self._job)
        if isinstance(found, Skipped):
            return self._skip(found)
        needed = (file.name for shard in found.shards for file in shard.chain)
        damaged = next((name for name in needed if name in self._damaged), None)
        return LoadBlocks(found) if damaged is None else self.unusable(f"it also needs {damaged}")

    def unusable(self, reason: str, file: str = "") -> Step:
        """Skip this checkpoint: its manifest is missing, or a file is missing or damaged. ``file`` names that file."""
        if file:
            self._damaged.add(file)
        return self._skip(Skipped(self._left[0], reason))

    def _skip(self, skipped: Skipped) -> Step:
        sometimes("a checkpoint was skipped because it could not be used")
        self._skipped.append(skipped)
        self._left = self._left[1:]
        return self._next()

    def loaded(self) -> Step:
        """End the search: all blocks have been loaded."""
        return Found(self._left[0], tuple(self._skipped))
