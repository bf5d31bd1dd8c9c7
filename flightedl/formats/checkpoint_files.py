"""Read a checkpoint: the blocks of one pserver, or complete parameters, whichever pservers wrote them.

Only the necessary parts of files are read. If all blocks in a file are needed, the file is read in one pass and
verified by its hash in the manifest. Other files are read a few blocks at a time, and each block has a checksum.
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
from flightedl.domain.model.sharding import ShardPlan, name_same_cut
from flightedl.domain.tables.restoring import FileBuckets, buckets_of_chain
from flightedl.errors import CorruptError, NotFoundError
from flightedl.formats.row_batches import StoredRows, StoredRowSpan
from flightedl.formats.shard_files import ShardHeader, StoredBlock, load_shard, read_blocks, read_rows
from flightedl.ports import Storage

_BLOCKS_AT_ONCE = 16
#: A record in a pserver's file. In each file, ``FileBuckets`` precede the rows.
Record = StoredBlock | StoredRows | StoredRowSpan | FileBuckets

Array = npt.NDArray[np.generic]


def found_checkpoints(storage: Storage, job: str) -> list[Manifest | Skipped]:
    """Return all checkpoints that have a manifest, newest first. Each states if any of its files are missing.

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


def checkpoint_numbered(storage: Storage, job: str, number: int) -> Manifest:
    """Return the manifest of a checkpoint. Raises NotFoundError if it is incomplete or was deleted."""
    for found in found_checkpoints(storage, job):
        if isinstance(found, Manifest) and found.number == number:
            return found
    raise NotFoundError(f"checkpoint {number} is not complete, or was deleted in favor of newer ones")


def verify(storage: Storage, manifest: Manifest) -> int:
    """Read all files and verify their checksums. Return the number of bytes read.

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
    """Yield each parameter with its values, in declared order. Only one parameter is in memory at a time.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UsageError: the checkpoint has other parameters.
    """
    plan = saved_plan(manifest, parameters)
    for spec in parameters:
        values, at = np.empty(spec.size, spec.storage_dtype), 0
        for piece in parameter_pieces(storage, manifest, plan, spec, 0, spec.size):
            values[at : at + piece.size] = piece
            at += piece.size
        yield spec, values.reshape(spec.shape)


def parameter_pieces(
    storage: Storage, manifest: Manifest, plan: ShardPlan, spec: ParameterSpec, start: int, stop: int
) -> Iterator[Array]:
    """Yield the elements ``start`` to ``stop`` of a parameter in parts. Raises the same errors as ``read_blocks``.

    Args:
        storage: Storage with the checkpoint.
        manifest: Manifest of the checkpoint.
        plan: Output of ``saved_plan``.
        spec: The parameter.
        start: First element.
        stop: Element after the last one.
    """
    blocks = [
        block for block in map(plan.block, plan.block_range(spec.name)) if start < block.stop > block.start < stop
    ]
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        some = blocks[first : first + _BLOCKS_AT_ONCE]
        found: dict[int, Array] = {}
        for file in manifest.shards:
            mine = [block.number for block in some if block.pserver == file.index]
            if mine:
                contents = read_blocks(storage, file.name, file.size_bytes, mine)
                require_file(manifest, contents.header, file.index, file)
                found.update((block.number, block.values) for block in contents.blocks)
        for block in some:
            yield found[block.number][max(start - block.start, 0) : stop - block.start]


def load_shard_blocks(
    storage: Storage,
    manifest: Manifest,
    parameters: Sequence[ParameterSpec],
    plan: ShardPlan,
    index: int,
    take: Callable[[Record], None],
    begin: Callable[[str], None] = lambda _: None,
) -> AppliedBatches:
    """Pass all blocks and rows that pserver ``index`` owns in ``plan`` to ``take``. Return their applied sets.

    ``take`` may also receive rows of other buckets; use only rows of buckets in the most recent ``FileBuckets``. In
    each file, rows follow the spans. If the file is an increment, the rows of earlier files come first, oldest first.

    The blocks are valid only after this function has returned. ``begin`` receives each file's name before it is read.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UsageError: the checkpoint has other parameters.
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
    take: Callable[[Record], None],
    begin: Callable[[str], None],
) -> AppliedBatches:
    file = part.file
    blocks, buckets = part.split(block_count)
    if buckets:
        _load_links(storage, manifest, file, take, begin)
    begin(file.name)
    if part.is_complete:
        header, applied, found = load_shard(storage, file.name, file.size_bytes, file.hash)
        require_file(manifest, header, file.index, file)
        for span in header.rows:
            take(span)
        for each in found:
            take(each)
    else:
        # Read in batches, because this pserver may need almost all blocks in the file.
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
    take: Callable[[Record], None],
    begin: Callable[[str], None],
) -> None:
    *older, newest = chain_buckets(storage, file, begin)
    for link, buckets in zip(file.links, older, strict=True):
        begin(link.name)
        header, _, rows = read_rows(storage, link.name, link.size_bytes)
        require_file(manifest, header, file.index, link)
        take(buckets)
        for some in rows:
            take(some)
    take(newest)


def chain_buckets(
    storage: Storage, file: ShardFile, begin: Callable[[str], None] = lambda _: None
) -> list[FileBuckets]:
    """Return, for each file of a chain, the buckets whose rows are valid. The oldest file comes first."""
    files = []
    for each in file.chain:
        begin(each.name)
        spans = read_blocks(storage, each.name, each.size_bytes, ()).header.rows
        files.append(
            (frozenset(n for span in spans for n in span.numbers), [n for span in spans for n in span.complete])
        )
    return buckets_of_chain(files)


def require_file(manifest: Manifest, header: ShardHeader, index: int, file: ShardFile | Link) -> None:
    """Check that the file is the one in the manifest. Older files of a chain may distribute blocks differently."""
    if isinstance(file, Link):
        is_listed = header.number == file.number and name_same_cut(header.plan_hash, manifest.plan_hash)
    else:
        said = (header.number, header.pservers, header.plan_hash)
        is_listed = said == (manifest.number, manifest.pserver_count, manifest.plan_hash)
    if not is_listed or (header.job, header.index) != (manifest.job, index):
        raise CorruptError(f"{file.name} is the file of another checkpoint")
