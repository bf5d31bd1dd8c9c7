"""``flightedl bench sparse`` also against Redis and torch.distributed.rpc, as far as they are installed.

Redis has a key for each row: pipelined MGET reads rows with their optimizer's sum, NumPy updates them, MSET writes
them; its server keeps nothing on disk. torch.distributed.rpc calls a server that has a plain tensor for each table: one
call reads the rows of all tables, one updates them. With "tcp" it uses only that, else shared memory on one machine.

    python -m benchmarks.table_peers [options of `flightedl bench sparse`]
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from flightedl.launch.etcd import free_ports
from flightedl_tools.bench.orders import say_port, serve
from flightedl_tools.bench.sparse import FLOOR, RowPeer, run, sparse
from flightedl_tools.bench.table_work import (
    EPS,
    RATE,
    Floats,
    Group,
    Ids,
    gradients_of,
    groups_of,
    steps_of,
    workloads_of,
)

MODULE = "benchmarks.table_peers"
_KEYS_A_COMMAND = 4096
_RPC, _RPC_TCP = "-", "tcp"


def available() -> list[RowPeer]:
    """Return the peers that can run here, and name the others."""
    found = [FLOOR]
    if importlib.util.find_spec("redis") and shutil.which("redis-server"):
        found.append(RowPeer("Redis", MODULE))
    else:
        click.echo("Redis is not compared: the package redis or the program redis-server is not installed", err=True)
    if importlib.util.find_spec("torch"):
        found.append(RowPeer("torch.distributed.rpc", MODULE, _RPC))
        found.append(RowPeer("torch.distributed.rpc, TCP only", MODULE, _RPC_TCP))
    else:
        click.echo("torch.distributed.rpc is not compared: PyTorch is not installed", err=True)
    return found


def _keys(prefix: bytes, ids: Ids) -> list[bytes]:
    data = ids.tobytes()
    return [prefix + data[at : at + 8] for at in range(0, len(data), 8)]


def _pieces(keys: list[bytes]) -> range:
    return range(0, len(keys), _KEYS_A_COMMAND)


def _set(client: Any, keys: list[bytes], rows: Floats) -> None:
    data, size = rows.tobytes(), rows.shape[1] * 4
    with client.pipeline(transaction=False) as pipe:
        for first in _pieces(keys):
            some = keys[first : first + _KEYS_A_COMMAND]
            pipe.mset({key: data[(first + at) * size : (first + at + 1) * size] for at, key in enumerate(some)})
        pipe.execute()


def _get(client: Any, keys: list[bytes], dim: int) -> Floats:
    with client.pipeline(transaction=False) as pipe:
        for first in _pieces(keys):
            pipe.mget(keys[first : first + _KEYS_A_COMMAND])
        data = b"".join(value for values in pipe.execute() for value in values)
    return np.frombuffer(data, np.float32).reshape(len(keys), dim + 1)


def _fill(client: Any, group: Group, name: bytes) -> None:
    for number in range(group.tables):
        for first in range(0, group.rows_of_one, 1 << 16):
            ids = np.arange(first, min(first + (1 << 16), group.rows_of_one))
            _set(client, _keys(b"%s%d:" % (name, number), ids), np.full((len(ids), group.dim + 1), 0.01, np.float32))


class _RedisSteps:
    """One workload."""

    def __init__(self, client: Any, name: bytes, steps: list[list[Ids]], gradients: list[Floats]) -> None:
        self._client = client
        self._name = name
        self._steps = steps
        self._gradients = gradients
        self._at = 0

    def step(self) -> None:
        """All tables' keys in one pipeline there, and one back."""
        ids = self._steps[self._at % len(self._steps)]
        self._at += 1
        dim = self._gradients[0].shape[1]
        keys: list[bytes] = []
        summed: list[Floats] = []
        places = []
        for number, (some, gradients) in enumerate(zip(ids, self._gradients, strict=True)):
            order = np.argsort(some)
            unique, first, inverse = np.unique(some[order], return_index=True, return_inverse=True)
            places.append((order, inverse + len(keys)))
            keys += _keys(b"%s%d:" % (self._name, number), unique)
            summed.append(np.add.reduceat(gradients[order], first, axis=0))
        rows = _get(self._client, keys, dim).copy()
        for order, inverse in places:
            seen = np.empty((len(order), dim), np.float32)
            seen[order] = rows[inverse, :dim]
        gradient = np.concatenate(summed)
        rows[:, dim] += np.mean(gradient * gradient, axis=1)
        rows[:, :dim] -= RATE * gradient / (np.sqrt(rows[:, dim:]) + EPS)
        _set(self._client, keys, rows)


