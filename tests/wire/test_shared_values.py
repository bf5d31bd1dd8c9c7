"""Values in shared memory: their placement, how they are read, and the messages that refer to them."""

from __future__ import annotations

import random
import weakref
from collections import deque

import numpy as np
import pytest
from msgspec.structs import replace

from flightedl.errors import DamagedError, MessageError, UnavailableError
from flightedl.kernels.compiled import finite_copy
from flightedl.messages.parameters import Outcome
from flightedl.wire import shared_values
from flightedl.wire.parts import STEP_SCHEMA, Place, decode_message, place_of
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import (
    UNCONSUMED_LIMIT_BYTES,
    CopyingInbox,
    Inbox,
    Outbox,
    copy_past_cache,
    copy_to_cache,
)

from .encoded import encode_parts

VALUES = np.arange(6, dtype=np.float32)


def _memory(size: int = 4096) -> np.ndarray:
    return np.zeros(size, np.uint8)


def _pieces() -> list[OutgoingBlocks]:
    return [
        OutgoingBlocks(range(3, 5), 1 << 40, Outcome.ACCEPTED, VALUES[:4], ()),
        OutgoingBlocks(range(9, 10), 2, Outcome.STALE, None, ()),
        OutgoingBlocks(range(5, 6), 7, Outcome.NONE, VALUES[4:], ()),
    ]


def _bytes(value: int, size: int) -> memoryview:
    return memoryview(np.full(size, value, np.uint8))


def test_unread_values_are_not_overwritten() -> None:
    chance, memory = random.Random(0), _memory()
    outbox, inbox = Outbox(memory, 0), Inbox(memory)
    there: deque[tuple[int, int, int]] = deque()
    refused = 0
    for number in range(3000):
        size = chance.randrange(1, 1200)
        start = outbox.put([_bytes(number % 251, size)], size)
        if start is None:
            refused += 1
        else:
            there.append((start, size, number % 251))
        while there and (start is None or chance.random() < 0.3):
            begin, length, value = there.popleft()
            assert set(inbox.take(begin, length)) == {value}
            outbox.consumed(1)
            if chance.random() < 0.5:
                break
        assert outbox.loans.open == len(there)
        for begin, length, value in there:
            assert set(inbox.take(begin, length)) == {value}
    assert refused


def test_memory_is_reused_once_its_values_are_read() -> None:
    memory = _memory(1 << 20)
    outbox = Outbox(memory, 0)
    starts = set()
    for _ in range(50):
        starts.add(outbox.put([_bytes(1, 1000)], 1000))
        if outbox.loans.open > 2:
            outbox.consumed(1)
    assert max(starts) < 4096


def test_unread_values_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_values, "UNCONSUMED_LIMIT_BYTES", 1000)
    outbox = Outbox(_memory(), 0)
    assert outbox.put([_bytes(1, 2000)], 2000) == 0, "a single message may exceed the limit"
    assert outbox.put([_bytes(1, 1)], 1) is None
    outbox.consumed(1)
    assert outbox.put([_bytes(1, 600)], 600) == 0
    assert not outbox.has_room(600)
    assert outbox.has_room(400)
    assert Outbox(_memory(100), 0).put([_bytes(1, 101)], 101) is None


def test_acknowledging_more_than_was_sent_is_harmless() -> None:
    outbox = Outbox(_memory(), 0)
    outbox.put([_bytes(1, 10)], 10)
    outbox.consumed(10**18)
    assert outbox.loans.open == 0


def test_small_values_travel_in_the_message() -> None:
    batch, header = encode_parts(_pieces(), outbox=Outbox(_memory()))
    assert batch is not None
    assert place_of(header) is not Place.MEMORY
    assert decode_message(batch, header)[0]


@pytest.mark.parametrize("pieces", [_pieces(), _pieces()[:1]], ids=["three", "one"])
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("before", [0, 100])
def test_parts_arrive_as_they_were_sent(pieces: list[OutgoingBlocks], checksums: bool, before: int) -> None:
    memory = _memory()
    outbox = Outbox(memory, 1)
    outbox.put([_bytes(9, before)], before)
    batch, header = encode_parts(pieces, b"a request", checksums=checksums, outbox=outbox)
    assert batch is None
    assert place_of(header) is Place.MEMORY
    sent, sent_header = encode_parts(pieces, b"a request", checksums=checksums)
    expected = decode_message(sent, sent_header)[0]
    for inbox in (Inbox(memory), CopyingInbox(memory, finite_copy())):
        found, attached = decode_message(None, header, inbox=inbox)
        assert attached == b"a request"
        assert all(part.is_finite == isinstance(inbox, CopyingInbox) for part in found)
        assert [replace(part, is_finite=False) for part in found] == expected


