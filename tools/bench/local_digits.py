"""The digits example's loop without flightedl: the same batches, network and Adam, in one process with plain NumPy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from flightedl.examples.digits import accuracy, first_parameters, images_and_digits, loss_and_gradients

_BATCH_SIZE = 32
_LEARNING_RATE = 3e-3
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


def main(directory: Path, epochs: int) -> None:
    """Train, and print the accuracy."""
    batches: list[pa.RecordBatch] = []
    for path in sorted(directory.glob("train-*.arrow")):
        with pa.ipc.open_file(str(path)) as reader:
            for number in range(reader.num_record_batches):
                records = reader.get_batch(number)
                batches += [records.slice(at, _BATCH_SIZE) for at in range(0, records.num_rows, _BATCH_SIZE)]
    model = first_parameters(seed=0)
    first = {name: np.zeros_like(values) for name, values in model.items()}
    second = {name: np.zeros_like(values) for name, values in model.items()}
    random = np.random.default_rng(0)
    step = 0
    for _ in range(epochs):
        for number in random.permutation(len(batches)):
            _, gradients = loss_and_gradients(model, *images_and_digits(batches[number]))
            step += 1
            rate = _LEARNING_RATE * (1 - _BETA2**step) ** 0.5 / (1 - _BETA1**step)
            for name, gradient in gradients.items():
                first[name] += (1 - _BETA1) * (gradient - first[name])
                second[name] += (1 - _BETA2) * (gradient * gradient - second[name])
                model[name] -= rate * first[name] / (np.sqrt(second[name]) + _EPSILON)
    sys.stdout.write(f"test accuracy: {accuracy(model, directory):.1%}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
