"""Small messages on a line: in order, complete or not at all, and awaited only while the line is open."""

from __future__ import annotations

import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from flightedl.errors import MessageError
from flightedl.rpc.line import AHEAD_BYTES, LIMIT_BYTES, Line, Lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lines are offered on Linux only")

Pair = tuple[Line, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A line, and the plain socket at its other end."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = Line(mine)
    with theirs:
        yield line, theirs
    line.close()


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _both() -> tuple[Line, Line]:
    return tuple(map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)))  # type: ignore[return-value]


def test_messages_arrive_complete_and_in_order() -> None:
    here, there = _both()
    sent: list[tuple[list[bytes] | None, bytes]] = [
        ([b"ab", b"c"], b"header"),
        ([], b"no values, but a place for them"),
        (None, b"alone"),
        ([b"x" * (LIMIT_BYTES - 5)], b""),
    ]
    for values, header in sent:
        assert here.send(None if values is None else list(map(memoryview, values)), header, _never)
        found = there.receive(_never)
        assert found is not None
        assert found[1] == header
        assert (None if found[0] is None else found[0].tobytes()) == (None if values is None else b"".join(values))
    assert here.send(None, b"", _never)
    assert there.receive(_never) == (None, b"")
    here.close()
    assert there.receive(_never) is None
    assert not there.send(None, b"?", _never)
    there.close()


def test_received_values_are_aligned_for_kernels(pair: Pair) -> None:
    line, theirs = pair
    theirs.send(np.arange(5, dtype=np.float64).tobytes() + b"abc" + struct.pack("<IB", 3, 1))
    values, header = line.receive(_never) or (None, b"")
    assert header == b"abc"
    assert values is not None
    found = np.frombuffer(values, np.float64)
    assert found.flags.aligned
    assert not found.flags.writeable
    assert found.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "message",
    [
        b"abcd",
        struct.pack("<IB", 1, 1),
        b"abc" + struct.pack("<IB", 4, 1),
        b"abc" + struct.pack("<IB", 2, 2),
        b"abc" + struct.pack("<IB", 3, 0),
        b"abc" + struct.pack("<IB", 0, 0),
        b"abc" + struct.pack("<IB", 3, 3),
        b"abc" + struct.pack("<IB", (1 << 32) - 1, 1),
        b"x" * LIMIT_BYTES + struct.pack("<IB", 0, 1),
        b"x" * (2 * LIMIT_BYTES),
    ],
)
def test_malformed_messages_are_rejected(pair: Pair, message: bytes) -> None:
    line, theirs = pair
    theirs.send(message)
    with pytest.raises(MessageError):
        line.receive(_never)


def test_random_bytes_are_rejected_or_decoded_within_bounds(pair: Pair) -> None:
    line, theirs = pair
    chance = random.Random(11)
    received = 0
    for _ in range(3000):
        body = chance.randbytes(chance.choice((0, 1, 4, 5, 6, 30, 1000)))
        if chance.random() < 0.8:
            body += struct.pack("<IB", chance.choice((0, 1, len(body), len(body) + 1, 1 << 31)), chance.randrange(4))
        if not body:
            continue
        theirs.send(body)
        try:
            found = line.receive(_never)
        except MessageError:
            continue
        assert found is not None
        assert bytes(found[0] or b"") + found[1] == body[:-5]
        received += 1
    assert 100 < received < 2900, received


def test_waiting_ends_when_the_line_is_shut(pair: Pair) -> None:
    line, _ = pair
    assert line.receive(_always) is None
    sent = 0
    while line.send([memoryview(bytes(LIMIT_BYTES // 2))], b"", _always):
        sent += 1
    assert sent
    shut = threading.Timer(0.05, line.shut)
    shut.start()
    started = time.monotonic()
    assert line.receive(_never) is None
    assert time.monotonic() - started < 5.0
    shut.join()


def test_the_socket_buffer_holds_all_messages_in_flight() -> None:
    for size in (0, 100, 1000, 5000, LIMIT_BYTES - 2000):
        here, there = _both()
        left = AHEAD_BYTES
        while left >= size + 1024:
            assert here.send([memoryview(bytes(size))], b"", _always), (size, left)
            left -= size + 1024
        here.close()
        there.close()


def test_a_line_that_is_added_after_all_lines_were_shut_is_shut(pair: Pair) -> None:
    line, _ = pair
    lines = Lines()
    lines.shut()
    lines.add("a stream", line)
    assert line.receive() is None, "nothing would end the wait of its reader"


def test_a_header_outlives_the_next_message() -> None:
    here, there = _both()
    for header in (b"first", b"other"):
        assert here.send([memoryview(header * 3)], header, _never)
    first = there.receive(_never)
    assert first is not None
    assert there.receive(_never) is not None
    assert first[1] == b"first"
    here.close()
    there.close()


def test_a_message_that_is_too_long_is_not_cut_to_a_valid_one(pair: Pair) -> None:
    line, theirs = pair
    valid = bytes(LIMIT_BYTES - 5) + struct.pack("<IB", 0, 1)
    theirs.send(valid)
    assert line.receive(_never) is not None
    theirs.send(valid + b"x")
    with pytest.raises(MessageError, match=f"{LIMIT_BYTES + 1} bytes or more"):
        line.receive(_never)


def test_a_line_does_not_wait_unless_it_is_told_when_to_give_up(pair: Pair) -> None:
    line, _ = pair
    with pytest.raises(BlockingIOError):
        line.receive()
    while line.send([memoryview(bytes(LIMIT_BYTES // 2))], b"", _always):
        pass
    with pytest.raises(BlockingIOError):
        line.send([memoryview(bytes(LIMIT_BYTES // 2))], b"")


def test_the_lines_of_a_connection_are_shut_together_and_closed_one_by_one() -> None:
    lines, pairs = Lines(), [_both() for _ in range(3)]
    for number, (line, _) in enumerate(pairs):
        lines.add(number, line)
    lines.end(0)
    lines.end("a stream without a line")
    assert pairs[0][0].fileno < 0
    assert pairs[0][1].receive(_never) is None, "the peer notices"
    lines.shut()
    for line, there in pairs[1:]:
        assert line.receive(_never) is None
        assert there.receive(_never) is None
        assert line.fileno >= 0, "its own thread closes it"
    for number in (1, 2):
        lines.end(number)
        assert pairs[number][0].fileno < 0
    for _, there in pairs:
        there.close()
