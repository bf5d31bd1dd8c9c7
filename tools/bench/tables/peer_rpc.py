"""A peer: torch.distributed.rpc, a plain tensor for each table on the server, and row-wise Adagrad on it.

A step is one call that reads the rows of all tables and one that updates them. With "tcp" as the second argument it
uses only that; else it chooses, which is shared memory on one machine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.distributed import rpc

from flightedl.launch.etcd import free_ports

from ..orders import say_port, serve_choices
from ..peer_rpc import join
from ..peers import serve_until_told
from .workloads import EPS, RATE, gradients_of, groups_of, steps_of, workloads_of

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
    for group in groups_of(workloads_of(numbers)):
        shape = (group.rows_of_one, group.dim)
        _held.append([(torch.full(shape, 0.01), torch.zeros(shape[0])) for _ in range(group.tables)])
    (port,) = free_ports(1)
    say_port(port)
    serve_until_told(lambda: join("server", 0, port, transport))


class _Steps:
    """One workload."""

    def __init__(self, group: int, steps: list[list[Any]], gradients: list[Any]) -> None:
        self._group = group
        self._steps = steps
        self._gradients = gradients
        self._at = 0

    def step(self) -> None:
        """Each id once, as on all sides."""
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
    workloads = workloads_of(numbers)
    groups = groups_of(workloads)
    steps = [
        _Steps(
            groups.index(workload.group),
            [[torch.from_numpy(some) for some in ids] for ids in steps_of(workload)],
            [torch.from_numpy(gradient) for gradient in gradients_of(workload)],
        )
        for workload in workloads
    ]
    join("client", 1, port, transport)
    serve_choices([one.step for one in steps])


if __name__ == "__main__":
    # A call names its function by module and name, so the module has to have its name on both sides.
    from . import peer_rpc  # noqa: PLW0406 - see above

    role, told, way, *where = sys.argv[1:]
    if role == "server":
        peer_rpc.run_server(json.loads(told), way)
    else:
        peer_rpc.run_client(json.loads(told), way, int(where[0]))
