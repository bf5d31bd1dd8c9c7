"""End the connections of peers that neither send nor read.

A Flight handler that is blocked in a read cannot be interrupted; only the *client's* deadline would end it. Therefore
the server itself shuts down the peer's socket, which it finds among its own descriptors by the two port numbers. The
read then fails as it does when a stream breaks. All calls on the connection end; their clients see a broken connection,
and retry.

A client does the same if a server has been replaced and may be frozen: it ends its calls to the server by shutting down
the sockets that are connected to the server's address (``abort_calls_to``).

Connections can be shut down on systems that list the descriptors of a process in a directory (Linux, macOS). On other
systems, calls end when they reach their own time limits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

_DESCRIPTORS = Path("/dev/fd")


def port_of_peer(peer: str) -> int | None:
    """Return the port in gRPC's name for a peer, such as ``ipv6:%5B::1%5D:4711``; None if it has no IP address."""
    scheme, _, address = unquote(peer).partition(":")
    _, _, port = address.rpartition(":")
    return int(port) if scheme in {"ipv4", "ipv6"} and port.isdecimal() else None


def abort_connections(local_port: int, remote_port: int | None = None) -> int:
    """Shut down the TCP connections that were accepted on a listening port. Return their number.

    Args:
        local_port: Port of the server.
        remote_port: Port of the peer whose connection to shut down; None to shut down all connections.
    """

    def matches(connection: socket.socket) -> bool:
        # Asking a listening socket or a closed connection for its peer raises OSError.
        peer_port = connection.getpeername()[1]
        return connection.getsockname()[1] == local_port and remote_port in {None, peer_port}

    return _sever_where(matches)


def abort_calls_to(address: str) -> int:
    """Shut down this process's own connections to the server at ``host:port``. Return their number."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return 0
    places = {(_plain(place[4][0]), place[4][1]) for place in found}

    def matches(connection: socket.socket) -> bool:
        peer = connection.getpeername()
        return (_plain(peer[0]), peer[1]) in places

    return _sever_where(matches)


def leave(address: str) -> None:
    """Call ``abort_calls_to`` in the background, because looking up the name of a dead host may take long."""
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        threading.Thread(target=abort_calls_to, args=(address,), name="flightedl-abort", daemon=True).start()
    else:
        abort_calls_to(address)


def _plain(host: object) -> str:
    address = ipaddress.ip_address(str(host).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _sever_where(matches: Callable[[socket.socket], bool]) -> int:
    try:
        descriptors = [int(entry.name) for entry in _DESCRIPTORS.iterdir() if entry.name.isdecimal()]
    except OSError:
        return 0
    return sum(_sever_one(descriptor, matches) for descriptor in descriptors)


def _sever_one(descriptor: int, matches: Callable[[socket.socket], bool]) -> bool:
    try:
        # Use a duplicate, so that the number cannot be reused for another file between the check and the shutdown.
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return False
    with connection, contextlib.suppress(OSError):
        if connection.family in {socket.AF_INET, socket.AF_INET6} and matches(connection):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
