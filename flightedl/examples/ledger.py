"""The ledger: proof, by counting, that every record of every epoch contributes exactly once.

    flightedl run flightedl.examples.ledger --trainers 3 --pservers 2

Every parameter has a row for each epoch and an element for each record in it. Record k of epoch e adds 1 to element
(e, k): its gradient is -1 there, and the optimizer is plain SGD with a learning rate of 1. Whatever is killed on the
way, every element must end as 1: less, and the record was lost in that epoch; more, and it counted twice. So a loss in
one epoch cannot hide behind a double in another. Several parameters on several pservers show that it holds for every
block. Exit code 1 when it does not hold, after a sentence for each epoch about the records that are wrong.

Beside each of them lies a *clock*, so that there is one on each pserver. Its first element gets the gradient -1 in
every batch, and so counts the batches, or the rounds where these are averaged.

A mean shows in the clock's other elements whether the weights were right. Each is that of one batch, and ends as the
part that the batch had in the mean of its round: its records, divided by those of the round. A batch of 20 records
whose element is 0.4 was in a round of 50; and the batches of all rounds of 50 records together have a multiple of 50.

``--optimizer adam`` counts with Adam, whose steps have a fixed length: with both betas 0 it moves an element by the
learning rate whatever the gradient's size, so that it counts under ``reduce="mean"``, too. The clocks keep Adam's usual
betas. Of a gradient that is always -1 Adam makes steps of exactly the learning rate, provided that the number of its
step, with which it corrects its averages, is that of the updates in its averages: so the clocks show whether values,
averages and step count still belong together after pservers were restored.

``--tables`` counts in embedding tables, too. In one each record has an id of its own, whose row has an element for each
epoch, and is accounted for as a parameter is. In the other one records share ids, within a batch and across batches, so
that gradients of rows are added up on their way; where what each record adds is known, the sums must be exact. With
``--wide-ids N`` every batch counts its records in each of so many rows of a third one: messages as large as those of a
real model, on which pservers work in two threads.

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
#: Of each parameter.
CLOCKS = tuple(f"{name} clock" for name in PARAMETERS)
#: What is counted in rows: of each record's own id, (epochs, records), and of shared ids, (epochs, ids).
ROWS, SHARED_ROWS = "rows", "shared rows"
#: ... and of every record in all of these, (epochs, ids).
WIDE_ROWS = "wide rows"
#: Tables, and where their rows are among the counts.
TABLES = {"records": ROWS, "shared": SHARED_ROWS, "wide": WIDE_ROWS}
_SHARED_IDS = 7
#: Of float32 sums, and of Adam's steps.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LedgerMode:
    """One ``--mode``: flightedl's class, its arguments, and what may be expected of it."""

    kind: str
    arguments: Mapping[str, Any]
    #: Every batch is an update of its own, so versions and clock count batches.
    counts_updates: bool = False
    #: Gradients are averaged over the batches of a round, whatever they are: what one adds is not known beforehand.
    is_mean: bool = False
    #: Gradients are averaged over so many consecutive batches of a task: each adds its part of their records.
    averaged: int = 0

    def shows_shares(self, optimizer: str) -> bool:
        """Whether a record counts by the share that its batch had in a round."""
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
    """Records 0 to ``count`` - 1 as Parquet, a row group for each task."""
    pq.write_table(
        pa.table({"k": np.arange(count, dtype=np.int64)}), directory / "ledger.parquet", row_group_size=per_task
    )


def write_slow_records(directory: Path, count: int, per_task: int) -> None:
    """The same as RecordIO, a chunk for each task: its records are decoded by the script, which can take its time."""
    with (directory / "ledger.recordio").open("wb") as file:
        for start in range(0, count, per_task):
            records = (json.dumps({"k": k}).encode() for k in range(start, min(start + per_task, count)))
            file.writelines(encode_records(records))


def worth_of(records: int, per_task: int, batch_size: int, averaged: int) -> npt.NDArray[Any]:
    """What each record adds, (n,): 1, or its batch's part of the records that are averaged together."""
    worth = np.ones(records)
    if averaged:
        for task in np.split(worth, range(per_task, records, per_task)):
            for group in np.split(task, range(averaged * batch_size, len(task), averaged * batch_size)):
                for batch in np.split(group, range(batch_size, len(group), batch_size)):
                    batch[:] = len(batch) / len(group)
    return worth


