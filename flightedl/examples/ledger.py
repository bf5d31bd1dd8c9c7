"""The ledger: a program that proves, by counting, that every record contributes exactly once in every epoch.

    flightedl run flightedl.examples.ledger --trainers 3 --pservers 2

Every parameter has a row per epoch and an element per record. Record k of epoch e adds 1 to element (e, k): its
gradient is -1 there, and the optimizer is plain SGD with a learning rate of 1. Whatever is killed during the run, every
element must be 1 at the end. If an element is smaller, the record was lost in that epoch; if it is larger, the record
was counted twice. If any element is wrong, the program prints the affected records of each epoch and exits with code 1.

Because each epoch has its own row, a duplicate in one epoch cannot hide a loss in another. Several parameters on
several pservers show that the result holds for every block.

Each parameter has a *clock*, so that there is a clock on every pserver. In every batch, the first element of a clock
gets the gradient -1. It therefore counts batches, or rounds if gradients are averaged.

If gradients are averaged, the other elements of a clock, one per batch, show whether the weights were right. A batch's
element ends as the batch's share in the mean of its round: the number of records in the batch, divided by the number of
records in the round. If the element of a batch with 20 records is 0.4, the round had 50 records. The batches in rounds
of 50 records must together have a multiple of 50 records.

``--optimizer adam`` counts with Adam. With betas of 0, it changes an element by the learning rate, regardless of the
gradient's size, so counting works even with ``reduce="mean"``.

The clocks use Adam's usual betas. If every gradient is -1, each of Adam's steps equals the learning rate, but only if
the step count matches the number of updates in the moving averages. So the clocks show that values, averages and step
count still agree after pservers have been restored.

``--tables`` also counts in embedding tables. In one table, each record has an id of its own, whose row has an element
per epoch and is checked like a parameter. In the second table, records share ids, within a batch and across batches, so
the gradients of a row are summed before they are applied. If each record's addend is known, these sums must be exact.

With ``--wide-ids N``, every batch also counts its records in N rows of a third table. Messages are then as large as
those of a real model, and pservers process them in two threads.

The counts are written to ``ledger.npz`` in the output directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.examples.prepared import prepared_directory
from flightedl.examples.results import save_arrays
from flightedl.formats.recordio import encode_records
from flightedl.process.tuning import leave_out_pandas_and_scipy

PARAMETERS = ("first", "second", "third")
#: One per parameter.
CLOCKS = tuple(f"{name} clock" for name in PARAMETERS)
#: Names of the counts in table rows: one id per record, (epochs, records), and shared ids, (epochs, ids).
ROWS, SHARED_ROWS = "rows", "shared rows"
#: Name of the counts in rows to which every record adds 1, (epochs, ids).
WIDE_ROWS = "wide rows"
#: Table -> name of its counts.
TABLES = {"records": ROWS, "shared": SHARED_ROWS, "wide": WIDE_ROWS}
_SHARED_IDS = 7
#: Tolerance for float32 sums, and for Adam's steps.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LedgerMode:
    """A choice of ``--mode``: the class and arguments of the mode, and the expected counts."""

    kind: str
    arguments: Mapping[str, Any]
    #: True if every batch is a separate update, so that versions and clocks count batches.
    counts_updates: bool = False
    #: True if gradients are averaged over the batches of a round, so that a record's addend is not known in advance.
    is_mean: bool = False
    #: Number of consecutive batches of a task whose gradients are averaged, weighted by their numbers of records.
    averaged: int = 0

    def is_shuffled(self, optimizer: str) -> bool:
        """True if records may be shuffled: a record's addend does not depend on its batch."""
        return not (self.averaged or self.shows_shares(optimizer))

    def shows_shares(self, optimizer: str) -> bool:
        """True if a record's addend is its batch's share of a round."""
        return self.is_mean and optimizer == "sgd"


