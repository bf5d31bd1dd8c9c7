"""Classify scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    flightedl run flightedl.examples.digits --trainers 2 --pservers 1

A network with one hidden layer, trained in sync or async mode (``--mode``). Arrow files store the images as a column of
fixed-size lists of 64 bytes, which is how Arrow stores tensors of a fixed shape. Every fifth image of a fixed random
order is held out for testing. At the end, one trainer reports the accuracy on these test images.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import flightedl as fe
from flightedl.errors import DataError
from flightedl.examples.prepared import prepared_directory
from flightedl.examples.results import save_arrays, save_json
from flightedl.process.importing import install_command

Floats = npt.NDArray[np.float32]
#: The network's arrays by name, as returned by ``first_parameters`` and ``fe.Job.parameters``.
Parameters = Mapping[str, npt.NDArray[Any]]

#: Name and version of the layout of the files.
KIND = "digits-1"
PIXEL_COUNT = 64
DIGIT_COUNT = 10
HIDDEN_COUNT = 64
RECORD_BATCH_RECORDS = 96
TRAIN_FILE_COUNT = 3

#: ``pixels`` contains an image row by row, with values from 0 (white) to 16 (black).
SCHEMA = pa.schema(
    [
        pa.field("pixels", pa.list_(pa.uint8(), PIXEL_COUNT), nullable=False),
        pa.field("digit", pa.int8(), nullable=False),
    ]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data, train together with the other trainers, and let one of them report."""
    options = _options(arguments)
    directory = prepared_directory(options.data, KIND, write_digits, click.echo)
    with fe.connect() as job:
        data = job.dataset(str(directory / "train-*.arrow"), batch_size=32, epochs=options.epochs, shuffle=True, seed=0)
        model = job.parameters(
            first_parameters(seed=0),
            optimizer=fe.Adam(lr=options.learning_rate),
            mode=fe.Sync() if options.mode == "sync" else fe.Async(),
        )
        for batch in data:
            loss, gradients = loss_and_gradients(model, *images_and_digits(batch))
            model.step(gradients)
            job.log(loss=loss)
        if job.once("report"):
            report(model, directory, job.output_dir)


def write_digits(directory: Path) -> None:
    """Write ``train-*.arrow`` (three files with 15 record batches in total) and ``test.arrow``.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"the digits example needs scikit-learn: {install_command('examples')}") from None
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    is_test = np.arange(len(order)) % 5 == 4
    parts = {"test.arrow": order[is_test]}
    for number, rows in enumerate(np.array_split(order[~is_test], TRAIN_FILE_COUNT)):
        parts[f"train-{number:05d}-of-{TRAIN_FILE_COUNT:05d}.arrow"] = rows
    for name, rows in parts.items():
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[rows].astype(np.uint8).ravel()), PIXEL_COUNT)
        table = pa.table([pixels, pa.array(digits[rows].astype(np.int8))], schema=SCHEMA)
        with pa.ipc.new_file(str(directory / name), SCHEMA) as writer:
            writer.write_table(table, max_chunksize=RECORD_BATCH_RECORDS)


def images_and_digits(batch: pa.RecordBatch) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return a record batch's pixels, scaled to [0, 1], (n, 64), and its digits, (n,)."""
    # flatten() respects the offset of a sliced batch, unlike .values.
    pixels = batch.column("pixels").flatten().to_numpy().reshape(-1, PIXEL_COUNT)
    return pixels.astype(np.float32) / np.float32(16), batch.column("digit").to_numpy().astype(np.int64)


def first_parameters(seed: int) -> dict[str, Floats]:
    """Return the initial values. The same seed gives the same values."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((PIXEL_COUNT, HIDDEN_COUNT)) * (2 / PIXEL_COUNT) ** 0.5
    output = random.standard_normal((HIDDEN_COUNT, DIGIT_COUNT)) * (1 / HIDDEN_COUNT) ** 0.5
    return {
        "hidden": hidden.astype(np.float32),
        "hidden_bias": np.zeros(HIDDEN_COUNT, np.float32),
        "output": output.astype(np.float32),
        "output_bias": np.zeros(DIGIT_COUNT, np.float32),
    }


def loss_and_gradients(
    parameters: Parameters, images: Floats, digits: npt.NDArray[np.int64]
) -> tuple[float, dict[str, Floats]]:
    """Return the mean cross-entropy of n images in nats, and its gradients, with the parameters' shapes and dtypes."""
    hidden = _hidden(parameters, images)  # (n, hidden)
    logits = hidden @ parameters["output"] + parameters["output_bias"]  # (n, 10)
    logits -= logits.max(axis=1, keepdims=True)
    log_chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(digits))
    by_logit = np.exp(log_chances)
    by_logit[rows, digits] -= 1
    by_logit /= len(digits)
    by_hidden = (by_logit @ parameters["output"].T) * (hidden > 0)
    return float(-log_chances[rows, digits].mean()), {
        "hidden": images.T @ by_hidden,
        "hidden_bias": by_hidden.sum(axis=0),
        "output": hidden.T @ by_logit,
        "output_bias": by_logit.sum(axis=0),
    }


def read_digits(parameters: Parameters, images: Floats) -> npt.NDArray[np.int64]:
    """Return the most likely digit for each image, (n,)."""
    logits = _hidden(parameters, images) @ parameters["output"] + parameters["output_bias"]
    return np.asarray(logits.argmax(axis=1), dtype=np.int64)


def _hidden(parameters: Parameters, images: Floats) -> Floats:
    hidden: Floats = np.maximum(images @ parameters["hidden"] + parameters["hidden_bias"], 0)
    return hidden


def accuracy(parameters: Parameters, directory: Path) -> float:
    """Return the accuracy on the test images in ``directory``."""
    with pa.ipc.open_file(str(directory / "test.arrow")) as reader:
        parts = [images_and_digits(reader.get_batch(number)) for number in range(reader.num_record_batches)]
    right = [read_digits(parameters, images) == digits for images, digits in parts]
    return float(np.concatenate(right).mean())


def report(model: Parameters, directory: Path, output: Path) -> None:
    """Evaluate the model, save it and its accuracy in ``output``, and print the accuracy and the paths."""
    share = accuracy(model, directory)
    model_path = save_arrays(output / "model.npz", model)
    save_json(output / "metrics.json", {"test_accuracy": share})
    click.echo(f"test accuracy: {share:.1%}\nmodel: {model_path.absolute()}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flightedl.examples.digits", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/digits"), help="directory of the prepared Arrow files")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