@contextlib.contextmanager
def _server(port: int) -> Any:
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _connected(port: int) -> Any:
    import redis

    client = redis.Redis(port=port, socket_timeout=60)
    end = time.monotonic() + 10
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return client


def run_redis(numbers: list[list[int]]) -> None:
    """Step as ordered."""
    workloads = workloads_of(numbers)
    (port,) = free_ports(1)
    with _server(port) as pid:
        client = _connected(port)
        names = {group: b"%d-" % number for number, group in enumerate(groups_of(workloads))}
        for group, name in names.items():
            _fill(client, group, name)
        steps = [_RedisSteps(client, names[w.group], steps_of(w), gradients_of(w)) for w in workloads]
        serve(*(one.step for one in steps), servers=[pid])


#: By group and table: values, and sums of row-wise Adagrad. Of the server.
_held: list[list[tuple[Any, Any]]] = []


def read(group: int, ids: list[Any]) -> list[Any]:
    """On the server: rows of each table."""
    return [values[some] for (values, _), some in zip(_held[group], ids, strict=True)]


def update(group: int, ids: list[Any], gradients: list[Any]) -> None:
    """On the server: a step of each table; ids without repetitions."""
    for (values, sums), some, gradient in zip(_held[group], ids, gradients, strict=True):
        total = sums[some] + gradient.square().mean(1)
        sums[some] = total
        values.index_add_(0, some, gradient / (total.sqrt() + EPS)[:, None], alpha=-RATE)


def run_server(numbers: list[list[int]], transport: str) -> None:
    """Serve until the input ends."""
    import torch

    for group in groups_of(workloads_of(numbers)):
        shape = (group.rows_of_one, group.dim)
        _held.append([(torch.full(shape, 0.01), torch.zeros(shape[0])) for _ in range(group.tables)])
    (port,) = free_ports(1)
    say_port(port)
    threading.Thread(target=lambda: join("server", 0, port, transport), daemon=True).start()
    sys.stdin.read()
    # The library waits for a client that has gone.
    os._exit(0)


class _RpcSteps:
    """One workload."""

    def __init__(self, group: int, steps: list[list[Any]], gradients: list[Any]) -> None:
        self._group = group
        self._steps = steps
        self._gradients = gradients
        self._at = 0

    def step(self) -> None:
        """Each id once, as on all sides."""
        import torch
        from torch.distributed import rpc

        ids = self._steps[self._at % len(self._steps)]
        self._at += 1
        unique, inverses = [], []
        for some in ids:
            one, inverse = torch.unique(some, return_inverse=True)
            unique.append(one)
            inverses.append(inverse)
        rows = rpc.rpc_sync("server", read, (self._group, unique))
        for found, inverse in zip(rows, inverses, strict=True):
            _ = found[inverse]  # What the user sees.
        sums = [
            torch.zeros(len(one), gradient.shape[1]).index_add_(0, inverse, gradient)
            for one, inverse, gradient in zip(unique, inverses, self._gradients, strict=True)
        ]
        rpc.rpc_sync("server", update, (self._group, unique, sums))


def run_client(numbers: list[list[int]], transport: str, port: int) -> None:
    """Step as ordered."""
    import torch

    workloads = workloads_of(numbers)
    groups = groups_of(workloads)
    steps = [
        _RpcSteps(
            groups.index(workload.group),
            [[torch.from_numpy(some) for some in ids] for ids in steps_of(workload)],
            [torch.from_numpy(gradient) for gradient in gradients_of(workload)],
        )
        for workload in workloads
    ]
    join("client", 1, port, transport)
    serve(*(one.step for one in steps))


def join(name: str, rank: int, port: int, transport: str) -> None:
    """Meet the other process."""
    from torch.distributed import rpc

    only: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if transport == _RPC_TCP else {}
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
    # A call by rpc names its function by module and name, so the module has to have its name on both sides.
    from benchmarks import table_peers  # noqa: PLW0406 - see above

    match sys.argv[1:]:
        case ["server", told, way]:
            table_peers.run_server(json.loads(told), way)
        case ["client", told, port, way]:
            table_peers.run_client(json.loads(told), way, int(port))
        case [told] if told.startswith("["):
            table_peers.run_redis(json.loads(told))
        case _:
            compare()
