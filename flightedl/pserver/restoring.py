"""Load a pserver's blocks from the newest readable checkpoint, which ``domain.pserver.search`` finds.

Blocks are read directly into their arrays. Clients cannot see them until all of them have been verified.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Skipped, manifest_name
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.pserver.search import CheckpointSearch, Found, ListFiles, LoadBlocks, NothingFound, ReadManifest
from flightedl.domain.retries import machine_error
from flightedl.errors import CorruptError, MachineError, NotFoundError, StoreError, UnavailableError, UsageError
from flightedl.formats.checkpoint_files import load_shard_blocks
from flightedl.ports import Storage
from flightedl.pserver.shard import Shard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a search. ``number`` and ``applied`` are None if no checkpoint was loaded."""

    number: int | None
    applied: AppliedBatches | None
    skipped: tuple[Skipped, ...]


def load_newest(
    storage: Storage,
    job: str,
    parameters: Sequence[ParameterSpec],
    plan: ShardPlan,
    index: int,
    shard: Shard,
    loadable: range | None = None,
    rejected: Container[int] = (),
) -> Restored:
    """Load the blocks of one pserver from the newest readable checkpoint.

    Args:
        storage: Storage of the checkpoints.
        job: The job's name.
        parameters: The declared parameters.
        plan: The current shard plan.
        index: Index of the pserver.
        shard: Destination of the blocks, which is not in use yet.
        loadable: Numbers of the checkpoints that etcd permits; None to permit all.
        rejected: Numbers of the checkpoints that any pserver has failed to load.

    Raises:
        UnavailableError: This machine cannot read the storage, for example without its mount, or lacks memory. Retry.
    """
    search = CheckpointSearch(job, loadable, rejected)
    step = search.begin()
    applied: AppliedBatches | None = None
    while True:
        #: Names of the checkpoint's files that have been read so far; the last one is still being read.
        files: list[str] = [""]
        try:
            match step:
                case ListFiles():
                    step = search.listed(_sizes(storage, is_empty=loadable is None))
                case ReadManifest(number):
                    step = search.manifest_read(storage.read(manifest_name(number)))
                case LoadBlocks(manifest):
                    shard.begin_restore()
                    applied = load_shard_blocks(storage, manifest, parameters, plan, index, shard.restore, files.append)
                    step = search.loaded()
                case Found(number, skipped):
                    _report(skipped)
                    return Restored(number, applied, skipped)
                case NothingFound(skipped):
                    _report(skipped)
                    return Restored(None, None, skipped)
        except (MachineError, MemoryError, StoreError) as error:
            # Not the checkpoint's fault: another pserver can load it, and this one may later.
            raise machine_error(error, "the checkpoint cannot be loaded") or UnavailableError(str(error)) from error
        except (CorruptError, NotFoundError, UsageError) as error:
            step = search.unusable(str(error), files[-1])


def _sizes(storage: Storage, *, is_empty: bool) -> dict[str, int]:
    """Return the sizes of all files. Raises UnavailableError if there are none, although the store is not empty."""
    sizes = {file.name: file.size_bytes for file in storage.list("")}
    if not sizes and not is_empty:
        raise UnavailableError(f"{storage.url} has no files on this machine: mount it, or restore them")
    return sizes


def _report(skipped: Iterable[Skipped]) -> None:
    for each in skipped:
        _log.warning("checkpoint %d is skipped: %s", each.number, each.reason)
