"""A process of the ``torch`` bench: the training loop of a module, alone, with DDP, or on a job.

A step is all of it: zero the gradients, forward, backward, the optimizer, and on a job also the batch's hand-out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

import flightedl as fe

from .orders import next_order, ready, report, say_port, serve
from .trainer import run_steps

_IMAGES = 32
_FLAT = 32 * 3 * 3
_DIGITS = 10


def network(mb: float) -> nn.Module:
    """A small convolutional network; its last layers are as wide as makes the parameters so many MiB."""
    torch.manual_seed(0)
    width = max(1, round(mb * (1 << 20) / 4 / (_FLAT + _DIGITS)))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(_FLAT, width),
        nn.ReLU(),
        nn.Linear(width, _DIGITS),
    )


def main(options: dict[str, Any]) -> None:
    """Step as ordered."""
    torch.set_num_threads(1)
    net = network(options["mb"])
    images, digits = torch.randn(_IMAGES, 1, 8, 8), torch.randint(_DIGITS, (_IMAGES,))

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(module(images), digits).backward()
        optimizer.step()

    match options["kind"]:
        case "alone":
            adam = torch.optim.Adam(net.parameters(), fused=True)
            serve(lambda: step(net, adam))
        case "ddp":
            parallel = _parallel(net, options)
            adam = torch.optim.Adam(parallel.parameters(), fused=True)
            serve(lambda: step(parallel, adam))
        case "job":
            with fe.connect() as job:
                optimizer = fe.torch.Optimizer(net, job, fe.Adam(), mode=fe.Sync())
                data = job.dataset(options["data"], batch_size=1, epochs=None)
                ready()
                # Each order is a loop of its own: a trainer that stayed in one would be waited for in others' rounds.
                while count := next_order()[0]:
                    report(*run_steps(data, lambda: step(net, optimizer), count))


def _parallel(net: nn.Module, options: dict[str, Any]) -> nn.Module:
    rank = options["rank"]
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        say_port(store.port)
    else:
        store = distributed.TCPStore("127.0.0.1", options["port"], 2, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return nn.parallel.DistributedDataParallel(net)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
