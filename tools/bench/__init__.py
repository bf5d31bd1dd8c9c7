"""Benchmarks: ratios measured in one run on the same machine, since machines are noisy. Not tests.

``dense``: push + optimizer + pull against bare Flight. ``bare`` is that reference: the fastest plain transport loop we
know, whose server does nothing but the optimizer on one array: no blocks, no identity, no checks. ``orders`` lets two
sides take turns, ``sides`` is one of them, ``trainer`` its processes, ``processes`` reads what they take.
``peers`` compares with what other systems take: ``peer_sockets``, ``peer_rpc``, ``peer_gloo``, ``peer_ray``.
``growth``: by the model's size and the number of trainers.
``scale``: what is needed to predict larger jobs (``costs``).

``sparse``: embedding tables, see ``tables``.
``modules``: a step of a PyTorch module, against DDP (``module_worker`` is each process).

``latency``: what people wait for with small models and short jobs. ``starts`` times whole commands (``first_batch`` is
the script that they run, ``local_digits`` the same work without flightedl), ``peer_allreduce`` is another round.

``kernels``: the optimizers' loops. ``memory``: of a pserver. ``queue``: the cost of a dispatch (``dispatchers`` ask).
``recovery``: kill to working again (``steady`` is its trainer, ``watcher`` looks on, ``zombies`` write as deposed
processes, ``shard`` is the cost of a checkpoint).
"""

from __future__ import annotations

import importlib

import click

#: name -> (module, attribute, one line of help).
BENCHES: dict[str, tuple[str, str, str]] = {
    "dense": ("flightedl_tools.bench.dense", "dense", "Push + optimizer + pull against bare Flight."),
    "growth": ("flightedl_tools.bench.growth", "growth", "Bytes a second by the model's size and the trainers."),
    "scale": (
        "flightedl_tools.bench.scale",
        "scale",
        "What a step costs whom; predictions for larger jobs; one on paper.",
    ),
    "memory": ("flightedl_tools.bench.memory", "memory", "Peak memory of a pserver with many trainers."),
    "kernels": ("flightedl_tools.bench.kernels", "kernels", "The optimizers' loops against torch's fused ones."),
    "recovery": ("flightedl_tools.bench.recovery", "recovery", "Kill -9 to working again; the cost of a checkpoint."),
    "sparse": (
        "flightedl_tools.bench.sparse",
        "sparse",
        "Embedding tables against NumPy, Redis and torch.distributed.rpc; growth.",
    ),
    "latency": (
        "flightedl_tools.bench.latency",
        "latency",
        "Small models, short tasks, short jobs: what people wait for.",
    ),
    "torch": ("flightedl_tools.bench.modules", "torch", "A step of a PyTorch module on a job, against DDP."),
    "queue": ("flightedl_tools.bench.queue", "queue", "Cost of a dispatch by the number of tasks."),
}


class _Benches(click.Group):
    """Imported on use, like the commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        if cmd_name not in BENCHES:
            return None
        module, attribute, _help = BENCHES[cmd_name]
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, _attribute, text) in BENCHES.items()])


@click.group(cls=_Benches)
def bench() -> None:
    """Measure on this machine."""