def test_a_copy_does_not_change_with_the_memory() -> None:
    memory = _memory()
    _, header = encode_parts(_pieces(), outbox=Outbox(memory, 0))
    inbox = CopyingInbox(memory, finite_copy())
    parts = decode_message(None, header, inbox=inbox)[0]
    memory[:] = 0xFF
    assert np.array_equal(np.frombuffer(parts[0].data, np.float32), VALUES[:4])
    with pytest.raises(DamagedError):
        decode_message(None, header, inbox=inbox)[0]


def test_values_beyond_the_memory_are_rejected() -> None:
    memory = _memory()
    outbox = Outbox(memory, 0)
    outbox.put([], 2048)
    _, header = encode_parts(_pieces(), outbox=outbox)
    for inbox in (Inbox(memory[:2060]), CopyingInbox(memory[:2060], finite_copy())):
        with pytest.raises(MessageError, match="2048 to 2072 in 2060 shared bytes"):
            decode_message(None, header, inbox=inbox)[0]


def test_a_reference_to_unshared_memory_is_rejected() -> None:
    _, header = encode_parts(_pieces(), outbox=Outbox(_memory(), 0))
    with pytest.raises(MessageError, match="none is shared"):
        decode_message(None, header)[0]
    batch, plain = encode_parts(_pieces())
    with pytest.raises(MessageError, match="none is shared"):
        decode_message(batch, header, inbox=Inbox(_memory()))[0]
    with pytest.raises(MessageError, match="none arrived"):
        decode_message(None, plain, inbox=Inbox(_memory()))[0]


def test_a_truncated_header_is_rejected() -> None:
    memory = _memory()
    _, header = encode_parts(_pieces(), outbox=Outbox(memory, 0))
    for length in range(len(header)):
        with pytest.raises((MessageError, DamagedError)):
            decode_message(None, header[:length], inbox=Inbox(memory))[0]
    assert place_of(None) is Place.BATCH
    assert place_of(b"\4") is Place.BATCH


def test_copies_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_values, "_PIECE_BYTES", 7)
    source = np.arange(50, dtype=np.uint8)
    target = np.zeros(50, np.uint8)
    copy_to_cache(target, source)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("ahead", [0, 16, 511, 512, 4000])
def test_copies_are_complete_at_every_offset_within_a_page(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_values, "_PIECE_BYTES", 1000)
    real, by_cache = shared_values.copy_to_cache, []
    monkeypatch.setattr(
        shared_values, "copy_to_cache", lambda target, source: by_cache.append(1) or real(target, source)
    )
    whole = np.zeros(4 * 4096, np.uint8)
    first = -whole.ctypes.data % 4096
    source, target = whole[first : first + 2000], whole[first + 4096 + ahead :][:2000]
    source[:] = np.arange(2000) % 251
    copy_past_cache(target, source)
    assert np.array_equal(target, source)
    assert bool(by_cache) == (0 < ahead < 512)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 998])
def test_a_copy_detects_values_that_are_not_finite(dtype: str, bad: float, place: int) -> None:
    chance = np.random.default_rng(place)
    kind = np.dtype(dtype)
    # All finite bit patterns, except those of float64 whose halves look infinite: beyond 1e305, or by chance.
    source = chance.integers(0, 256, 999 * kind.itemsize, dtype=np.uint8).view(kind)
    source[~np.isfinite(source)] = 0
    if dtype == "float64":
        source.view(np.uint32)[:] &= 0xBF7FFFFF
    else:
        source[0] = np.finfo(np.float32).max
        source[1] = np.finfo(np.float32).smallest_subnormal
    target = np.empty(source.nbytes, np.uint8)
    assert finite_copy()(target, source.view(np.uint8))
    assert np.array_equal(target, source.view(np.uint8))
    source[place] = bad
    assert not finite_copy()(target, source.view(np.uint8))
    assert np.array_equal(target, source.view(np.uint8))


def test_a_copy_of_partial_words_is_not_reported_as_finite() -> None:
    target = np.empty(6, np.uint8)
    assert not finite_copy()(target, np.arange(6, dtype=np.uint8))
    assert target.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="as many bytes"):
        finite_copy()(target, np.zeros(8, np.uint8))


