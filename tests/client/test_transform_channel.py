"""The socket and shared memory between a trainer and its readers: nothing is cut off, changed or mixed up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from flightedl.client.data.transforms import UNDER_WAY, Channel

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with one, other:
        # A message does not fit into the socket's buffers.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield Channel(one), Channel(other)


def batch_of(value: int, count: int = 10) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array([value] * count, pa.int64())})


def test_long_texts_arrive_completely(ends: Ends) -> None:
    one, other = ends
    texts = ["é" * 500_000, "", "short", "x" * 1_000_001]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [one.send(text) for text in texts] + [one.send("last", batch_of(7))])
        found = [other.receive() for _ in range(len(texts) + 1)]
        sending.result(20.0)
    assert [text for text, _ in found] == [*texts, "last"]
    assert found[-1][1] == batch_of(7)


def test_batches_of_any_size_stay_as_they_were_received(ends: Ends) -> None:
    one, other = ends
    received = []
    sizes = [10, 100_000, 5, 300_000, 0, 100_000, 1, 700_000]
    for value, count in enumerate(sizes):
        one.send("", batch_of(value, count))
        received.append(other.receive()[1])
    for value, (count, batch) in enumerate(zip(sizes, received, strict=True)):
        assert batch is not None
        assert batch["k"].to_pylist() == [value] * count, "a later batch was written over an earlier one"


def test_batches_in_flight_do_not_share_memory(ends: Ends) -> None:
    one, other = ends
    for value in range(UNDER_WAY):
        one.send("", batch_of(value))
    for value in range(UNDER_WAY):
        batch = other.receive()[1]
        assert batch is not None
        assert batch["k"][0].as_py() == value


def test_the_end_of_the_other_process_is_noticed_within_a_message() -> None:
    one, other = socket.socketpair()
    with other:
        with one:
            one.sendall(b"\1")
        with pytest.raises(EOFError, match="has ended"):
            Channel(other).receive()