MODES = {
    "sync": LedgerMode("Sync", {"reduce": "sum"}),
    "mean": LedgerMode("Sync", {}, is_mean=True),
    "deterministic": LedgerMode("Sync", {"reduce": "sum", "deterministic": True}),
    "backup": LedgerMode("Sync", {"reduce": "sum", "backup": 1}),
    "mean-backup": LedgerMode("Sync", {"backup": 1}, is_mean=True),
    "async": LedgerMode("Async", {}, counts_updates=True),
    "accumulated": LedgerMode("Async", {"push_every": 4, "pull_every": 2, "reduce": "sum"}),
    "accumulated-mean": LedgerMode("Async", {"push_every": 4}, averaged=4),
    "rarely-pulled": LedgerMode("Async", {"pull_every": 4}, counts_updates=True),
    "bounded": LedgerMode("Bounded", {"staleness": 2}, counts_updates=True),
}


def write_records(directory: Path, count: int, per_task: int) -> None:
    """Write records 0 to ``count`` - 1 as Parquet, one row group per task."""
    pq.write_table(
        pa.table({"k": np.arange(count, dtype=np.int64)}), directory / "ledger.parquet", row_group_size=per_task
    )


def write_slow_records(directory: Path, count: int, per_task: int) -> None:
    """Write the records as RecordIO, one chunk per task. The script decodes them, slowly if an option requests it."""
    with (directory / "ledger.recordio").open("wb") as file:
        for start in range(0, count, per_task):
            records = (json.dumps({"k": k}).encode() for k in range(start, min(start + per_task, count)))
            file.writelines(encode_records(records))


def addends_of(records: int, per_task: int, batch_size: int, averaged: int) -> npt.NDArray[Any]:
    """Return each record's addend, (n,): 1, or its share of the records with which it is averaged."""
    worth = np.ones(records)
    if averaged:
        for task in np.split(worth, range(per_task, records, per_task)):
            for group in np.split(task, range(averaged * batch_size, len(task), averaged * batch_size)):
                for batch in np.split(group, range(batch_size, len(group), batch_size)):
                    batch[:] = len(batch) / len(group)
    return worth


