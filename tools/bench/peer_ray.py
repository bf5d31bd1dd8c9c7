"""A peer of the bench: an actor of Ray, which gets and gives arrays by the store in shared memory."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray

from .orders import serve
from .peers import LEARNING_RATE, blocks, run


class Server:
    """The actor: one array."""

    def __init__(self, element_count: int) -> None:
        self._values = np.zeros(element_count, np.float32)

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def update(self, start: int, gradient: Any) -> Any:
        """One block of a step; its values."""
        block = self._values[start : start + gradient.size]
        block -= LEARNING_RATE * gradient
        return block


def run_server(_element_count: int, _option: str) -> None:
    """The client starts it."""
    raise NotImplementedError("the client of this peer starts its server")


def run_client(element_count: int, _port: int, _option: str) -> None:
    """Step as ordered."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level="fatal", log_to_driver=False)
    actor = ray.remote(Server).remote(element_count)
    gradient = np.random.default_rng(0).standard_normal(element_count, np.float32)
    values = np.zeros(element_count, np.float32)
    parts = blocks(element_count)

    def step() -> None:
        calls = [actor.update.remote(part.start, gradient[part]) for part in parts]
        for part, call in zip(parts, calls, strict=True):
            values[part] = ray.get(call)

    serve(step, servers=[ray.get(actor.pid.remote())])


if __name__ == "__main__":
    run(run_server, run_client)
