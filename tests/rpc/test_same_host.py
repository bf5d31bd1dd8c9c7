"""Sharing memory on one host: peers that may share, and memory that is accepted from them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.errors import DamagedError, MessageError
from flightedl.messages.base import encode
from flightedl.messages.parameters import ShareReply, ShareRequest
from flightedl.process import shared_memory
from flightedl.process.shared_memory import SIZE_BYTES, SharedMemory, host_mark
from flightedl.rpc import Connection, FlightServer, Routes, same_host
from flightedl.rpc.call import Call
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.identity import sealed
from flightedl.rpc.routes import ExchangeRoute
from flightedl.rpc.same_host import NotSharedError, SharedPair, ask_to_share, share
from flightedl.rpc.streams import Exchange

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

NONCE = bytes(range(16))
SCHEMA = pa.schema([pa.field("values", pa.binary(), nullable=False)])
CLOCK = SystemClock()
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10
_WHOLE = 4096 + SIZE_BYTES


@pytest.fixture(autouse=True)
def nothing_mapped_behind() -> Iterator[None]:
    yield
    assert _mapped() == 0


def _mapped() -> int:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return sum("flightedl-values" in line for line in maps)


def _descriptors() -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found += "flightedl-values" in os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
    return found


class Sharing:
    """A server that shares memory on request, and then answers each message with a word."""

    def __init__(self) -> None:
        self.pairs: list[SharedPair] = []
        self.refused: list[str] = []
        #: Memory from which values are lent.
        self.store: SharedMemory | None = None

    def routes(self) -> Routes:
        return Routes(exchanges={"step": ExchangeRoute(SCHEMA, self._step)})

    def _step(self, _: bytes, exchange: Exchange, call: Call) -> None:
        exchange.begin(SCHEMA)
        message = exchange.read_at_rest()
        while message is not None:
            try:
                self.pairs.append(share(exchange, message[1], CLOCK, self.store))
            except NotSharedError as error:
                self.refused.append(str(error))
            message = exchange.read_at_rest()
            if message is not None:
                exchange.write_metadata(b"still here")
                message = exchange.read_at_rest()


@pytest.fixture
def sharing() -> Sharing:
    return Sharing()


@pytest.fixture
def server(serve: Callable[..., FlightServer], sharing: Sharing) -> FlightServer:
    return serve(sharing.routes())


@contextlib.contextmanager
def _stream(server: FlightServer) -> Iterator[ClientExchange]:
    with (
        Connection(server.address) as connection,
        connection.exchange(b'{"verb": "step"}', SCHEMA, timeout_s=10.0) as exchange,
    ):
        yield exchange


def _require_sound(exchange: ClientExchange) -> None:
    exchange.write_metadata(b"?")
    assert exchange.answer() == (None, b"still here")


def _wait_for(there: Callable[[], object]) -> None:
    for _ in range(500):
        if there():
            return
        CLOCK.sleep(0.01)
    raise AssertionError("it did not come")


def test_both_sides_see_each_others_writes(server: FlightServer, sharing: Sharing) -> None:
    with _stream(server) as exchange:
        pair = ask_to_share(exchange)
        _wait_for(lambda: sharing.pairs)
        there = sharing.pairs.pop()
        pair.own.values[5], pair.own.consumed = 7, 1 << 40
        there.own.values[-1] = 9
        assert (there.other.values[5], there.other.consumed, pair.other.values[-1]) == (7, 1 << 40, 9)
        for memory in (pair.other, there.other):
            with pytest.raises(ValueError, match="read-only"):
                memory.values[0] = 1
        _require_sound(exchange)
        assert _mapped() == 4
        del pair, there, memory
        assert _mapped() == 0
    assert _descriptors() == 0


def _sockets() -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")  # noqa: PTH115
    return found


def test_the_line_of_a_stream_is_closed_with_it_at_both_ends(server: FlightServer, sharing: Sharing) -> None:
    with Connection(server.address) as connection:
        before = None
        for _ in range(3):
            with connection.exchange(b'{"verb": "step"}', SCHEMA, timeout_s=10.0) as exchange:
                pair = ask_to_share(exchange)
                _wait_for(lambda: sharing.pairs)
                there = sharing.pairs.pop()
                assert pair.line.fileno >= 0
                _require_sound(exchange)
            assert pair.line.fileno < 0
            _wait_for(lambda line=there.line: line.fileno < 0)
            before = before or _sockets()
            assert _sockets() == before
            del pair, there


def test_a_handshake_that_fails_leaves_no_socket(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_WAIT_S", 0.05)
    _fail_at(monkeypatch, "_receive")
    with _stream(server) as exchange:
        before = _sockets()
        with pytest.raises(NotSharedError):
            ask_to_share(exchange)
        _wait_for(lambda: sharing.refused)
        assert _sockets() == before
        _require_sound(exchange)
    assert (_mapped(), _descriptors()) == (0, 0)


def _fail_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> None:
        raise MessageError("no memory has arrived")

    monkeypatch.setattr(same_host, name, fail)


def test_the_client_reads_lent_values(server: FlightServer, sharing: Sharing) -> None:
    for _ in range(2):
        sharing.store = sharing.store or SharedMemory.create(b"s" * 16, 10_000, "flightedl-values")
        with _stream(server) as exchange:
            pair = ask_to_share(exchange)
            assert pair.store is not None
            assert pair.store.values.size == 10_000
            sharing.store.values[9_999] = 3
            assert pair.store.values[9_999] == 3
            with pytest.raises(ValueError, match="read-only"):
                pair.store.values[0] = 1
            _wait_for(lambda: sharing.pairs)
            assert not pair.other.is_over
            sharing.pairs.pop().own.end()
            assert pair.other.is_over
            del pair
    sharing.store = None
    assert (_mapped(), _descriptors()) == (0, 0)


def test_a_client_on_another_host_is_rejected_at_once(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _stream(server) as exchange:
        exchange.write_metadata(sealed(encode(ShareRequest(host="elsewhere"))))
        _, answer = exchange.answer()
        assert answer is not None
        assert b"different hosts" in answer
        _require_sound(exchange)
    assert "different hosts" in sharing.refused[0]


def test_a_process_of_another_user_gets_no_memory(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "uid_of_peer", lambda _: os.geteuid() + 1)
    monkeypatch.setattr(same_host, "_WAIT_S", 0.1)
    with _stream(server) as exchange:
        with pytest.raises(NotSharedError, match="runs as user"):
            ask_to_share(exchange)
        _wait_for(lambda: sharing.refused)
        _require_sound(exchange)


def test_the_server_checks_the_user_of_the_peer(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.current_thread()
    true = os.geteuid()
    monkeypatch.setattr(same_host, "uid_of_peer", lambda _: true if threading.current_thread() is main else true + 1)
    monkeypatch.setattr(same_host, "_WAIT_S", 0.1)
    with _stream(server) as exchange:
        with pytest.raises(NotSharedError, match="no memory could be exchanged"):
            ask_to_share(exchange)
        _wait_for(lambda: sharing.refused)
        assert "runs as user" in sharing.refused[0]
        _require_sound(exchange)


def test_the_server_gives_up_if_no_peer_connects(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_WAIT_S", 0.05)
    with _stream(server) as exchange:
        exchange.write_metadata(sealed(encode(ShareRequest(host=host_mark()))))
        exchange.answer()
        _wait_for(lambda: sharing.refused)
        assert "in time" in sharing.refused[0]
        _require_sound(exchange)


def test_a_stranger_that_connects_first_does_not_exclude_the_client(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = same_host._connect_back

    def after_strangers(reply: ShareReply, gradients: SharedMemory | None) -> SharedPair:
        for data in (b"", b"1"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(same_host._address(reply.socket))
                if data:
                    stranger.send(data)
        return real(reply, gradients)

    monkeypatch.setattr(same_host, "_connect_back", after_strangers)
    with _stream(server) as exchange:
        assert ask_to_share(exchange).other.nonce
        _require_sound(exchange)
    _wait_for(lambda: sharing.pairs)
    sharing.pairs.clear()


def test_a_system_without_shared_memory_shares_nothing(server: FlightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host, "host_mark", lambda: "")
    with _stream(server) as exchange, pytest.raises(NotSharedError, match="this system has no memory"):
        ask_to_share(exchange)


def test_a_damaged_request_is_rejected(server: FlightServer) -> None:
    with _stream(server) as exchange:
        exchange.write_metadata(b"0" * 16 + encode(ShareRequest(host=host_mark())))
        with pytest.raises(DamagedError):
            exchange.answer()


# --- memory that is accepted ---


def _received(
    size: int = _WHOLE,
    seals: int = _SEALS,
    start: bytes = b"flightedl memory" + NONCE,
    flags: int = 0,
    nonce: bytes | None = NONCE,
) -> SharedMemory:
    descriptor = os.memfd_create("flightedl-values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, size)
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, start, 0)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return SharedMemory.received(descriptor, nonce)


def test_sound_memory_is_accepted() -> None:
    assert _received().values.size == SIZE_BYTES


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"size": 4096}, "has 4096 bytes"),
        ({"size": _WHOLE + 4096}, "another version"),
        ({"seals": 0}, "not sealed"),
        ({"seals": fcntl.F_SEAL_SEAL if sys.platform == "linux" else 0}, "not sealed"),
        ({"seals": _SEALS & ~0x10}, "not sealed"),
        ({"start": b"flightedl memory" + b"x" * 16}, "belongs to another stream"),
        ({"start": b""}, "belongs to another stream"),
        ({"size": 0, "start": b"", "nonce": None}, "has 0 bytes, less than its header"),
        ({"size": 4095, "nonce": None}, "has 4095 bytes, less"),
        ({"size": 1 << 62, "nonce": None}, "cannot be mapped"),
        ({"nonce": None, "start": b"flightedl memorz"}, "belongs to another stream"),
    ],
)
def test_other_memory_is_rejected(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(MessageError, match=why):
        _received(**wrong)
    assert _descriptors() == 0


def test_huge_pages_that_may_be_missing_are_rejected() -> None:
    try:
        descriptor = os.memfd_create("flightedl-values", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    with pytest.raises(MessageError, match="not a plain memfd"):
        SharedMemory.received(descriptor, NONCE)


def test_files_and_sockets_are_rejected() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(_WHOLE)
        with pytest.raises(MessageError, match="not a plain memfd"):
            SharedMemory.received(os.dup(file.fileno()), NONCE)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(MessageError):
        SharedMemory.received(os.dup(ours.fileno()), NONCE)


def test_created_memory_cannot_shrink_or_be_written_by_others() -> None:
    own = SharedMemory.create(NONCE)
    descriptor = os.dup(own.descriptor())
    own.sent()
    own.sent()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, _WHOLE + 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, _WHOLE)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, _WHOLE)
    os.close(again)
    own.values[:3] = [1, 2, 3]
    assert SharedMemory.received(descriptor, NONCE).values[:3].tolist() == [1, 2, 3]


def test_a_failure_to_allocate_memory_is_harmless(
    server: FlightServer, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    shared_memory._device_of_memory()
    with _stream(server) as exchange:
        monkeypatch.setattr(os, "memfd_create", full)
        with pytest.raises(NotSharedError, match="Too many open files"):
            ask_to_share(exchange)
        _require_sound(exchange)


def test_memory_survives_its_owner() -> None:
    own = SharedMemory.create(NONCE)
    other = SharedMemory.received(os.dup(own.descriptor()), NONCE)
    own.values[0] = 5
    own.sent()
    values = other.values
    del own, other
    assert values[0] == 5
    assert isinstance(values, np.ndarray)
