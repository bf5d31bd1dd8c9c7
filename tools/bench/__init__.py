"""Benchmarks. They measure ratios within one run on one machine, because absolute times are not comparable.

* ``dense``: push, optimizer and pull, compared with bare Flight
* ``sparse``: steps with embedding tables, compared with the floor
* ``latency``: steps of small models, compared with the floor and gloo
* ``modules``: a step of a PyTorch module, compared with DDP
* ``data``: reading training data, compared with other libraries
* ``recovery``: the time from kill -9 until a job works again
* ``bare``, ``floor``, ``floor_rows``: reference implementations of a step, with bare Flight and in plain Python
* ``trainer``, ``tables``: processes that run steps with parameters and with embedding tables

A benchmark starts the processes of each side with ``workers``. ``sides`` lets the sides take turns running steps and
prints their times, so that a ratio compares consecutive runs. Benchmarks for developers are in ``benchmarks/``.
"""

from __future__ import annotations

import click

from ..lazy import LazyGroup

_HERE = "flightedl_tools.bench"
#: Name -> (module, attribute, one line of help).
BENCHES: dict[str, tuple[str, str, str]] = {
    "dense": (f"{_HERE}.dense", "dense", "Push + optimizer + pull against bare Flight."),
    "sparse": (f"{_HERE}.sparse", "sparse", "Lookup, push and optimizer of embedding tables against the floor."),
    "latency": (f"{_HERE}.latency", "latency", "Steps and rounds of small models against the floor and gloo."),
    "torch": (f"{_HERE}.modules", "torch", "A step of a PyTorch module against DDP."),
    "data": (f"{_HERE}.data", "data", "Reading of a job's data against pyarrow, DataLoader and webdataset."),
    "recovery": (f"{_HERE}.recovery", "recovery", "Time from kill -9 until the job works again."),
}


@click.group(cls=LazyGroup, lazy=BENCHES)
def bench() -> None:
    """Measure on this machine."""
