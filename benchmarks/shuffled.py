"""What ``shuffle=True`` is worth: accuracy on digits that are sorted by label, and equal global batches of a group.

    python -m benchmarks.shuffled

The training files have row groups of 140 records, sorted by label or shuffled beforehand. A network is trained for
three epochs with Adam on the batches of 2 ranks x 16 records, whose mean gradient is what DDP applies. The script also
compares the losses for 1, 2 and 4 ranks with one global batch, and counts what ranks decode and hold.

Two trainers on parameter servers are imitated for 30 epochs: tasks in the queue's order, and steps that are rounds of
both trainers (sync), or one step late (async).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flightedl.adapters.storage import FsspecFiles
from flightedl.client.data.pieces import PieceReader
from flightedl.domain.groups.plan import EpochEnd, RoundPlan
from flightedl.domain.groups.shuffling import Shuffling, advice_of, order_of
from flightedl.domain.queue.order import order_of as order_of_tasks
from flightedl.examples import digits as digits_model
from flightedl.formats.dataset_spec import DatasetSpec, spec_of
from flightedl.formats.index import build_index
from flightedl.formats.mixed_layout import drawing_of, group_data, layout_of
from flightedl.formats.reader import DecodedChunks, read_task
from flightedl.messages.declarations import DatasetDeclaration

EPOCHS = 3


class Ranks:
    """The ranks of a group that read a file."""

    def __init__(self, path: Path, seed: int, count: int, batch_size: int, shuffling: Shuffling | None = None) -> None:
        spec, given = DatasetSpec((str(path),), format="parquet"), shuffling or Shuffling()
        index = build_index(FsspecFiles(), spec)
        data = group_data(index, DatasetDeclaration(urls=[str(path)], batch_size=1), seed)
        order = order_of(data, batch_size, given)
        self.advice = advice_of(data, order, batch_size, count, given)
        self.readers = [PieceReader(FsspecFiles(), index, data, spec, None, lambda _: None) for _ in range(count)]
        self._plans = [
            RoundPlan(data.record_count, epochs=EPOCHS, order=order, world_size=count, rank=rank, batch_size=batch_size)
            for rank in range(count)
        ]

    def rounds(self) -> Iterator[list[pa.RecordBatch]]:
        while (steps := [plan.next() for plan in self._plans])[0] is not None:
            if not isinstance(steps[0], EpochEnd):
                yield [
                    next(reader.read([step]))  # type: ignore[list-item]
                    for reader, step in zip(self.readers, steps, strict=True)
                ]


def train(ranks: Ranks, seed: int) -> tuple[nn.Module, list[float]]:
    """Train on all global batches. Return the network and the loss of each batch."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    for batches in ranks.rounds():
        optimizer.zero_grad()
        count = sum(batch.num_rows for batch in batches)
        total = 0.0
        for batch in batches:
            x, y = tensors(batch)
            loss = cross_entropy(net(x), y, reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return net, losses


class Trainers:
    """Two trainers that read tasks of 32-record batches."""

    def __init__(self, path: Path, seed: int) -> None:
        declared = DatasetDeclaration(
            urls=[str(path)], batch_size=32, format="parquet", shuffle=True, seed=seed, shuffle_bytes=1 << 30
        )
        self._spec, self._seed = spec_of(declared), seed
        self._index = build_index(FsspecFiles(), self._spec)
        self.layout = layout_of(self._index, declared, 32, drawing=drawing_of(declared))
        self._decoded = [DecodedChunks(1 << 30) for _ in range(2)]

    def steps(self, epochs: int) -> Iterator[list[pa.RecordBatch]]:
        """Yield the batches that the trainers process at the same time. In the end of an epoch, only one has some."""
        count = self.layout.task_count
        for epoch in range(epochs):
            order = order_of_tasks(count, count, self._seed, epoch)
            tasks = iter([order.at(position) for position in range(count)])

            def batches(trainer: int, tasks: Iterator[int] = tasks, epoch: int = epoch) -> Iterator[pa.RecordBatch]:
                for task in tasks:
                    chunks, more = self.layout.chunks_of(task), {"decoded": self._decoded[trainer]}
                    schema = self._index.schema
                    yield from read_task(
                        FsspecFiles(), chunks, self._spec, self._seed, epoch, task, schema=schema, **more
                    )

            for pair in zip_longest(batches(0), batches(1)):
                yield [batch for batch in pair if batch is not None]


def train_on_servers(path: Path, seed: int, *, is_sync: bool, epochs: int = 30) -> tuple[digits_model.Parameters, str]:
    """Train the network of the example ``digits`` with Adam. Return its values, and what a batch mixes."""
    trainers = Trainers(path, seed)
    values = digits_model.first_parameters(seed)
    means = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in values.items()}
    update, late = 0, dict(values)
    for batches in trainers.steps(epochs):
        found = []
        for batch in batches:
            x, y = (each.numpy() for each in tensors(batch))
            found.append(digits_model.loss_and_gradients(late if not is_sync else values, x, y)[1])
            if not is_sync:
                late = dict(values)
                values, update = adam(values, found.pop(), means, update)
        if is_sync:
            mean = {name: np.mean([each[name] for each in found], axis=0) for name in values}
            values, update = adam(values, mean, means, update)
    mixed = len(set(trainers.layout.pieces.chunks.tolist())) if trainers.layout.pieces is not None else 1
    return values, f"{trainers.layout.task_count} tasks, {mixed} chunks"


