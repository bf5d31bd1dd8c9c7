"""A process of the ``torch`` bench: the training loop of a module, alone, with DDP, or on a job.

A step is all of it: zero the gradients, forward, backward, the optimizer, and on a job also the batch's hand-out.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

import flightedl as fe

from .orders import next_order, ready, report, say_port, serve

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
            adam = torch.optim.Adam(net.parameters())
            serve(lambda: step(net, adam))
        case "ddp":
            parallel = _parallel(net, options)
            adam = torch.optim.Adam(parallel.parameters())
            serve(lambda: step(parallel, adam))
        case "job":
            with fe.connect() as job:
                optimizer = fe.torch.Optimizer(net, job, fe.Adam(), mode=fe.Sync())
                _serve_batches(job.dataset(options["data"], batch_size=1, epochs=None), lambda: step(net, optimizer))


def _parallel(net: nn.Module, options: dict[str, Any]) -> nn.Module:
    rank = options["rank"]
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        say_port(store.port)
    else:
        store = distributed.TCPStore("127.0.0.1", options["port"], 2, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return nn.parallel.DistributedDataParallel(net)


def _serve_batches(data: Any, step: Any) -> None:
    """As ``serve``, where a step is a whole turn of the loop over the batches."""
    ready()
    seconds: list[float] = []
    left = 0
    cpu_s = begun = 0.0
    for _ in data:
        now = time.perf_counter()
        if left:
            seconds.append(now - begun)
            left -= 1
        if not left:
            if seconds:
                report(seconds, time.process_time() - cpu_s)
            seconds, left = [], next_order()
            if not left:
                return
            cpu_s = time.process_time()
            now = time.perf_counter()
        begun = now
        step()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
