"""Handshake by which the two ends of a stream detect that they run on the same host, and map each other's memory.

The client sends a ``ShareRequest`` with its ``host_mark``, sealed, as metadata without a batch. If the server has the
same mark, it listens on an abstract Unix socket with a random name, and replies with the name and a nonce. The client
connects, and each side sends the descriptor of a memory that begins with the nonce. Each side uses SO_PEERCRED to check
that the peer runs as the same user. After that, the stream's messages may have their values in shared memory, and the
socket carries small messages (``line``).

If any of these steps fails, values are sent over TCP on the same stream. Neither side waits for the other for more than
a second. The memory belongs to one stream and is freed with it, so a late handler never accesses values of the next
stream. A side may also lend memory that does not belong to a stream. If the stream fails, this side revokes the memory
before changing it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from struct import Struct

from flightedl.errors import AuthenticationError, FlightedlError, MessageError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.parameters import ShareReply, ShareRequest
from flightedl.ports import Clock
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory, host_mark
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.identity import SEAL_BYTES, sealed, unsealed
from flightedl.rpc.line import Line
from flightedl.rpc.streams import Exchange

#: Seconds that the server waits for the client's connection, and that the client waits for the server's reply.
_WAIT_S = 0.5
_CLIENT_WAIT_S = 0.75
_DONE = b"1"
#: Names under which the two shared memories of a stream appear in /proc.
TRAINERS_MEMORY = "flightedl-values-of-trainer"
PSERVERS_MEMORY = "flightedl-values-of-pserver"
_CREDENTIALS = Struct("3i")


@dataclass(frozen=True, slots=True)
class SharedPair:
    """Shared memory of both ends of a stream, and the line between them."""

    own: SharedMemory
    other: SharedMemory
    #: Carries the stream's small messages. Closed together with the stream.
    line: Line
    #: Memory outside any stream from which the server lends values; None if it lends none.
    store: SharedMemory | None = None
    #: Memory outside any stream from which the client lends gradients; None if it lends none.
    gradients: SharedMemory | None = None


class NotSharedError(UnavailableError):
    """Memory cannot be shared, so values travel over TCP. The error's text is the reason."""


def uid_of_peer(connection: socket.socket) -> int:
    """Ask the kernel for the user id of a Unix socket's peer process."""
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return found[1]


# the client's side


def ask_to_share(exchange: ClientExchange, gradients: SharedMemory | None = None) -> SharedPair:
    """Request shared memory from the server. Called on a new stream.

    Args:
        exchange: The stream.
        gradients: See ``SharedPair``.

    Raises:
        NotSharedError: memory cannot be shared. The stream remains usable.
        FlightedlError: the stream has failed.
    """
    mark = host_mark()
    if not mark:
        raise NotSharedError("this system has no memory that can be shared")
    exchange.write_metadata(sealed(encode(ShareRequest(host=mark))))
    _, answer = exchange.answer()
    if answer is None:
        raise MessageError("the answer to a request for shared memory has no metadata")
    reply = decode(unsealed(answer), ShareReply)
    if reply.refused:
        raise NotSharedError(reply.refused)
    try:
        pair = _connect_back(reply, gradients)
    except (OSError, FlightedlError, ValueError) as error:
        raise NotSharedError(f"no memory could be exchanged: {str(error)[:200]}") from None
    exchange.have(pair.line)
    return pair


def _connect_back(reply: ShareReply, gradients: SharedMemory | None) -> SharedPair:
    nonce = bytes.fromhex(reply.nonce)
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(_CLIENT_WAIT_S)
        connection.connect(_address(reply.socket))
        _require_same_user(connection)
        own = SharedMemory.create(nonce, name=TRAINERS_MEMORY)
        _send(connection, own, gradients)
        other, store = _receive(connection, nonce)
        stack.pop_all()
        return SharedPair(own, other, Line(connection), store, gradients)


# the server's side


def is_share_request(message: bytes) -> bool:
    """Return True if metadata without a batch appears to be a request for ``share``."""
    return message[SEAL_BYTES : SEAL_BYTES + 1] == b"{"


