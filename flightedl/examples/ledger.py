"""The ledger: proof, by counting, that every record of every epoch contributes exactly once.

    flightedl run flightedl.examples.ledger --trainers 3 --pservers 2

Record k adds 1 to element k of every parameter: its gradient is -1 there, the optimizer is plain SGD with a learning
rate of 1, and rounds add up (``reduce="sum"``). Whatever is killed on the way, every element must end as the number of
epochs: one less, and a batch was lost; one more, and it counted twice. Several parameters on several pservers show that
it holds for every block. Exit code 1 when it does not hold.

The counts are written to ``ledger.npz`` in the output directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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

PARAMETERS = ("first", "second", "third")
#: ``--mode`` -> the class of flightedl's and its arguments.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("Sync", {"reduce": "sum"}),
    "deterministic": ("Sync", {"reduce": "sum", "deterministic": True}),
    "backup": ("Sync", {"reduce": "sum", "backup": 1}),
    "async": ("Async", {}),
    "accumulated": ("Async", {"push_every": 4, "pull_every": 2, "reduce": "sum"}),
    "rarely-pulled": ("Async", {"pull_every": 4}),
    "bounded": ("Bounded", {"staleness": 2}),
}


def write_records(directory: Path, count: int, per_task: int) -> None:
    """Records 0 to ``count`` - 1 as Parquet, a row group for each task."""
    pq.write_table(
        pa.table({"k": np.arange(count, dtype=np.int64)}), directory / "ledger.parquet", row_group_size=per_task
    )


def balance(counts: dict[str, npt.NDArray[Any]], epochs: int) -> tuple[int, int]:
    """How many elements count too little (lost), and too much (double), over all parameters."""
    lost = sum(int((values < epochs).sum()) for values in counts.values())
    double = sum(int((values > epochs).sum()) for values in counts.values())
    return lost, double


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = click.echo) -> int:
    """Train the ledger; returns 0 when it is exact."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="where the records lie; default: a directory under data/")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--per-task", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mode", choices=sorted(MODES), default="sync")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of pretended work for each batch")
    parser.add_argument("--hold", type=Path, help="begin no batch of the last epoch while this file is there")
    chosen = parser.parse_args(arguments)
    kind = f"ledger-{chosen.records}-{chosen.per_task}"
    directory = prepared_directory(
        chosen.data or Path("data") / kind,
        kind,
        lambda folder: write_records(folder, chosen.records, chosen.per_task),
        say,
    )
    clock = SystemClock()
    mode = getattr(fe, MODES[chosen.mode][0])(**MODES[chosen.mode][1])
    with fe.connect() as job:
        data = job.dataset(
            str(directory / "*.parquet"), batch_size=chosen.batch_size, epochs=chosen.epochs, shuffle=True, seed=1
        )
        zeros = np.zeros(chosen.records, np.float32)
        model = job.parameters(dict.fromkeys(PARAMETERS, zeros), optimizer=fe.SGD(lr=1.0), mode=mode)
        for batch in data:
            while chosen.hold and chosen.hold.exists() and model["first"].sum() >= chosen.records * (chosen.epochs - 1):
                clock.sleep(0.05)
            gradient = zeros.copy()
            gradient[batch["k"].to_numpy()] = -1
            if chosen.pause:
                clock.sleep(chosen.pause)
            model.step(dict.fromkeys(PARAMETERS, gradient))
            job.log(counted=float(model["first"].sum()))
        if not job.once("report"):
            return 0
        model.pull()
        counts = {name: model[name].copy() for name in PARAMETERS}
        save_arrays(job.output_dir / "ledger.npz", counts)
        lost, double = balance(counts, chosen.epochs)
        say(f"ledger: {chosen.records} records x {chosen.epochs} epochs: {lost} lost, {double} double")
        return 1 if lost or double else 0


if __name__ == "__main__":
    sys.exit(main())
