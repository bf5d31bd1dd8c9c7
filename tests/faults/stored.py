"""Whether a job's last checkpoint is what the job ended with: values, versions, and how often the optimizer ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from flightedl.adapters.storage import open_storage
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.examples.ledger import CLOCKS
from flightedl.formats.checkpoint_files import found_checkpoints
from flightedl.formats.shard_files import StoredBlock, load_shard


def stored_findings(url: str, counts: Path, batches: int | None, *, counts_updates: bool) -> Iterator[str]:
    """What is wrong with the newest checkpoint of the ledger at a URL.

    Args:
        url: Where the checkpoints are.
        counts: What the ledger wrote at its end.
        batches: Of all epochs, where each of them is an update of its own; None: rounds are not known beforehand.
        counts_updates: Each update moves a clock by 1: a mean does, if the weights in it are those that it is divided
            by, and so does Adam, if its averages are of as many steps as it knows of.
    """
    storage = open_storage(f"{url.rstrip('/')}/ledger")
    newest = next((each for each in found_checkpoints(storage, "ledger") if isinstance(each, Manifest)), None)
    if newest is None:
        yield "there is no checkpoint"
        return
    names = [
        parameter["name"] for parameter in msgspec.json.decode(newest.declaration)["model"]["declaration"]["parameters"]
    ]
    with np.load(counts) as arrays:
        ended = {name: arrays[name].reshape(-1) for name in names}
    for file in newest.shards:
        _, _, blocks = load_shard(storage, file.name, file.size_bytes, file.hash)
        for block in blocks:
            if not isinstance(block, StoredBlock):
                continue
            yield from _block_findings(block, names[block.parameter], ended, batches, counts_updates=counts_updates)


def _block_findings(
    block: StoredBlock, name: str, ended: dict[str, np.ndarray], batches: int | None, *, counts_updates: bool
) -> Iterator[str]:
    where = f"checkpoint: block {block.number} of {name!r}"
    if not np.array_equal(block.values, ended[name][block.start : block.stop]):
        yield f"{where} has other values than the job ended with"
    if block.updates > block.version:
        yield f"{where} had {block.updates} updates until version {block.version}"
    if batches is not None and {block.version, block.updates} != {batches}:
        yield f"{where} is at version {block.version} after {block.updates} updates, not {batches}"
    if counts_updates and name in CLOCKS and not block.start and abs(float(block.values[0]) - block.updates) > 0.01:
        yield f"{where} was moved by {float(block.values[0]):.4f} in {block.updates} updates"