def counted(counts: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """Return the names of the counts with one element per record."""
    return [*PARAMETERS, *(name for name in (ROWS,) if name in counts)]


def balance(counts: Mapping[str, npt.NDArray[Any]], worth: npt.ArrayLike = 1.0) -> tuple[int, int]:
    """Return how many elements were lost, and how many were counted twice, over all parameters."""
    parts = [counts[name] / worth for name in counted(counts)]
    return sum(int((part < 1 - _TOLERANCE).sum()) for part in parts), sum(
        int((part > 1 + _TOLERANCE).sum()) for part in parts
    )


def findings(counts: Mapping[str, npt.NDArray[Any]], per_task: int, worth: npt.ArrayLike = 1.0) -> Iterator[str]:
    """Yield a message for each epoch and parameter in which records were lost or counted twice."""
    for name in counted(counts):
        for epoch, part in enumerate(counts[name] / worth):
            for word, wrong in (("lost", part < 1 - _TOLERANCE), ("double", part > 1 + _TOLERANCE)):
                if (records := np.flatnonzero(wrong)).size:
                    tasks, sizes = np.unique(records // per_task, return_counts=True)
                    shown = ", ".join(f"{n} of task {task}" for task, n in zip(tasks[:8], sizes[:8], strict=True))
                    rest = f" and of {len(tasks) - 8} tasks more" if len(tasks) > 8 else ""
                    yield (
                        f"{word} in {name}, epoch {epoch + 1}: {records.size} records ({shown}{rest}), such as record "
                        f"{records[0]}, which counts {part[records[0]]:.3f}"
                    )


def records_directory(chosen: argparse.Namespace, say: Callable[[str], None]) -> Path:
    """Return the directory that contains the records. The first trainer writes them."""
    write, name = (write_slow_records, "slow-ledger") if chosen.read_pause else (write_records, "ledger")
    kind = f"{name}-{chosen.records}-{chosen.per_task}"
    return prepared_directory(
        chosen.data or Path("data") / kind, kind, lambda folder: write(folder, chosen.records, chosen.per_task), say
    )


def optimizer_of(name: str, mode: LedgerMode) -> Any:
    """Return SGD with a learning rate of 1, or Adam with steps of size 1 for any gradient."""
    if name == "sgd":
        return fe.SGD(lr=1.0)
    if not (mode.is_mean or mode.counts_updates):
        raise SystemExit("ledger: --optimizer adam counts in modes mean, async, bounded and rarely-pulled")
    return fe.Adam(lr=1.0, beta1=0.0, beta2=0.0, overrides={name: {"beta1": 0.9, "beta2": 0.999} for name in CLOCKS})


def batch_sizes(records: int, per_task: int, batch_size: int, *, is_shuffled: bool) -> list[int]:
    """Return the number of records in each batch of an epoch.

    No batch spans two tasks, so each task has a last batch. But tasks of shuffled records are cut into whole batches.
    """
    if is_shuffled:
        per_task = records
    sizes = (min(per_task, records - start) for start in range(0, records, per_task))
    return [min(batch_size, size - first) for size in sizes for first in range(0, size, batch_size)]


def weights_findings(shares: npt.NDArray[Any], sizes: Sequence[int]) -> Iterator[str]:
    """Yield a message for each batch whose share of its round is wrong. ``shares`` has shape (epochs, batches)."""
    weights = np.broadcast_to(np.array(sizes, float), shares.shape).reshape(-1)
    with np.errstate(divide="ignore"):
        exact = weights / shares.reshape(-1)
    rounds = np.where(np.isfinite(exact), exact, 0).round()
    wrong = (rounds < weights) | (np.abs(exact - rounds) > _TOLERANCE * rounds)
    for place in np.flatnonzero(wrong)[:8]:
        epoch, batch = divmod(int(place), len(sizes))
        share, records = shares.reshape(-1)[place], weights[place]
        yield f"batch {batch} of epoch {epoch + 1}, of {records:.0f} records, has {share:.4f} of its round"
    for whole in np.unique(rounds[~wrong]) if not wrong.any() else ():
        records = weights[rounds == whole].sum()
        if records % whole:
            yield f"rounds of {whole:.0f} records have {records:.0f} records together"


def with_clock(counts: npt.NDArray[Any], clock: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Map every parameter to ``counts``, and every clock to ``clock``. A clock comes right after its parameter."""
    return {
        name: array
        for pair in zip(PARAMETERS, CLOCKS, strict=True)
        for name, array in zip(pair, (counts, clock), strict=True)
    }


def clocks_are_right(
    chosen: argparse.Namespace, clocks: Sequence[npt.NDArray[Any]], versions: set[int], say: Callable[[str], None]
) -> bool:
    """True if all clocks are right and, in modes in which versions count batches, the blocks' versions are too."""
    mode = MODES[chosen.mode]
    is_shuffled = mode.is_shuffled(chosen.optimizer)
    sizes = batch_sizes(chosen.records, chosen.per_task, chosen.batch_size, is_shuffled=is_shuffled)
    batches = chosen.epochs * len(sizes)
    is_right = True
    if mode.shows_shares(chosen.optimizer):
        found = [each for clock in clocks for each in weights_findings(clock[1:].reshape(chosen.epochs, -1), sizes)]
        is_right = not found
        for sentence in found:
            say(sentence)
    elif mode.counts_updates or (chosen.optimizer == "sgd" and not mode.averaged):
        counts = [float(clock[0]) for clock in clocks]
        is_right = all(abs(count - batches) < 0.01 for count in counts)
        say(f"the clocks count {', '.join(f'{count:.4f}' for count in counts)} of {batches} batches")
    if mode.counts_updates:
        is_right = is_right and versions == {batches}
        say(f"parameters are at version {', '.join(map(str, sorted(versions)))} of {batches}")
    return is_right


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = click.echo) -> int:
    """Train the ledger. Return 0 if every record was counted exactly once."""
    chosen = parsed(arguments)
    mode = MODES[chosen.mode]
    optimizer = optimizer_of(chosen.optimizer, mode)
    shows_shares, is_shuffled = mode.shows_shares(chosen.optimizer), mode.is_shuffled(chosen.optimizer)
    directory = records_directory(chosen, say)
    clock = SystemClock()

    def decode(record: bytes) -> Mapping[str, int]:
        clock.sleep(chosen.read_pause / chosen.batch_size)
        found: Mapping[str, int] = json.loads(record)
        return found

    with fe.connect() as job:
        data = job.dataset(
            str(directory / "ledger.*"),
            batch_size=chosen.batch_size,
            epochs=chosen.epochs,
            shuffle=is_shuffled,
            seed=1,
            records_per_task=chosen.per_task,
            decode=decode if chosen.read_pause else None,
        )
        sizes = batch_sizes(chosen.records, chosen.per_task, chosen.batch_size, is_shuffled=is_shuffled)
        zeros = np.zeros((chosen.epochs, chosen.records), np.float32)
        clock_zeros = np.zeros((1 + chosen.epochs * len(sizes)) if shows_shares else 1)
        initial = with_clock(zeros, clock_zeros)
        plain = dataclasses.replace(optimizer, overrides={})
        rows = RowLedger(job, chosen.epochs, chosen.records, plain, chosen.wide_ids) if chosen.tables else None
        model = job.parameters(initial, optimizer=optimizer, mode=getattr(fe, mode.kind)(**mode.arguments))
        for batch in data:
            while chosen.hold and chosen.hold.exists() and data.epoch == chosen.epochs - 1:
                clock.sleep(0.05)
            clock.sleep(chosen.pause)
            gradient, ticks = zeros.copy(), clock_zeros.copy()
            records = batch["k"].to_numpy()
            gradient[data.epoch, records] = ticks[0] = -1
            if shows_shares:
                ticks[1 + data.epoch * len(sizes) + np.searchsorted(np.cumsum(sizes), records[0], "right")] = -1
            if rows is not None:
                rows.push(data.epoch, records)
            try:
                model.step(with_clock(gradient, ticks))
            except fe.errors.UnavailableError as error:
                if not chosen.swallow_errors:
                    raise
                say(f"ledger: goes on after an error of the step: {error}")
            job.log(counted=float(model["first"].sum()))
        model.pull()
        counts = {name: model[name].copy() for name in model} | ({} if rows is None else rows.counts())
        is_exact, sentences = account(chosen, counts, set(model.versions.values()))
        if job.once("report"):
            save_arrays(job.output_dir / "ledger.npz", counts)
            for sentence in sentences:
                say(f"ledger: {sentence}")
        # Every trainer checks, because a trainer that is restarted after reporting a loss must fail again.
        return 0 if is_exact else 1


def account(
    chosen: argparse.Namespace, counts: Mapping[str, npt.NDArray[Any]], versions: set[int]
) -> tuple[bool, list[str]]:
    """Return a flag, True if every record was counted exactly once, and messages about the result."""
    sentences: list[str] = []
    is_on_time = clocks_are_right(chosen, [counts[name] for name in CLOCKS], versions, sentences.append)
    if MODES[chosen.mode].shows_shares(chosen.optimizer):
        # The clocks already check each share.
        counts = {name: np.ceil(counts[name] - _TOLERANCE**2) for name in counted(counts)}
    worth = addends_of(chosen.records, chosen.per_task, chosen.batch_size, MODES[chosen.mode].averaged)
    sentences += findings(counts, chosen.per_task, worth)
    wrong = []
    if chosen.optimizer == "sgd":
        wrong = [
            *(shared_findings(counts[SHARED_ROWS], worth) if SHARED_ROWS in counts else []),
            *(wide_findings(counts[WIDE_ROWS], worth) if WIDE_ROWS in counts else []),
        ]
    sentences += wrong
    lost, double = balance(counts, worth)
    sentences.append(f"{chosen.records} records x {chosen.epochs} epochs: {lost} lost, {double} double")
    return is_on_time and not lost and not double and not wrong, sentences


def shared_findings(shared: npt.NDArray[Any], worth: npt.NDArray[Any]) -> list[str]:
    """Return messages about wrong rows of shared ids. The counts have shape (epochs, ids)."""
    expected = np.bincount(np.arange(len(worth)) % _SHARED_IDS, worth, _SHARED_IDS)
    return [
        f"shared id {place} counts {shared[epoch, place]:.3f} in epoch {epoch + 1}, not {expected[place]:.3f}"
        for epoch, place in np.argwhere(np.abs(shared - expected) > _TOLERANCE * expected).tolist()
    ]


def wide_findings(wide: npt.NDArray[Any], worth: npt.NDArray[Any]) -> list[str]:
    """Return a message for each epoch with wrong rows of wide ids. The counts have shape (epochs, ids)."""
    expected = float(worth.sum())
    sentences = []
    for epoch, counts in enumerate(wide):
        wrong = np.flatnonzero(np.abs(counts - expected) > _TOLERANCE * expected)
        if wrong.size:
            example = f"such as {wrong[0]}, which counts {counts[wrong[0]]:.3f}, not {expected:.3f}"
            sentences.append(f"{wrong.size} wide ids are wrong in epoch {epoch + 1}, {example}")
    return sentences


def ids_of(table: str, counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the ids that a table counts. The counts have shape (epochs, ids)."""
    numbers = np.arange(counts.shape[1])
    # Half of the ids are negative.
    return numbers - counts.shape[1] // 2 if table == "records" else numbers


class RowLedger:
    """Counts in rows of tables.

    Args:
        job: Job of the tables.
        epochs: Number of elements per row.
        records: Number of records per epoch.
        optimizer: Optimizer of the rows.
        wide_ids: Number of rows in the third table, where every record counts; 0 for no such table.
    """

    def __init__(self, job: fe.Job, epochs: int, records: int, optimizer: Any, wide_ids: int = 0) -> None:
        self._epochs, self._records = epochs, records
        self._own = job.table("records", epochs, optimizer=optimizer)
        self._shared = job.table("shared", epochs, optimizer=optimizer)
        self._wide = job.table("wide", epochs, optimizer=optimizer) if wide_ids else None
        self._wide_ids = np.arange(wide_ids)
        self._job = job

    def push(self, epoch: int, records: npt.NDArray[Any]) -> None:
        """Push the gradients that count a batch's records."""
        own, shared = self._ids(records), records % _SHARED_IDS
        wide = {} if self._wide is None else {self._wide: self._wide_ids}
        rows = self._job.lookup({self._own: own, self._shared: shared, **wide})
        gradients = np.zeros_like(rows[self._own])
        gradients[:, epoch] = -1
        self._own.push(own, gradients)
        self._shared.push(shared, gradients)
        if self._wide is not None:
            counted = np.zeros_like(rows[self._wide])
            counted[:, epoch] = -len(records)
            self._wide.push(self._wide_ids, counted)

    def _ids(self, records: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return records - self._records // 2

    def counts(self) -> dict[str, npt.NDArray[Any]]:
        own = self._own.pull(self._ids(np.arange(self._records)))
        found = {ROWS: own.T.copy(), SHARED_ROWS: self._shared.pull(np.arange(_SHARED_IDS)).T.copy()}
        if self._wide is not None:
            found[WIDE_ROWS] = self._wide.pull(self._wide_ids).T.copy()
        return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="directory of the records; default: a directory below data/")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--per-task", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mode", choices=sorted(MODES), default="sync")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--tables", action="store_true", help="also count in rows of embedding tables")
    parser.add_argument(
        "--wide-ids", type=int, default=0, help="with --tables: number of ids in which each batch counts"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of simulated work per batch")
    parser.add_argument("--read-pause", type=float, default=0.0, help="seconds that reading a batch takes")
    parser.add_argument("--hold", type=Path, help="start no batch of the last epoch while this file exists")
    parser.add_argument("--swallow-errors", action="store_true", help="continue after an error of a step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Arrow would load pandas if it is installed. Without pandas, a trainer starts in two thirds of the time.
    leave_out_pandas_and_scipy()
    sys.exit(main())
