"""A peer of the bench: gloo's send and receive, all blocks of a step posted at once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import distributed

from .orders import say_port, serve
from .peers import LEARNING_RATE, blocks, run, serve_until_told


def run_server(element_count: int, _option: str) -> None:
    """Answer each block of gradients with its values."""
    store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    say_port(store.port)
    values = torch.zeros(element_count)
    gradient = torch.empty(element_count)
    parts = blocks(element_count)

    def answer() -> None:
        distributed.init_process_group("gloo", store=store, rank=0, world_size=2)
        sending: list[Any] = []
        while True:
            receiving = [distributed.irecv(gradient[part], 1) for part in parts]
            for one in sending:
                one.wait()
            sending = []
            for part, arriving in zip(parts, receiving, strict=True):
                arriving.wait()
                values[part].add_(gradient[part], alpha=-LEARNING_RATE)
                sending.append(distributed.isend(values[part], 1))

    def answer_until_gone() -> None:
        # Only by an error of this type does it say that the other side is gone.
        with contextlib.suppress(RuntimeError):
            answer()

    serve_until_told(answer_until_gone)


def run_client(element_count: int, port: int, _option: str) -> None:
    """Step as ordered."""
    store = distributed.TCPStore("127.0.0.1", port, 2, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=1, world_size=2)
    gradient = torch.randn(element_count)
    values = torch.zeros(element_count)
    parts = blocks(element_count)

    def step() -> None:
        receiving = [distributed.irecv(values[part], 0) for part in parts]
        sending = [distributed.isend(gradient[part], 0) for part in parts]
        for one in [*sending, *receiving]:
            one.wait()

    serve(step)


if __name__ == "__main__":
    run(run_server, run_client)
