"""``flightedl bench sparse``: lookup, push and optimizer of embedding tables between a trainer and a pserver.

The sides are the product, the product with prefetched rows, the floor (``floor_rows``), and peers that a caller adds.
All sides start together and take turns with each workload, so a ratio compares consecutive runs.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from flightedl.config import TrainerSettings, child_environment, settings
from flightedl.errors import JobFailedError
from flightedl.launch.cluster import LocalCluster

from . import floor_rows
from .dense import records
from .sides import Side, begin, measuring, print_json, print_table, ratio, say, take_turns
from .tables import Group, TableWorkload, train
from .workers import Worker, started

#: Seconds of a side's turn with one workload.
_TURN_S = 0.4
_OURS, _AHEAD = "flightedl", "flightedl, prefetched rows"


@dataclass(frozen=True, slots=True)
class RowPeer:
    """Another system. Its ``server(workloads, option)`` prints an address for ``client(workloads, address, option)``.

    If there is no ``server``, the client gets only the workloads, and starts a server itself.
    """

    name: str
    client: Callable[..., object]
    server: Callable[..., object] | None = None
    option: str = ""


FLOOR = RowPeer("floor", floor_rows.run_client, floor_rows.run_server)


@dataclass(frozen=True, slots=True)
class OfSide:
    """Measurements of one side's steps with one workload. Ratios are medians over the turns."""

    side: str
    step_s: float
    #: Processor time of trainer and server per step, which other programs on the machine affect least.
    cpu_s: float
    #: Ids per second, including repetitions.
    ids_per_s: float
    #: Time of this side divided by flightedl's time, without and with prefetched rows.
    ratio: float
    ratio_ahead: float
    #: Time of this side divided by the floor's time.
    by_floor: float | None = None
    #: For flightedl only: its time divided by its time with another workload that has the same number of ids.
    by_other: float | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """A workload, the measurements of all sides, and the workload with which flightedl's time is compared."""

    workload: TableWorkload
    name: str
    sides: tuple[OfSide, ...]
    other: str = ""


@contextlib.contextmanager
def _own_side(workloads: Sequence[TableWorkload], directory: Path) -> Iterator[tuple[Worker, int]]:
    with LocalCluster(1, job="bench") as cluster, contextlib.ExitStack() as stack:
        environment = child_environment(settings(TrainerSettings, etcd=cluster.etcd_address, job="bench"))
        (trainer,) = begin(stack, train, workloads, str(records(directory)), environment=environment)
        pid = cluster.pid("pserver", 0)
        assert pid is not None, "the pserver is not running"
        yield trainer, pid


