"""Report on a trained flights model: metrics, learning curves and output files.

Files in the output directory: ``model.npz`` (the network, and the ids and rows of each field), ``metrics.json``, and
``learning-curve.png`` if matplotlib is installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from flightedl.curves.drawing import can_draw, draw
from flightedl.curves.files import read_points
from flightedl.curves.merging import LABELS, Curve, curves_of
from flightedl.curves.terminal import charts
from flightedl.errors import NotFoundError
from flightedl.examples.flights_alone import Flights, logistic_regression, network_alone
from flightedl.examples.flights_data import FlightFiles
from flightedl.examples.flights_model import (
    FIELDS,
    LATE_MINUTES,
    Floats,
    Parameters,
    Rows,
    Training,
    features,
    probabilities,
)
from flightedl.examples.results import save_arrays, save_json

#: A function that looks up the rows of a batch's ids, by field.
RowsOf = Callable[[pa.Table], Rows]
#: Number of batches per update of the network in a single process, as in a round of two trainers.
_BATCHES_ALONE = 2
_CURVE_POINTS = 100


def report(
    model: Parameters, rows_of: RowsOf, files: FlightFiles, training: Training, directory: Path, *, compare: bool
) -> None:
    """Evaluate the model, save it and its metrics in ``directory``, and print the metrics.

    Args:
        model: Dense part of the model.
        rows_of: Function that looks up the rows of records.
        files: The flights.
        training: Settings of the training.
        directory: Output directory.
        compare: True to also train other models for comparison.
    """
    train, held_out = ds.dataset(list(map(str, files.train_files))).to_table(), pq.read_table(files.held_out)
    late = features(held_out).late
    judged = {"this model": probabilities(model, rows_of(held_out), features(held_out))}
    curves: dict[str, Curve] = {"this model": _logged(directory)}
    if compare:
        flights = Flights(train, held_out)
        click.echo("training the same network in one process and a logistic regression for comparison")
        losses: list[tuple[float, float]] = []
        judged["one process"] = network_alone(
            flights, training, _BATCHES_ALONE, lambda records, loss: losses.append((records, loss))
        )
        curves["one process"] = _averaged(losses)
        judged["logistic regression"] = logistic_regression(flights)
    judged["base rate"] = np.full(len(late), late.mean(dtype=np.float64))
    figures = {name: judge(late, found) for name, found in judged.items()}
    _show_curves({name: curve for name, curve in curves.items() if curve}, directory)
    click.echo(
        f"{len(late):,} held-out flights, {late.mean():.1%} of them more than {LATE_MINUTES} minutes late\n"
        f"{'':21}  log loss     AUC"
    )
    for name, values in figures.items():
        click.echo(f"  {name:19}  {values['log_loss']:8.4f}  {values['auc']:6.4f}")
    if compare:
        ahead = figures["this model"]["auc"] - figures["logistic regression"]["auc"]
        click.echo(f"  the model's AUC is {abs(ahead):.4f} {'above' if ahead >= 0 else 'below'} logistic regression's")
    saved = save_arrays(directory / "model.npz", {**model, **_tables(train, rows_of)})
    metrics = save_json(directory / "metrics.json", {"held_out_flights": len(late), "models": figures})
    click.echo(f"model:   {saved.absolute()}\nmetrics: {metrics.absolute()}")


def judge(late: Floats, found: npt.NDArray[np.floating]) -> dict[str, float]:
    """Return metrics of predicted probabilities."""
    # Imported lazily: the import takes a second, and only the trainer that reports needs it.
    from sklearn.metrics import log_loss, roc_auc_score

    certain = np.clip(found.astype(np.float64), 1e-7, 1 - 1e-7)
    return {"log_loss": float(log_loss(late, certain, labels=[0, 1])), "auc": float(roc_auc_score(late, found))}


def _tables(train: pa.Table, rows_of: RowsOf) -> dict[str, npt.NDArray[np.generic]]:
    """Return the ids in the training data, and their rows, by field.

    One request looks up all fields, so a field with fewer ids repeats its last id.
    """
    known = {name: pc.unique(train[name].combine_chunks()) for name in FIELDS}
    count = max(map(len, known.values()))
    places = np.arange(count)
    filled = pa.table({name: ids.take(pa.array(np.minimum(places, len(ids) - 1))) for name, ids in known.items()})
    rows = rows_of(filled)
    found: dict[str, npt.NDArray[np.generic]] = {}
    for name, ids in known.items():
        texts = np.asarray(ids.to_pylist())
        found |= {f"{name}.ids": texts, f"{name}.rows": rows[name][: len(ids)]}
    return found


def _logged(directory: Path) -> Curve:
    """Return the loss logged by all trainers. The last half second of the other trainers may be missing."""
    try:
        return curves_of(read_points(directory), limit=_CURVE_POINTS).get("loss", ())
    except NotFoundError:
        return ()


def _averaged(points: list[tuple[float, float]]) -> Curve:
    size = -(-len(points) // _CURVE_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]


def _show_curves(curves: Mapping[str, Curve], directory: Path) -> None:
    if not curves:
        return
    panels = {"loss while training": curves}
    first = dict(list(curves.items())[:1])
    for line in charts({"loss while training": first}, LABELS["records"], min(80, shutil.get_terminal_size().columns)):
        click.echo(line)
    if can_draw():
        path = draw(directory / "learning-curve.png", panels, x_label=LABELS["records"])
        click.echo(f"curves:  {path.absolute()}")