def refuse_to_share(exchange: Exchange, why: str) -> None:
    """Refuse a client's request, so that values travel over TCP."""
    exchange.write_metadata(sealed(encode(ShareReply(refused=why))))


def share(exchange: Exchange, request: bytes, clock: Clock, store: SharedMemory | None = None) -> SharedPair:
    """Accept a client's request and wait until the client has connected.

    Args:
        exchange: The stream on which the request arrived.
        request: The received request.
        clock: Clock of the time limit.
        store: See ``SharedPair``.

    Raises:
        NotSharedError: memory cannot be shared. The client knows this, or will detect it. The stream remains usable.
        FlightedlError: the request is invalid.
    """
    asked = decode(unsealed(request), ShareRequest)
    if not asked.host or asked.host != host_mark():
        why = "trainer and pserver are on different hosts, of different users or in different containers"
        refuse_to_share(exchange, why)
        raise NotSharedError(why)
    name, nonce = secrets.token_hex(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    with ExitStack() as stack:
        try:
            own = SharedMemory.create(nonce, name=PSERVERS_MEMORY)
            stack.callback(own.sent)
            listener = stack.enter_context(_listening(name))
        except (OSError, UnavailableError) as error:
            refuse_to_share(exchange, f"the pserver has no memory to share: {str(error)[:200]}")
            raise NotSharedError(str(error)) from None
        exchange.write_metadata(sealed(encode(ShareReply(socket=name, nonce=nonce.hex()))))
        pair = _wait_for_client(listener, own, store, clock)
        exchange.have(pair.line)
        return pair


@contextmanager
def _listening(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(name))
        listener.listen(4)
        yield listener


def _wait_for_client(
    listener: socket.socket, own: SharedMemory, store: SharedMemory | None, clock: Clock
) -> SharedPair:
    """Accept connections until the client has connected. Any user on the host can read the name and connect."""
    until = clock.now() + _WAIT_S
    why = "no client connected"
    while (left_s := until - clock.now()) > 0:
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
            with ExitStack() as stack:
                stack.enter_context(connection)
                connection.settimeout(max(0.01, until - clock.now()))
                _require_same_user(connection)
                other, gradients = _receive(connection, own.nonce)
                _send(connection, own, store)
                stack.pop_all()
                return SharedPair(own, other, Line(connection), store, gradients)
        except TimeoutError:
            pass
        except (OSError, FlightedlError) as error:
            why = str(error)[:200]
    raise NotSharedError(f"the client did not connect for the memory in time: {why}")


# both


def _address(name: str) -> bytes:
    """Return the address of an abstract Unix socket (Linux), which leaves no file behind if the process dies."""
    return b"\0flightedl-" + name.encode()


def _require_same_user(connection: socket.socket) -> None:
    uid = uid_of_peer(connection)
    if uid != os.geteuid():
        raise AuthenticationError(f"the peer process runs as user {uid}, this one as {os.geteuid()}")


def _send(connection: socket.socket, own: SharedMemory, store: SharedMemory | None = None) -> None:
    try:
        more = [] if store is None else [store.descriptor()]
        socket.send_fds(connection, [_DONE], [own.descriptor(), *more])
    finally:
        own.sent()


def _receive(connection: socket.socket, nonce: bytes) -> tuple[SharedMemory, SharedMemory | None]:
    """Return the peer's memory for this stream, and the memory from which the peer lends, if any."""
    said, descriptors, _, _ = socket.recv_fds(connection, len(_DONE), 2, socket.MSG_CMSG_CLOEXEC)
    with ExitStack() as stack:
        for each in descriptors:
            stack.callback(os.close, each)
        if said != _DONE or not 0 < len(descriptors) <= 2:
            raise MessageError(f"a message must have 1 or 2 descriptors, but has {len(descriptors)}")
        found = [SharedMemory.received(os.dup(each), nonce if not n else None) for n, each in enumerate(descriptors)]
        return found[0], found[1] if len(found) > 1 else None
