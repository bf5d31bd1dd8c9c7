"""How a pserver gets its blocks back: from the newest checkpoint that can be loaded (``domain.pserver.search``).

Blocks are read straight into their arrays, which nobody sees before all of them are verified.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Skipped, manifest_name
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.pserver.search import (
    CheckpointSearch,
    Found,
    ListFiles,
    LoadBlocks,
    NothingFound,
    ReadManifest,
)
from flightedl.errors import CorruptError, NotFoundError, UsageError
from flightedl.formats.checkpoint_files import load_shard_blocks
from flightedl.ports import Storage
from flightedl.pserver.shard import Shard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded. ``number`` None: no checkpoint can be loaded."""

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
    """Load the blocks of one pserver.

    Args:
        storage: Where the checkpoints lie.
        job: The job's name.
        parameters: As declared.
        plan: Where every block lies now.
        index: Of the pserver.
        shard: Takes the blocks; nobody uses it yet.
        loadable: The numbers that etcd allows; None: all.
        rejected: Those of them that some pserver could not load.

    Raises:
        UnavailableError: the storage cannot be read at the moment; ask again.
    """
    search = CheckpointSearch(job, loadable, rejected)
    step = search.begin()
    applied: AppliedBatches | None = None
    while True:
        #: Of the checkpoint, the file that is being read.
        files: list[str] = [""]
        try:
            match step:
                case ListFiles():
                    step = search.listed({file.name: file.size_bytes for file in storage.list("")})
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
        except (CorruptError, NotFoundError, UsageError) as error:
            step = search.unusable(str(error), files[-1])


def _report(skipped: Iterable[Skipped]) -> None:
    for each in skipped:
        _log.warning("checkpoint %d is skipped: %s", each.number, each.reason)
