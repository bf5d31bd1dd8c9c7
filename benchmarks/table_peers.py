"""``flightedl bench sparse`` also against Redis and torch.distributed.rpc, as far as they are installed.

Redis has a key for each row: pipelined MGET reads rows with their optimizer's sum, NumPy updates them, MSET writes
them; its server keeps nothing on disk. torch.distributed.rpc calls a server that has a plain tensor for each table: one
call reads the rows of all tables, one updates them. With "tcp" it uses only that, else shared memory on one machine.

    python -m benchmarks.table_peers [options of `flightedl bench sparse`]
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import numpy as np

from flightedl.launch.places import free_ports
from flightedl_tools.bench.sparse import FLOOR, RowPeer, run, sparse
from flightedl_tools.bench.tables import (
    EPS,
    RATE,
    Floats,
    Ids,
    TableWorkload,
    gradients_of,
    groups_of,
    steps_of,
)
from flightedl_tools.bench.workers import print_line, serve

_KEYS_A_COMMAND = 4096
_TCP = "tcp"


def available() -> list[RowPeer]:
    """Return the peers that can run here, and name the others."""
    found = [FLOOR]
    if importlib.util.find_spec("redis") and shutil.which("redis-server"):
        found.append(RowPeer("Redis", run_redis))
    else:
        click.echo("Redis is not compared: the package redis or the program redis-server is not installed", err=True)
    if importlib.util.find_spec("torch"):
        found.append(RowPeer("torch.distributed.rpc", run_client, run_server))
        found.append(RowPeer("torch.distributed.rpc, TCP only", run_client, run_server, _TCP))
    else:
        click.echo("torch.distributed.rpc is not compared: PyTorch is not installed", err=True)
    return found


#: (each table's distinct ids, sums of their gradients) -> the rows before the update.
Step = Callable[[list[Ids], list[Floats]], list[Floats]]


def steps(workload: TableWorkload, step: Step) -> Callable[[], object]:
    """Return a function that takes the workload's next step, and spreads the rows to all positions for the user."""
    every, gradients = itertools.cycle(steps_of(workload)), gradients_of(workload)

    def take() -> None:
        distinct, sums, inverses = [], [], []
        for ids, gradient in zip(next(every), gradients, strict=True):
            order = np.argsort(ids)
            unique, first, inverse = np.unique(ids[order], return_index=True, return_inverse=True)
            distinct.append(unique)
            sums.append(np.add.reduceat(gradient[order], first, axis=0))
            inverses.append((order, inverse))
        for rows, (order, inverse) in zip(step(distinct, sums), inverses, strict=True):
            np.empty((len(order), rows.shape[1]), np.float32)[order] = rows[inverse]

    return take


def _pieces(keys: list[bytes]) -> Iterator[slice]:
    return (slice(at, at + _KEYS_A_COMMAND) for at in range(0, len(keys), _KEYS_A_COMMAND))


class _Redis:
    """A client of a Redis server, with a key for each row of the tables of one group."""

    def __init__(self, client: Any, name: bytes) -> None:
        self._client, self._name = client, name

    def keys(self, table: int, ids: Ids) -> list[bytes]:
        prefix, data = b"%s%d:" % (self._name, table), ids.tobytes()
        return [prefix + data[at : at + 8] for at in range(0, len(data), 8)]

    def write(self, keys: list[bytes], rows: Floats) -> None:
        values = [row.tobytes() for row in rows]
        with self._client.pipeline(transaction=False) as pipe:
            for piece in _pieces(keys):
                pipe.mset(dict(zip(keys[piece], values[piece], strict=True)))
            pipe.execute()

    def read(self, keys: list[bytes], dim: int) -> Floats:
        with self._client.pipeline(transaction=False) as pipe:
            for piece in _pieces(keys):
                pipe.mget(keys[piece])
            data = b"".join(value for values in pipe.execute() for value in values)
        return np.frombuffer(data, np.float32).reshape(len(keys), dim + 1).copy()

    def step(self, distinct: list[Ids], sums: list[Floats]) -> list[Floats]:
        """Read the keys of all tables in one pipeline, and write them in another."""
        dim = sums[0].shape[1]
        keys = [key for table, ids in enumerate(distinct) for key in self.keys(table, ids)]
        rows = self.read(keys, dim)
        seen = rows[:, :dim].copy()
        gradient = np.concatenate(sums)
        rows[:, dim] += np.mean(gradient * gradient, axis=1)
        rows[:, :dim] -= RATE * gradient / (np.sqrt(rows[:, dim:]) + EPS)
        self.write(keys, rows)
        return np.split(seen, np.cumsum([len(ids) for ids in distinct])[:-1])


