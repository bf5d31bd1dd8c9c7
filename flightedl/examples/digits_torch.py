"""Classify the handwritten digits of ``digits`` with a convolutional network in PyTorch.

    flightedl run flightedl.examples.digits_torch --trainers 3 --pservers 1

The program is an ordinary PyTorch training loop except for two lines: the optimizer runs on the pservers, and the
batches come from the job. The statistics of batch normalization are shared by all trainers. At the end, one trainer
reports the accuracy on the test images and saves the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import click
import pyarrow as pa
import torch
from torch import nn
from torch.nn import functional

import flightedl as fe
from flightedl.examples.digits import KIND, write_digits
from flightedl.examples.prepared import prepared_directory
from flightedl.examples.results import save_json


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data, train together with the other trainers, and let one of them report."""
    options = _options(arguments)
    directory = prepared_directory(options.data, KIND, write_digits, click.echo)
    net = network(seed=0)
    with fe.connect() as job:
        data = job.dataset(str(directory / "train-*.arrow"), batch_size=32, epochs=options.epochs, shuffle=True, seed=0)
        optimizer = fe.torch.Optimizer(
            net,
            job,
            fe.AdamW(lr=options.learning_rate),
            mode=fe.Sync() if options.mode == "sync" else fe.Async(),
        )
        for images, digits in fe.torch.batches(data, transform=images_and_digits):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images), digits)
            loss.backward()
            optimizer.step()
            job.log(loss=loss)
        if won := job.once("report"):
            share = accuracy(net, directory)
            path = job.output_dir / "model.safetensors"
            job.save_model(path, once=won)
            save_json(job.output_dir / "metrics.json", {"test_accuracy": share})
            click.echo(f"test accuracy: {share:.1%}\nmodel: {path.absolute()}")


def network(seed: int) -> nn.Module:
    """Return a network for images of shape (n, 1, 8, 8). The same seed gives the same values."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 10),
    )


def images_and_digits(batch: pa.RecordBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a record batch's pixels, scaled to [0, 1], (n, 1, 8, 8), and its digits, (n,)."""
    pixels = torch.from_dlpack(batch.column("pixels").flatten())
    return pixels.reshape(-1, 1, 8, 8).float() / 16, torch.from_dlpack(batch.column("digit")).long()


def accuracy(net: nn.Module, directory: Path) -> float:
    """Return the accuracy on the test images in ``directory``."""
    right, count = 0, 0
    net.eval()
    with pa.ipc.open_file(str(directory / "test.arrow")) as reader, torch.no_grad():
        for number in range(reader.num_record_batches):
            images, digits = images_and_digits(reader.get_batch(number))
            right += int((net(images).argmax(dim=1) == digits).sum())
            count += len(digits)
    return right / count


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flightedl.examples.digits_torch", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/digits"), help="directory of the prepared Arrow files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