@contextlib.contextmanager
def _peer_side(peer: RowPeer, workloads: Sequence[TableWorkload]) -> Iterator[tuple[Worker, int]]:
    environment = child_environment(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo", PYTHONWARNINGS="ignore")
    with contextlib.ExitStack() as stack:
        arguments: tuple[str, ...] = ()
        pids: list[int] = []
        if peer.server is not None:
            server = stack.enter_context(started(peer.server, workloads, peer.option, environment=environment))
            arguments, pids = (server.line(), peer.option), [server.process.pid]
        client = stack.enter_context(started(peer.client, workloads, *arguments, environment=environment))
        pids += client.answer()["servers"]
        yield client, pids[0]


def compare(
    wanted: Sequence[tuple[TableWorkload, bool]], *, turns: int, directory: Path, peers: Sequence[RowPeer]
) -> list[Compared]:
    """Measure all workloads. Each workload comes with a flag: True if the peers take part in the workload."""
    workloads = [workload for workload, _ in wanted]
    sizes = [4 * workload.ids * workload.group.dim for workload in workloads]
    sides: dict[tuple[int, str], Side] = {}
    with contextlib.ExitStack() as stack:
        click.echo(f"filling tables for {len(workloads)} workloads ...", err=True)
        ours, pid = stack.enter_context(_own_side(workloads, directory))
        for number, size in enumerate(sizes):
            sides[number, _OURS] = Side([ours], [pid], size, choice=number)
            sides[number, _AHEAD] = Side([ours], [pid], size, choice=number + len(workloads))
        for peer in peers:
            theirs = [
                number
                for number, (workload, has_peers) in enumerate(wanted)
                if has_peers and (peer is not FLOOR or workload.group.tables == 1)
            ]
            try:
                other, pid = stack.enter_context(_peer_side(peer, [workloads[number] for number in theirs]))
            except JobFailedError as error:
                click.echo(f"{peer.name} cannot start and is left out: {error}", err=True)
                continue
            for choice, number in enumerate(theirs):
                sides[number, peer.name] = Side([other], [pid], sizes[number], choice=choice)
        click.echo(f"measuring, {turns} turns ...", err=True)
        sides = dict(sorted(sides.items(), key=lambda each: each[0][0]))
        found = take_turns([*sides.values()], turns, [_count_for(side) for side in sides.values()])
    times = dict(zip(sides, found, strict=True))
    cpu_s = {each: side.measured().trainer_cpu_s + side.measured().server_cpu_s for each, side in sides.items()}
    return [_compared(number, workloads, times, cpu_s) for number in range(len(workloads))]


def _count_for(side: Side) -> int:
    side.run(3)
    return int(min(200, max(2, _TURN_S / side.run(2))))


def _compared(
    number: int,
    workloads: Sequence[TableWorkload],
    times: dict[tuple[int, str], list[float]],
    cpu_s: dict[tuple[int, str], float],
) -> Compared:
    workload, other = workloads[number], _reference(number, workloads)
    measured = []
    for (place, name), own in times.items():
        if place != number:
            continue
        is_ours, step_s = name in {_OURS, _AHEAD}, statistics.median(own)
        floor = times.get((number, FLOOR.name)) if is_ours else None
        measured.append(
            OfSide(
                name,
                step_s,
                cpu_s[number, name],
                workload.ids / step_s,
                ratio(own, times[number, _OURS]),
                ratio(own, times[number, _AHEAD]),
                None if floor is None else ratio(own, floor),
                ratio(own, times[other, name]) if is_ours and other is not None else None,
            )
        )
    return Compared(workload, str(workload), tuple(measured), "" if other is None else str(workloads[other]))


def _reference(number: int, workloads: Sequence[TableWorkload]) -> int | None:
    """Return the workload to compare with: one table with the same number of rows if there is one, else the fewest."""
    mine = workloads[number]
    alike = [
        place
        for place, other in enumerate(workloads)
        if (other.ids, other.is_skewed, other.group.dim, other.group.tables)
        == (mine.ids, mine.is_skewed, mine.group.dim, 1)
        and (other.group.rows == mine.group.rows if mine.group.tables > 1 else other.group.rows < mine.group.rows)
    ]
    return min(alike, key=lambda place: workloads[place].group.rows, default=None)


def standard(
    *, is_full: bool, rows: Sequence[int], dims: Sequence[int], ids: Sequence[int]
) -> list[tuple[TableWorkload, bool]]:
    """Return the workloads, each with a flag: True if the peers take part in the workload.

    Unless ``is_full`` is true, the peers take part only in workloads with one table and the fewest rows. Workloads with
    many tables or rows then have only uniform ids and the first dimension.
    """
    fewest, most, first_dim = min(rows), max(rows), dims[0]
    found: dict[TableWorkload, bool] = {}
    for dim in dims:
        for count in ids:
            for is_skewed in (False, True):
                found[TableWorkload(Group(1, fewest, dim), count, is_skewed)] = True
                if is_full or (dim == first_dim and not is_skewed):
                    for tables in (26, 100):
                        found[TableWorkload(Group(tables, fewest, dim), count, is_skewed)] = is_full
                    if most > fewest:
                        found[TableWorkload(Group(1, most, dim), count, is_skewed)] = is_full
    return list(found.items())


def print_compared(found: Sequence[Compared]) -> None:
    """Print the table."""
    rows = []
    for one in found:
        for place, side in enumerate(one.sides):
            growth = "" if side.by_other is None else f"{side.by_other:.2f} x the time"
            if growth and one.workload.group.tables == 1:
                growth += f" of {one.other.split(',')[1].split('x')[0].strip()}"
            rows.append(
                (
                    "" if place else one.name,
                    side.side,
                    f"{side.step_s * 1e3:.2f}",
                    f"{side.cpu_s * 1e3:.2f}",
                    f"{side.ids_per_s / 1e6:.2f}",
                    "" if side.by_floor is None else f"{side.by_floor:.2f} x",
                    "" if side.side in {_OURS, _AHEAD} else f"{side.ratio:.1f} x",
                    "" if side.side == _AHEAD else f"{side.ratio_ahead:.1f} x",
                    growth,
                )
            )
    columns = ("workload", "side", "ms a step", "cpu ms", "M ids/s", "time by the floor's")
    more = ("flightedl is faster", "with prefetching", "by one table")
    title = "lookup + push + row-wise Adagrad, 1 trainer, 1 pserver, medians of alternated turns"
    print_table(title, (*columns, *more), rows, left=(0, 1))


@click.command()
@click.option("--rows", "row_counts", multiple=True, type=click.IntRange(min=1000), help="[default: 1 M and 10 M]")
@click.option("--dim", "dims", multiple=True, type=click.IntRange(min=1), help="Elements of a row. [default: 16]")
@click.option(
    "--ids", "id_counts", multiple=True, type=click.IntRange(min=1), help="Ids per step. [default: 4096, 65536]"
)
@click.option("--full", "is_full", is_flag=True, help="Skewed ids and the floor with all numbers of tables and rows.")
@click.option("--floor/--no-floor", "wants_floor", default=True, help="Compare with the same steps in plain Python.")
@measuring(turns=5, least=2)
def sparse(
    *,
    row_counts: Sequence[int],
    dims: Sequence[int],
    id_counts: Sequence[int],
    is_full: bool,
    wants_floor: bool,
    turns: int,
    wants_json: bool,
) -> None:
    """Compare lookup, push and optimizer of embedding tables with the floor.

    The workloads have uniform or skewed ids, one, 26 or 100 tables, and few or many rows, with and without prefetching.
    """
    chosen = (row_counts, dims, id_counts, is_full)
    run(chosen, turns=turns, peers=[FLOOR] if wants_floor else [], wants_json=wants_json)


def run(
    chosen: tuple[Sequence[int], Sequence[int], Sequence[int], bool],
    *,
    turns: int,
    peers: Sequence[RowPeer],
    wants_json: bool,
) -> None:
    """Run the standard workloads of (rows, dims, ids, is_full) with these peers, and print the results."""
    rows, dims, ids, is_full = chosen
    workloads = standard(
        is_full=is_full,
        rows=rows or (1_000_000, 10_000_000),
        dims=dims or ((16, 64) if is_full else (16,)),
        ids=ids or (4096, 65536),
    )
    say(f"{len(workloads)} workloads")
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        found = compare(workloads, turns=turns, directory=Path(directory), peers=peers)
    if wants_json:
        print_json(found)
    else:
        print_compared(found)
