"""Benchmarks: ratios measured in one run on the same machine, since machines are noisy. Not tests.

``dense``: push + optimizer + pull against bare Flight (``bare``, whose server runs the optimizer on one array, without
blocks, identity and checks). ``trainer`` is a process that steps, ``tables`` one that steps with embedding tables.
``sparse``: embedding tables. ``latency``: small models, against gloo and the floor.
``modules``: a step of a PyTorch module, against DDP. ``queue``: the cost of a dispatch. ``data``: reading.
``scale``: a job's cost on paper, from what small jobs take. ``recovery``: from kill -9 to working again.

``floor`` and ``floor_rows``: the same steps in plain Python with nothing around them, alternated with the product.
``workers`` starts processes and gives them orders; ``sides`` lets them take turns, and prints tables.

``benchmarks/`` of the repository has what only developers measure.
"""

from __future__ import annotations

import click

from ..lazy import LazyGroup

_HERE = "flightedl_tools.bench"
#: Name -> (module, attribute, line of help).
BENCHES: dict[str, tuple[str, str, str]] = {
    "dense": (f"{_HERE}.dense", "dense", "Push + optimizer + pull against bare Flight."),
    "sparse": (f"{_HERE}.sparse", "sparse", "Embedding tables: lookup, push and optimizer against the floor."),
    "latency": (f"{_HERE}.latency", "latency", "Steps and rounds of small models against the floor and gloo."),
    "torch": (f"{_HERE}.modules", "torch", "A step of a PyTorch module on a job, against DDP."),
    "queue": (f"{_HERE}.queue", "queue", "Cost of a dispatch by the number of tasks."),
    "data": (f"{_HERE}.data", "data", "Reading of a job's data against pyarrow, DataLoader and webdataset."),
    "recovery": (f"{_HERE}.recovery", "recovery", "Kill -9 to working again."),
    "scale": (f"{_HERE}.scale", "scale", "What a step costs whom; predictions for larger jobs; one on paper."),
}


@click.group(cls=LazyGroup, lazy=BENCHES)
def bench() -> None:
    """Measure on this machine."""
