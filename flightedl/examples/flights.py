"""Will a flight arrive more than 15 minutes late? A wide-and-deep network for nycflights13's 336,776 flights.

    flightedl run flightedl.examples.flights --trainers 2 --pservers 2 -- --mode async

Carriers, aircraft, airports, flight numbers and hours have embeddings, which are rows of tables; the rest of the
network is a dense model. Every trainer runs this whole program. At the end, one trainer evaluates the model on held-out
days, compares it with models that it trains alone on the same flights (``flights_alone``), and reports the results
(``flights_report``). ``flights_data`` describes the data, and ``flights_model`` the network.

The learning rates and sizes are round numbers, but some of them were chosen by their results on the held-out days. So
this is an example and not a benchmark.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import pyarrow as pa

import flightedl as fe
from flightedl.examples.flights_data import prepare
from flightedl.examples.flights_model import (
    EMBEDDING_SIZE,
    FIELDS,
    FINAL_RATE,
    Rows,
    Training,
    features,
    first_parameters,
    loss_and_gradients,
)
from flightedl.examples.flights_report import report


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data, train together with the other trainers, and let one of them report."""
    options = _options(arguments)
    training = Training(epochs=options.epochs, batch_size=options.batch_size, seed=options.seed)
    files = prepare(options.data, click.echo)
    with fe.connect() as job:
        data = job.dataset(
            files.train, batch_size=training.batch_size, epochs=training.epochs, shuffle=True, seed=training.seed
        )
        updates = training.updates(data.record_count)

        def falling(rate: float) -> fe.Polynomial:
            return fe.Polynomial(rate, updates=updates, final=rate * FINAL_RATE)

        optimizer = fe.RowAdagrad(lr=falling(training.row_learning_rate), weight_decay=training.row_weight_decay)
        first_rows = fe.Uniform(training.row_spread)
        tables = {
            name: job.table(name, 1 + EMBEDDING_SIZE, optimizer=optimizer, init=first_rows, seed=training.seed)
            for name in FIELDS
        }
        model = job.parameters(
            first_parameters(training.seed),
            optimizer=fe.Adam(lr=falling(training.learning_rate)),
            mode=fe.Sync() if options.mode == "sync" else fe.Async(),
        )
        for batch in data.prefetching({table: name for name, table in tables.items()}):
            inputs, rows = features(batch), rows_of(job, tables, batch)
            loss, gradients, row_gradients = loss_and_gradients(model, rows, inputs)
            for name, table in tables.items():
                table.push(batch[name], row_gradients[name])
            model.step(gradients)
            job.log(loss=loss)
        if job.once("report"):
            report(
                model,
                lambda batch: rows_of(job, tables, batch),
                files,
                training,
                job.output_dir,
                compare=not options.no_comparison,
            )


def rows_of(job: fe.Job, tables: Mapping[str, fe.Table], batch: pa.RecordBatch | pa.Table) -> Rows:
    """Return a dict from each field to the rows of the records' ids, in the order of the records."""
    rows = job.lookup({table: batch[name] for name, table in tables.items()})
    return {name: rows[table] for name, table in tables.items()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flightedl.examples.flights", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("data/flights"), help="directory of the prepared Parquet files"
    )
    parser.add_argument("--epochs", type=int, default=Training().epochs)
    parser.add_argument("--batch-size", type=int, default=Training().batch_size, help="records per gradient")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial values and of the order of flights")
    parser.add_argument("--no-comparison", action="store_true", help="skip the models trained for comparison")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
