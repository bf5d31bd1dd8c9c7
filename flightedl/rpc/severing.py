"""Ends the connections of peers that neither send nor read.

Flight gives a handler no way out of a read that never returns, and only the *client's* deadline would end it. So the
server shuts the peer's socket down itself: it finds it among its own descriptors by the two port numbers. The handler's
read then ends like any other broken-off stream. All calls of that connection end; their clients see a broken
connection, and try again.

Works where the descriptors of a process are listed in a directory (Linux, macOS); elsewhere nothing is severed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import unquote

_DESCRIPTORS = Path("/dev/fd")


def port_of_peer(peer: str) -> int | None:
    """The port in gRPC's name of a peer, ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``; None for other kinds."""
    scheme, _, address = unquote(peer).partition(":")
    _, _, port = address.rpartition(":")
    return int(port) if scheme in {"ipv4", "ipv6"} and port.isdecimal() else None


def sever(local_port: int, remote_port: int | None = None) -> int:
    """Shut down the accepted TCP connections of a listening port; returns how many.

    Args:
        local_port: Port of the server.
        remote_port: Only the connection from this port of the peer; None: all of them.
    """
    try:
        descriptors = [int(entry.name) for entry in _DESCRIPTORS.iterdir() if entry.name.isdecimal()]
    except OSError:
        return 0
    return sum(_sever_one(descriptor, local_port, remote_port) for descriptor in descriptors)


def _sever_one(descriptor: int, local_port: int, remote_port: int | None) -> bool:
    try:
        # A duplicate keeps the number from being reused for another file between the look and the shutdown.
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return False
    with connection:
        try:
            if connection.family not in {socket.AF_INET, socket.AF_INET6}:
                return False
            if connection.getsockname()[1] != local_port:
                return False
            # The listening socket has no peer: an OSError, like a connection that is gone already.
            peer_port = connection.getpeername()[1]
            if remote_port not in {None, peer_port}:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