def counted(counts: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """What has a count of each record."""
    return [*PARAMETERS, *(name for name in (ROWS,) if name in counts)]


def balance(counts: Mapping[str, npt.NDArray[Any]], worth: npt.ArrayLike = 1.0) -> tuple[int, int]:
    """How many elements count too little (lost), and too much (double), over all parameters."""
    parts = [counts[name] / worth for name in counted(counts)]
    return sum(int((part < 1 - _TOLERANCE).sum()) for part in parts), sum(
        int((part > 1 + _TOLERANCE).sum()) for part in parts
    )


def findings(counts: Mapping[str, npt.NDArray[Any]], per_task: int, worth: npt.ArrayLike = 1.0) -> Iterator[str]:
    """A sentence about the records that are lost, and one about those that are double, for each epoch and parameter."""
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
    """Where the records lie; they are written by the first trainer."""
    write, name = (write_slow_records, "slow-ledger") if chosen.read_pause else (write_records, "ledger")
    kind = f"{name}-{chosen.records}-{chosen.per_task}"
    return prepared_directory(
        chosen.data or Path("data") / kind, kind, lambda folder: write(folder, chosen.records, chosen.per_task), say
    )


def batches_of(records: int, per_task: int, batch_size: int) -> int:
    """Batches of one epoch: they never span tasks."""
    whole, rest = divmod(records, per_task)
    return whole * -(-per_task // batch_size) + -(-rest // batch_size)


def optimizer_of(name: str, mode: LedgerMode) -> Any:
    """SGD adds gradients up as they are; Adam's steps are made 1 long for whatever gradient."""
    if name == "sgd":
        return fe.SGD(lr=1.0)
    if not (mode.is_mean or mode.counts_updates):
        raise SystemExit("ledger: --optimizer adam counts in modes mean, async, bounded and rarely-pulled")
    return fe.Adam(lr=1.0, beta1=0.0, beta2=0.0, overrides={name: {"beta1": 0.9, "beta2": 0.999} for name in CLOCKS})


def batch_sizes(records: int, per_task: int, batch_size: int) -> list[int]:
    """Records of each batch of an epoch."""
    sizes = (min(per_task, records - start) for start in range(0, records, per_task))
    return [min(batch_size, size - first) for size in sizes for first in range(0, size, batch_size)]


def weights_findings(shares: npt.NDArray[Any], sizes: Sequence[int]) -> Iterator[str]:
    """What is wrong with means, (epochs, batches): the share of each batch, of so many records, in its round."""
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


def beside_each_other(counts: npt.NDArray[Any], clock: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """The same of all parameters and of all clocks, each clock behind its parameter."""
    return {
        name: array
        for pair in zip(PARAMETERS, CLOCKS, strict=True)
        for name, array in zip(pair, (counts, clock), strict=True)
    }


def clocks_are_right(
    chosen: argparse.Namespace, clocks: Sequence[npt.NDArray[Any]], versions: set[int], say: Callable[[str], None]
) -> bool:
    """Whether the clocks, and the blocks' versions where these count batches too, are what they should be."""
    sizes = batch_sizes(chosen.records, chosen.per_task, chosen.batch_size)
    batches = chosen.epochs * len(sizes)
    mode = MODES[chosen.mode]
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
    """Train the ledger; returns 0 when it is exact."""
    chosen = parsed(arguments)
    mode = MODES[chosen.mode]
    optimizer = optimizer_of(chosen.optimizer, mode)
    shows_shares = mode.shows_shares(chosen.optimizer)
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
            # What a record is worth in a mean depends on its batch.
            shuffle=not (mode.averaged or shows_shares),
            seed=1,
            decode=decode if chosen.read_pause else None,
        )
        sizes = batch_sizes(chosen.records, chosen.per_task, chosen.batch_size)
        zeros = np.zeros((chosen.epochs, chosen.records), np.float32)
        clock_zeros = np.zeros((1 + chosen.epochs * len(sizes)) if shows_shares else 1)
        initial = beside_each_other(zeros, clock_zeros)
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
                model.step(beside_each_other(gradient, ticks))
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
        # In every trainer: one that is started again after it told of a loss must not end well.
        return 0 if is_exact else 1


def account(
    chosen: argparse.Namespace, counts: Mapping[str, npt.NDArray[Any]], versions: set[int]
) -> tuple[bool, list[str]]:
    """Whether everything counts exactly once, and what there is to say about it."""
    sentences: list[str] = []
    is_on_time = clocks_are_right(chosen, [counts[name] for name in CLOCKS], versions, sentences.append)
    if MODES[chosen.mode].shows_shares(chosen.optimizer):
        # The clocks say whether each share is right.
        counts = {name: np.ceil(counts[name] - _TOLERANCE**2) for name in counted(counts)}
    worth = worth_of(chosen.records, chosen.per_task, chosen.batch_size, MODES[chosen.mode].averaged)
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
    """What is wrong with rows that several records count in, (epochs, ids)."""
    expected = np.bincount(np.arange(len(worth)) % _SHARED_IDS, worth, _SHARED_IDS)
    return [
        f"shared id {place} counts {shared[epoch, place]:.3f} in epoch {epoch + 1}, not {expected[place]:.3f}"
        for epoch, place in np.argwhere(np.abs(shared - expected) > _TOLERANCE * expected).tolist()
    ]


def wide_findings(wide: npt.NDArray[Any], worth: npt.NDArray[Any]) -> list[str]:
    """What is wrong with rows in each of which all records count, (epochs, ids): a sentence for each epoch."""
    expected = float(worth.sum())
    sentences = []
    for epoch, counts in enumerate(wide):
        wrong = np.flatnonzero(np.abs(counts - expected) > _TOLERANCE * expected)
        if wrong.size:
            example = f"such as {wrong[0]}, which counts {counts[wrong[0]]:.3f}, not {expected:.3f}"
            sentences.append(f"{wrong.size} wide ids are wrong in epoch {epoch + 1}, {example}")
    return sentences


def ids_of(table: str, counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The ids of a table's counts, (epochs, ids)."""
    numbers = np.arange(counts.shape[1])
    # Also negative ones.
    return numbers - counts.shape[1] // 2 if table == "records" else numbers


class RowLedger:
    """What is counted in tables.

    Args:
        job: That they are of.
        epochs: Elements of a row.
        records: Of an epoch.
        optimizer: Of the rows.
        wide_ids: In how many rows of the third table every record counts; 0: there is none.
    """

    def __init__(self, job: fe.Job, epochs: int, records: int, optimizer: Any, wide_ids: int = 0) -> None:
        self._epochs, self._records = epochs, records
        self._own = job.table("records", epochs, optimizer=optimizer)
        self._shared = job.table("shared", epochs, optimizer=optimizer)
        self._wide = job.table("wide", epochs, optimizer=optimizer) if wide_ids else None
        self._wide_ids = np.arange(wide_ids)
        self._job = job

    def push(self, epoch: int, records: npt.NDArray[Any]) -> None:
        """Count the records of a batch."""
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
        """What was counted."""
        own = self._own.pull(self._ids(np.arange(self._records)))
        found = {ROWS: own.T.copy(), SHARED_ROWS: self._shared.pull(np.arange(_SHARED_IDS)).T.copy()}
        if self._wide is not None:
            found[WIDE_ROWS] = self._wide.pull(self._wide_ids).T.copy()
        return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="where the records lie; default: a directory under data/")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--per-task", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mode", choices=sorted(MODES), default="sync")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--tables", action="store_true", help="count in rows of embedding tables, too")
    parser.add_argument("--wide-ids", type=int, default=0, help="with --tables: ids that each batch counts in")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of pretended work for each batch")
    parser.add_argument("--read-pause", type=float, default=0.0, help="seconds that reading a batch takes")
    parser.add_argument("--hold", type=Path, help="begin no batch of the last epoch while this file is there")
    parser.add_argument("--swallow-errors", action="store_true", help="go on after an error of a step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Arrow would load pandas where it is installed, and this does without: a trainer starts in two thirds of the time.
    leave_out_pandas_and_scipy()
    sys.exit(main())
