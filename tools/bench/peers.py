"""What other systems take for the same step: a gradient to a server process, plain SGD there, the values back.

Each peer is a program of its own. ``python -m MODULE server ELEMENTS OPTION`` prints a port, ``python -m MODULE client
ELEMENTS OPTION PORT`` takes its orders as ``orders`` says. They move one float32 array in blocks of 4 MB, all of them
under way at once where the peer's interface allows it, and the server applies ``values -= lr * gradient`` to each block
on arrival: no identity, no checks. A client that starts its server by itself names it when it is ready.

Not compared: other optimizers, several trainers, 16-bit wires.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flightedl.config import child_environment

from .orders import worker
from .sides import Side

#: Elements that travel together.
BLOCK_ELEMENTS = 1 << 20
LEARNING_RATE = 0.01
PEER_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another system: its name, its program beside this module, and the package that it needs."""

    name: str
    program: str
    package: str
    option: str = "-"
    #: Whether the server is a process that the bench starts.
    has_server: bool = True


PEERS = (
    Peer("TCP sockets", "peer_sockets", "socket"),
    Peer("torch.distributed.rpc", "peer_rpc", "torch"),
    Peer("torch.distributed.rpc, TCP only", "peer_rpc", "torch", "tcp"),
    Peer("gloo", "peer_gloo", "torch"),
    Peer("Ray", "peer_ray", "ray", has_server=False),
)


def installed(peers: Sequence[Peer] = PEERS) -> list[Peer]:
    """Those whose package is here."""
    return [peer for peer in peers if importlib.util.find_spec(peer.package) is not None]


def missing_line(found: Sequence[Peer]) -> str:
    """Names those that are not among ``found``; empty: all are."""
    missing = [peer.name for peer in PEERS if peer not in found]
    return f"not installed, so not compared: {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def peer_side(peer: Peer, element_count: int) -> Iterator[Side]:
    """A peer's processes, ready to step."""
    module = f"flightedl_tools.bench.{peer.program}"
    environment = child_environment(**PEER_ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        servers, port = [], "0"
        if peer.has_server:
            server = stack.enter_context(worker(module, ["server", element_count, peer.option], environment))
            servers, port = [server.process.pid], server.line()
        client = stack.enter_context(worker(module, ["client", element_count, peer.option, port], environment))
        servers += client.answer().get("servers", [])
        # torch's transport through shared memory, for one, waits for messages by looking for them all the time.
        side = Side([client], servers, 4 * element_count, rests=True)
        try:
            yield side
        finally:
            side.wake()


# what the programs share


def blocks(element_count: int) -> list[slice]:
    """The array's blocks."""
    return [slice(start, start + BLOCK_ELEMENTS) for start in range(0, element_count, BLOCK_ELEMENTS)]


def block_sizes(element_count: int) -> list[int]:
    """Elements of each block."""
    return [min(BLOCK_ELEMENTS, element_count - part.start) for part in blocks(element_count)]


def serve_until_told(answer: Callable[[], None]) -> None:
    """Run a server's loop until the input ends."""
    threading.Thread(target=answer, daemon=True).start()
    sys.stdin.read()
    # The loop is waiting for a client that is gone, and some libraries don't end then.
    os._exit(0)


def run(server: Callable[[int, str], None], client: Callable[[int, int, str], None]) -> None:
    """The command line of a peer's program."""
    role, element_count, option, *port = sys.argv[1:]
    if role == "server":
        server(int(element_count), option)
    else:
        client(int(element_count), int(port[0]), option)
