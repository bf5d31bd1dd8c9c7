"""A peer of the bench: torch.distributed.rpc one asynchronous call for each block.

With "tcp" as the last argument it uses only that; else it chooses, which is shared memory on one machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import rpc

from flightedl.launch.etcd import free_ports

from .orders import say_port, serve
from .peers import LEARNING_RATE, block_sizes, run, serve_until_told

#: The server's values by block, each with memory of its own: of a part of a tensor torch would send a copy.
_held: list[Any] = []


def join(name: str, rank: int, port: int, transport: str) -> None:
    """Meet the other process."""
    only: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if transport == "tcp" else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **only)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def update(number: int, gradient: Any) -> Any:
    """On the server: one block of a step; its values."""
    return _held[number].add_(gradient, alpha=-LEARNING_RATE)


def run_server(element_count: int, transport: str) -> None:
    """Serve until the input ends."""
    _held.extend(torch.zeros(size) for size in block_sizes(element_count))
    (port,) = free_ports(1)
    say_port(port)
    serve_until_told(lambda: join("server", 0, port, transport))


def run_client(element_count: int, port: int, transport: str) -> None:
    """Step as ordered."""
    gradients = [torch.randn(size) for size in block_sizes(element_count)]
    values = [torch.zeros(size) for size in block_sizes(element_count)]
    join("client", 1, port, transport)

    def step() -> None:
        calls = [rpc.rpc_async("server", update, (number, one)) for number, one in enumerate(gradients)]
        for block, call in zip(values, calls, strict=True):
            block.copy_(call.wait())

    serve(step)


if __name__ == "__main__":
    # A call names its function by module and name, so the module has to have its name on both sides.
    from . import peer_rpc  # noqa: PLW0406 - see above

    run(peer_rpc.run_server, peer_rpc.run_client)