@contextlib.contextmanager
def _redis() -> Iterator[tuple[Any, int]]:
    import redis

    (port,) = free_ports(1)
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL) as process:
        client, end = redis.Redis(port=port, socket_timeout=60), time.monotonic() + 10
        try:
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
            yield client, process.pid
        finally:
            process.kill()


def run_redis(workloads: list[TableWorkload]) -> None:
    """Step as ordered."""
    with _redis() as (client, pid):
        groups = {group: _Redis(client, b"%d-" % number) for number, group in enumerate(groups_of(workloads))}
        for group, tables in groups.items():
            for number in range(group.tables):
                for first in range(0, group.rows_of_one, 1 << 16):
                    ids = np.arange(first, min(first + (1 << 16), group.rows_of_one))
                    tables.write(tables.keys(number, ids), np.full((len(ids), group.dim + 1), 0.01, np.float32))
        serve(*(steps(each, groups[each.group].step) for each in workloads), servers=[pid])


#: The server's values, and sums of row-wise Adagrad, by group and table.
_held: list[list[tuple[Any, Any]]] = []


def read(group: int, ids: list[Any]) -> list[Any]:
    """Return rows of each table, on the server."""
    return [values[some] for (values, _), some in zip(_held[group], ids, strict=True)]


def update(group: int, ids: list[Any], gradients: list[Any]) -> None:
    """Step each table on the server; ids come without repetitions."""
    for (values, sums), some, gradient in zip(_held[group], ids, gradients, strict=True):
        total = sums[some] + gradient.square().mean(1)
        sums[some] = total
        values.index_add_(0, some, gradient / (total.sqrt() + EPS)[:, None], alpha=-RATE)


def run_server(workloads: list[TableWorkload], option: str) -> None:
    """Serve until the input ends."""
    import torch

    for group in groups_of(workloads):
        shape = (group.rows_of_one, group.dim)
        _held.append([(torch.full(shape, 0.01), torch.zeros(shape[0])) for _ in range(group.tables)])
    (port,) = free_ports(1)
    print_line(port)
    threading.Thread(target=lambda: _join("server", 0, str(port), option), daemon=True).start()
    sys.stdin.read()
    # The library waits for a client that has gone.
    os._exit(0)


def run_client(workloads: list[TableWorkload], port: str, option: str) -> None:
    """Step as ordered."""
    import torch
    from torch.distributed import rpc

    groups = groups_of(workloads)

    def step_of(group: int) -> Step:
        def step(distinct: list[Ids], sums: list[Floats]) -> list[Floats]:
            ids = [torch.from_numpy(some) for some in distinct]
            rows = rpc.rpc_sync("server", read, (group, ids))
            rpc.rpc_sync("server", update, (group, ids, [torch.from_numpy(some) for some in sums]))
            return [found.numpy() for found in rows]

        return step

    _join("client", 1, port, option)
    serve(*(steps(workload, step_of(groups.index(workload.group))) for workload in workloads))


def _join(name: str, rank: int, port: str, option: str) -> None:
    """Meet the other process."""
    from torch.distributed import rpc

    only: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if option == _TCP else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **only)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


@click.command(params=[each for each in sparse.params if each.name != "wants_floor"])
def compare(
    *,
    row_counts: Sequence[int],
    dims: Sequence[int],
    id_counts: Sequence[int],
    is_full: bool,
    turns: int,
    wants_json: bool,
) -> None:
    """Embedding tables against the floor, Redis and torch.distributed.rpc."""
    run((row_counts, dims, id_counts, is_full), turns=turns, peers=available(), wants_json=wants_json)


if __name__ == "__main__":
    from benchmarks import table_peers  # noqa: PLW0406 - its functions go to other processes by the module's name

    table_peers.compare()
