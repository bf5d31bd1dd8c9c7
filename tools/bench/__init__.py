"""Benchmarks: ratios measured in one run on the same machine, since machines are noisy. Not tests.

``dense``: push + optimizer + pull against bare Flight. ``bare`` is that reference: a plain transport loop, whose server
runs the optimizer on one array, without blocks, identity and checks. ``trainer`` is a process that steps.
``sparse``: embedding tables (``table_work`` has the ids, ``table_trainer`` is a process).
``latency``: small models, against gloo (``peer_allreduce``) and the floor.
``torch`` in ``modules``: a step of a PyTorch module, against DDP (``module_worker`` is each process).
``queue``: the cost of a dispatch (``dispatchers`` ask). ``scale``: what predicts larger jobs (``costs``).
``recovery``: from kill -9 to working again (``steady`` is its trainer, ``watcher`` observes the job).

``floor`` and ``floor_rows``: the same steps in plain Python with nothing around them, alternated with the product.
``orders`` lets sides take turns, ``sides`` measures them and prints what it found, ``processes`` reads /proc.

``benchmarks/`` of the repository has what only developers measure.
"""

from __future__ import annotations

import importlib

import click

#: Name -> (module, line of help).
BENCHES: dict[str, tuple[str, str]] = {
    "dense": ("dense", "Push + optimizer + pull against bare Flight."),
    "sparse": ("sparse", "Embedding tables: lookup, push and optimizer against the floor."),
    "latency": ("latency", "Steps and rounds of small models against the floor and gloo."),
    "torch": ("modules", "A step of a PyTorch module on a job, against DDP."),
    "queue": ("queue", "Cost of a dispatch by the number of tasks."),
    "recovery": ("recovery", "Kill -9 to working again."),
    "scale": ("scale", "What a step costs whom; predictions for larger jobs; one on paper."),
}


class _Benches(click.Group):
    """Imports a benchmark when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        if cmd_name not in BENCHES:
            return None
        found: click.Command = getattr(
            importlib.import_module(f"flightedl_tools.bench.{BENCHES[cmd_name][0]}"), cmd_name
        )
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in BENCHES.items()])


@click.group(cls=_Benches)
def bench() -> None:
    """Measure on this machine."""