def test_batches_of_all_messages_have_the_same_schema() -> None:
    batch, _ = encode_parts(_pieces(), outbox=Outbox(_memory(10), 0))
    assert batch is not None
    assert batch.schema == STEP_SCHEMA


def test_values_of_the_store_are_lent_without_a_copy() -> None:
    memory, store = _memory(), np.arange(4096, dtype=np.uint16).view(np.uint8)
    outbox, inbox = Outbox(memory, 1, store), Inbox(memory, store)
    parts = [memoryview(store[1000:1100]), memoryview(store[1100:1300])]
    start = outbox.put(parts, 300)
    assert start is not None
    assert bytes(inbox.take(start, 300)) == store[1000:1300].tobytes()
    assert not memory.any(), "no value was copied"
    assert outbox.loans.open == 1
    with pytest.raises(MessageError, match="in 4096 shared bytes"):
        Inbox(memory).take(start, 300)
    with pytest.raises(MessageError, match="in 8192 shared bytes"):
        inbox.take(start, store.size - 999)
    with pytest.raises(MessageError, match="from 1000 to 5097 in 8192 shared bytes"):
        inbox.take(start, memory.size + 1)


@pytest.mark.parametrize(
    "bounds", [((1000, 1100), (1101, 1200)), ((1100, 1200), (1000, 1100)), ((0, 10), (0, 10))], ids=str
)
def test_values_that_are_not_adjacent_are_copied(bounds: tuple[tuple[int, int], ...]) -> None:
    memory, store = _memory(), np.arange(4096, dtype=np.uint16).view(np.uint8)
    outbox, inbox = Outbox(memory, 1, store), Inbox(memory, store)
    parts = [memoryview(store[first:last]) for first, last in bounds]
    size = sum(map(len, parts))
    assert outbox.put(parts, size) == 0
    assert bytes(inbox.take(0, size)) == b"".join(parts)
    assert outbox.put([_bytes(3, 10)], 10) == -(-size // 64) * 64, "the values were copied"


def test_lent_values_are_held_until_they_are_read_and_count_towards_the_limit() -> None:
    store = np.zeros(UNCONSUMED_LIMIT_BYTES + 4096, np.uint8)
    outbox = Outbox(_memory(), 1, store)
    view = store[: UNCONSUMED_LIMIT_BYTES - 10]
    assert outbox.put([memoryview(view)], view.size) is None, "the memory must have room for a copy"
    view = store[:4000]
    alive = weakref.ref(view)
    assert outbox.put([memoryview(view)], view.size) is not None
    del view
    assert alive() is not None
    outbox.consumed(1)
    assert alive() is None
    view = store[:4000]
    alive = weakref.ref(view)
    outbox.put([memoryview(view)], view.size)
    del view
    outbox.end()
    assert alive() is None


def test_values_that_reach_beyond_the_store_are_copied() -> None:
    whole, memory = np.arange(1100, dtype=np.uint16).view(np.uint8), np.zeros(4096, np.uint8)
    outbox = Outbox(memory, 1, whole[:2000])
    assert outbox.put([whole[1900:2100].data], 200) == 0
    assert (memory[:200] == whole[1900:2100]).all()


def test_gradients_are_rejected_if_they_were_revoked_while_they_were_copied() -> None:
    memory, store, is_over = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8), [False]

    def copy(target: np.ndarray, source: np.ndarray) -> bool:
        target[:] = source
        is_over[0] = True
        return False

    inbox = CopyingInbox(memory, copy, store, lambda: is_over[0])
    with pytest.raises(UnavailableError, match="may have changed"):
        inbox.take((1 << 63) + 8, 16)
    assert bytes(inbox.take(8, 16)) == bytes(16), "values in the stream's own memory are not lent"


def test_memory_is_free_again_once_the_receivers_counter_includes_its_message() -> None:
    outbox = Outbox(np.zeros(1000, np.uint8), least_bytes=10)
    values = [memoryview(bytes(400))]
    assert outbox.put(values, 400) == 0
    assert outbox.put(values, 400) == 448
    assert outbox.put(values, 400) is None
    outbox.counted(0)
    assert not outbox.has_room(400)
    outbox.counted(1)
    assert outbox.loans.open == 1
    assert outbox.put(values, 400) == 0, "the memory of the older message is free"
    # A counter that is too high, or that goes back, frees nothing that was not lent.
    outbox.counted(99)
    assert outbox.loans.open == 0
    outbox.counted(1)
    assert outbox.put(values, 400) == 0
    outbox.end()
    assert outbox.loans.open == 0
    assert outbox.loans.is_over
    assert outbox.has_room(1000)
