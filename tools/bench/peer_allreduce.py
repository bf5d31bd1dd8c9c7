"""A peer of the benchmark: gloo's all-reduce of one array between several processes, a synchronous round of DDP.

``python -m flightedl_tools.bench.peer_allreduce ELEMENTS RANK WORLD PORT``; rank 0 prints the port that the others get.
"""

from __future__ import annotations

import sys

import torch
from torch import distributed

from .orders import say_port, serve

_LEARNING_RATE = 0.01


def run_member(element_count: int, rank: int, world: int, port: int) -> None:
    """Step as ordered: the mean of all gradients, and plain SGD in each process."""
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        say_port(store.port)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    gradient = torch.randn(element_count)
    values = torch.zeros(element_count)

    def step() -> None:
        total = gradient.clone()
        distributed.all_reduce(total)
        values.add_(total, alpha=-_LEARNING_RATE / world)

    serve(step)


if __name__ == "__main__":
    run_member(*map(int, sys.argv[1:]))
