"""Reading a checkpoint: the blocks of one pserver, or whole parameters, whoever owned their blocks when it was written.

Both read no more than they need: a file of which all blocks are wanted in one pass, with the manifest's hash as the
judge; of other files a few blocks at a time, each with its own checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from flightedl.domain.checkpoint.manifest import (
    Link,
    Manifest,
    ShardFile,
    Skipped,
    candidates,
    examine,
    manifest_name,
)
from flightedl.domain.checkpoint.restoring import FilePart, applied_of, recut, saved_plan
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan
from flightedl.errors import CorruptError, NotFoundError
from flightedl.formats.row_batches import StoredRows, StoredRowSpan
from flightedl.formats.shard_files import ShardHeader, StoredBlock, load_shard, read_blocks, read_rows
from flightedl.ports import Storage

_BLOCKS_AT_ONCE = 16

Array = npt.NDArray[np.generic]


def found_checkpoints(storage: Storage, job: str) -> list[Manifest | Skipped]:
    """All checkpoints that have a manifest, newest first, as far as a listing shows whether they are complete.

    Raises:
        UnavailableError: the storage cannot be read.
    """
    sizes = {file.name: file.size_bytes for file in storage.list("")}
    found: list[Manifest | Skipped] = []
    for number in candidates(sizes):
        try:
            found.append(examine(number, storage.read(manifest_name(number)), sizes, job))
        except NotFoundError as error:
            found.append(Skipped(number, str(error)))
    return found


def verify(storage: Storage, manifest: Manifest) -> int:
    """Read everything, and compare it with its checksums; the bytes read.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
    """
    size_bytes = 0
    for shard in manifest.shards:
        for file in shard.chain:
            header, applied, blocks = load_shard(storage, file.name, file.size_bytes, file.hash)
            require_file(manifest, header, shard.index, file)
            numbers = [block.number for block in blocks if isinstance(block, StoredBlock)]
            AppliedBatches.decode(applied, chain(numbers, *(span.numbers for span in header.rows)))
            size_bytes += file.size_bytes
    return size_bytes


def load_parameters(
    storage: Storage, manifest: Manifest, parameters: Sequence[ParameterSpec]
) -> Iterator[tuple[ParameterSpec, Array]]:
    """Each parameter with its values, in declared order; one at a time is in memory.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UsageError: the checkpoint is of other parameters.
    """
    plan = saved_plan(manifest, parameters)
    for spec in parameters:
        values = np.empty(spec.size, spec.storage_dtype)
        for first in plan.block_range(spec.name)[::_BLOCKS_AT_ONCE]:
            numbers = range(first, min(first + _BLOCKS_AT_ONCE, plan.block_range(spec.name).stop))
            for file in manifest.shards:
                mine = [number for number in numbers if plan.block(number).pserver == file.index]
                if not mine:
                    continue
                contents = read_blocks(storage, file.name, file.size_bytes, mine)
                require_file(manifest, contents.header, file.index, file)
                for block in contents.blocks:
                    values[block.start : block.stop] = block.values
        yield spec, values.reshape(spec.shape)


def load_shard_blocks(
    storage: Storage,
    manifest: Manifest,
    parameters: Sequence[ParameterSpec],
    plan: ShardPlan,
    index: int,
    take: Callable[[StoredBlock | StoredRows | StoredRowSpan], None],
    begin: Callable[[str], None] = lambda _: None,
) -> AppliedBatches:
    """Give ``take`` every block that the pserver ``index`` of ``plan`` owns, and rows; what is applied to all that.

    Of rows, those of its buckets come and maybe others, the last file's behind its spans: before these come rows of the
    files that it is built on, in their order.

    Blocks count only when this returns. ``begin`` is told the name of each file before it is read.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UsageError: the checkpoint is of other parameters.
        UnavailableError: the storage cannot be read at the moment.
    """
    parts = recut(manifest, saved_plan(manifest, parameters), plan, index)
    applied: dict[str, AppliedBatches] = {}
    for part in parts:
        applied[part.file.name] = _load_part(storage, manifest, part, plan.block_count, take, begin)
    return applied_of(parts, applied)


def _load_part(
    storage: Storage,
    manifest: Manifest,
    part: FilePart,
    block_count: int,
    take: Callable[[StoredBlock | StoredRows | StoredRowSpan], None],
    begin: Callable[[str], None],
) -> AppliedBatches:
    file = part.file
    blocks, buckets = part.split(block_count)
    if buckets:
        _load_links(storage, manifest, file, take, begin)
    begin(file.name)
    if part.is_whole:
        header, applied, found = load_shard(storage, file.name, file.size_bytes, file.hash)
        require_file(manifest, header, file.index, file)
        for span in header.rows:
            take(span)
        for each in found:
            take(each)
    else:
        # A few at a time: what one pserver needs of a file may be all but a block of it.
        applied = b""
        if buckets:
            header, applied, rows = read_rows(storage, file.name, file.size_bytes)
            require_file(manifest, header, file.index, file)
            for span in header.rows:
                take(span)
            for some in rows:
                take(some)
        for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
            wanted = blocks[first : first + _BLOCKS_AT_ONCE]
            contents = read_blocks(storage, file.name, file.size_bytes, wanted)
            require_file(manifest, contents.header, file.index, file)
            applied = contents.applied
            for block in contents.blocks:
                take(block)
    return AppliedBatches.decode(applied, part.of_file)


def _load_links(
    storage: Storage,
    manifest: Manifest,
    file: ShardFile,
    take: Callable[[StoredBlock | StoredRows | StoredRowSpan], None],
    begin: Callable[[str], None],
) -> None:
    """The rows of what a file is an increment on."""
    for link in file.links:
        begin(link.name)
        header, _, rows = read_rows(storage, link.name, link.size_bytes)
        require_file(manifest, header, file.index, link)
        for some in rows:
            take(some)


def require_file(manifest: Manifest, header: ShardHeader, index: int, file: ShardFile | Link) -> None:
    """The file is the one that the manifest means."""
    number = file.number if isinstance(file, Link) else manifest.number
    said = (header.job, header.number, header.index, header.pservers, header.plan_hash)
    if said != (manifest.job, number, index, manifest.pserver_count, manifest.plan_hash):
        raise CorruptError(f"{file.name} is the file of another checkpoint")
