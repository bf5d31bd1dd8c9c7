"""``flightedl bench sparse``: embedding tables on a pserver and between processes, against others, and as they grow."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .tables import whole
from .tables.growth import Growth, measure
from .tables.speed import Speed, speeds
from .tables.workloads import Workload

PARTS = ("speed", "growth", "whole")
_MB = 1e6


def speed_table(found: Sequence[Speed]) -> Table:
    """Reads and updates."""
    table = Table(title=f"million rows a second of one pserver, {os.cpu_count()} cores, medians of alternated calls")
    columns = (
        "rows",
        "ids a step",
        "NumPy read",
        "read",
        "ratio",
        "NumPy row-wise Adagrad",
        "row-wise Adagrad",
        "ratio",
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for one in found:
        table.add_row(
            f"{one.rows / 1e6:g} M x {one.dim}, {one.ids}",
            f"{one.ids_a_step:,}",
            *(f"{number:.1f}" for number in (one.numpy_gather, one.gather)),
            f"{one.gather_ratio:.2f}",
            *(f"{number:.1f}" for number in (one.numpy_adagrad, one.adagrad)),
            f"{one.adagrad_ratio:.2f}",
        )
    return table


def growth_table(found: Growth) -> Table:
    """One store as it grows."""
    table = Table(title=f"{found.rows / 1e6:g} M x {found.dim} float32, row-wise Adagrad")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for what, measured in (
        (
            "a step of 4,096 ids, by the time with a tenth of the rows",
            f"{found.step_ratio:.2f} x, {found.step_s * 1e3:.2f} ms",
        ),
        ("rows made a second", f"{found.made_per_s / 1e6:.1f} M"),
        (
            "a push that makes 4,096 rows: longest, longest on the processor, median",
            ", ".join(f"{one * 1e3:.1f} ms" for one in (found.longest_push_s, found.longest_push_cpu_s, found.push_s)),
        ),
        (
            "memory, by 1.3 x (values + slots) + 200 MB",
            f"{found.memory_bytes / _MB:.0f} MB, {found.memory_limit_bytes / _MB:.0f} MB",
        ),
        (
            "pushes wait for a checkpoint: at its beginning, for a chunk",
            f"{found.cut_s * 1e3:.1f} ms, {found.longest_chunk_s * 1e3:.1f} ms",
        ),
        ("a base: copied in, bytes", f"{found.base_s * 1e3:.0f} ms, {found.base_bytes / _MB:.0f} MB"),
        (
            "an increment, 1 % of the rows updated: by a base's time, by its bytes",
            f"{found.increment_s / found.base_s:.1%}, {found.increment_bytes / found.base_bytes:.1%}",
        ),
    ):
        table.add_row(what, measured)
    return table


def _compared(workloads: Sequence[tuple[Workload, bool]], turns: int, *, wants_peers: bool) -> list[whole.Comparison]:
    peers = whole.PEERS if wants_peers else ()
    for line in whole.missing(peers):
        click.echo(line, err=True)
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        return whole.compare(workloads, turns=turns, directory=Path(directory), peers=whole.available(peers))


def _told(found: Sequence[Speed], grown: Growth | None, compared: Sequence[whole.Comparison]) -> dict[str, Any]:
    return {
        "speed": [asdict(one) for one in found],
        "growth": grown and asdict(grown),
        "whole": [asdict(one) for one in compared],
    }


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--rows", "row_counts", multiple=True, type=click.IntRange(min=1000), help="[default: 1 M and 10 M]")
@click.option("--dim", "dims", multiple=True, type=click.IntRange(min=1), help="Elements of a row. [default: 16, 64]")
@click.option("--ids", "id_counts", multiple=True, type=click.IntRange(min=1), help="A step. [default: 4096, 65536]")
@click.option("--turns", type=click.IntRange(min=2), default=5, show_default=True, help="Rounds through 16 steps' ids.")
@click.option(
    "--full", "is_full", is_flag=True, help='"whole": peers and skewed ids with all numbers of tables and rows.'
)
@click.option("--peers/--no-peers", "wants_peers", default=True, help='"whole": other systems, too.')
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def sparse(
    *,
    parts: Sequence[str],
    row_counts: Sequence[int],
    dims: Sequence[int],
    id_counts: Sequence[int],
    turns: int,
    is_full: bool,
    wants_peers: bool,
    wants_json: bool,
) -> None:
    """Embedding tables.

    "speed": reads and row-wise Adagrad of a pserver against NumPy's fancy indexing on a plain array, uniform and skewed
    ids. "growth": pauses, memory and steps while a table grows tenfold, and its checkpoints. "whole": pull, push and
    optimizer between processes, against Redis and torch.distributed.rpc as far as they are installed; 26 and 100 tables
    against one; many rows against few. All three if none is named.
    """
    console = Console(highlight=False, width=140)
    chosen = parts or PARTS
    counts = row_counts or (1_000_000, 10_000_000)
    found: list[Speed] = []
    grown: Growth | None = None
    compared: list[whole.Comparison] = []
    if "growth" in chosen:
        click.echo("measuring growth ...", err=True)
        grown = measure(max(counts), (dims or (16,))[0])
    if "speed" in chosen:
        for rows in counts:
            for dim in dims or (16, 64):
                click.echo(f"measuring {rows:,} rows of {dim} ...", err=True)
                found += speeds(rows, dim, id_counts or (4096, 65536), turns)
    if "whole" in chosen:
        workloads = whole.standard(
            is_full=is_full,
            rows=counts,
            dims=dims or ((16, 64) if is_full else (16,)),
            ids=id_counts or (4096, 65536),
        )
        compared = _compared(workloads, turns, wants_peers=wants_peers)
    if wants_json:
        click.echo(json.dumps(_told(found, grown, compared), indent=2))
        return
    if found:
        console.print(speed_table(found))
    if grown is not None:
        console.print(growth_table(grown))
    if compared:
        console.print(whole.whole_table(compared))