def adam(
    values: Mapping[str, Any], gradients: Mapping[str, Any], means: dict[str, tuple[Any, Any]], update: int
) -> tuple[dict[str, Any], int]:
    """Return the values after one update, and the number of updates. Changes ``means``."""
    found = {}
    for name, value in values.items():
        first, second = means[name]
        means[name] = first, second = (
            0.9 * first + 0.1 * gradients[name],
            0.999 * second + 0.001 * gradients[name] ** 2,
        )
        rate = 3e-3 * np.sqrt(1 - 0.999 ** (update + 1)) / (1 - 0.9 ** (update + 1))
        found[name] = (value - rate * first / (np.sqrt(second) + 1e-8)).astype(np.float32)
    return found, update + 1


def tensors(batch: pa.RecordBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels, (n, 64), and the digits, (n,)."""
    x = np.array(batch["pixels"].flatten().to_numpy(), np.float32).reshape(-1, 64) / 16
    return torch.from_numpy(x), torch.from_numpy(np.array(batch["digit"].to_numpy()))


def main() -> None:
    """Print the tables of docs/data-only.md."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(digits))
    test, training = chosen[::5], np.delete(chosen, np.s_[::5])
    of_test = torch.from_numpy(images[test].astype(np.float32) / 16), torch.from_numpy(digits[test])
    with tempfile.TemporaryDirectory() as directory:
        paths = {
            "shuffled beforehand": training,
            "sorted by label": training[np.argsort(digits[training], kind="stable")],
        }
        for name, rows in paths.items():
            pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[rows].astype(np.float32).ravel()), 64)
            table = pa.table({"pixels": pixels, "digit": digits[rows]})
            pq.write_table(table, Path(directory, name), row_group_size=140)
        by_chunk = Shuffling(lanes=1, block=140)
        for name, shuffling in (
            ("shuffled beforehand", None),
            ("sorted by label", None),
            ("sorted by label", by_chunk),
        ):
            found = []
            for seed in range(3):
                ranks = Ranks(Path(directory, name), seed, 2, 32, shuffling)
                net, _ = train(ranks, seed)
                found.append((net(of_test[0]).argmax(dim=1) == of_test[1]).double().mean().item())
            print(f"{name}, {shuffling or 'defaults'}: {np.mean(found):.3f}", [f"{each:.3f}" for each in found])
            print("   ", ranks.advice.text)
        for is_sync in (True, False):
            for name in paths:
                found = []
                for seed in range(3):
                    values, mixed = train_on_servers(Path(directory, name), seed, is_sync=is_sync)
                    right = digits_model.read_digits(values, of_test[0].numpy()) == of_test[1].numpy()
                    found.append(float(right.mean()))
                mode = "sync" if is_sync else "async"
                print(f"parameter servers, {mode}, {name}: {np.mean(found):.3f}", [f"{each:.3f}" for each in found])
            print("   ", mixed)
        curves = {}
        for count in (1, 2, 4):
            ranks = Ranks(Path(directory, "sorted by label"), 0, count, 32)
            _, curves[count] = train(ranks, 0)
            decoded = [reader.decoded_records for reader in ranks.readers]
            print(
                f"{count} ranks: records decoded by a rank: {decoded}, most bytes held: {ranks.readers[0].held_bytes}"
            )
        worst = max(np.abs(np.subtract(curves[1], curves[count])).max() for count in (2, 4))
        print(f"greatest difference of {len(curves[1])} losses between 1, 2 and 4 ranks: {worst:.1e}")


if __name__ == "__main__":
    main()
