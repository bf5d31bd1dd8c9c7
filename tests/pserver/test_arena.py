"""The arena's arrays are disjoint, and memory is not reused while it has readers."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from flightedl.pserver.stores.arena import ALIGNMENT_BYTES, Arena


def test_concurrently_allocated_arrays_are_aligned_and_disjoint() -> None:
    arena = Arena()
    sizes = [1 + 977 * number % 60_000 for number in range(400)]
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda number: arena.allocate(sizes[number], np.float32, number), range(400)))
    for number, array in enumerate(arrays):
        assert (array == number).all()
        assert array.size == sizes[number]
        assert array.ctypes.data % ALIGNMENT_BYTES == 0
    assert arena.size_bytes == 4 * sum(sizes)


@pytest.mark.parametrize("size", [3, 20 << 20])
def test_former_memory_is_reused_once_it_has_no_readers(size: int) -> None:
    arena = Arena()
    first = arena.allocate(size, np.float32, 1.0)
    reader = first[:2]
    second = arena.move(first, [weakref.ref(reader)])
    other = arena.move(second, [])
    assert len({array.ctypes.data for array in (first, second, other)}) == 3
    assert reader.tolist() == [1.0, 1.0]
    del reader
    other[0] = 7.0
    third = arena.move(other, [])
    assert third.ctypes.data in {first.ctypes.data, second.ctypes.data}
    assert (third[0], third[1], third.size) == (7.0, 1.0, size)


def test_values_are_not_moved_to_memory_that_is_still_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of one size move at the same time, and the readers of one end meanwhile."""
    arena = Arena()
    first, other = arena.allocate(1000, np.float32, 1.0), arena.allocate(1000, np.float32, 2.0)
    moved: list[npt.NDArray[np.generic]] = []

    def copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        if not moved:
            moved.append(other)
            moved.append(arena.move(other, []))
        np.copyto(target, source)

    monkeypatch.setattr("flightedl.pserver.stores.arena.copy_past_cache", copy)
    assert (arena.move(first, []) == 1.0).all()
    assert (moved[1] == 2.0).all()


def test_values_are_in_shared_memory_while_there_is_room() -> None:
    line = np.zeros(4096, np.uint8)
    arena = Arena(line)
    values = arena.allocate(100, "float32", 1.0, is_values=True)
    neighbors = arena.allocate(100, "float32", 2.0, is_values=True)
    slots = arena.allocate(100, "float32")
    assert np.shares_memory(values, line)
    assert neighbors.ctypes.data == values.ctypes.data + 448, "not aligned"
    assert not np.shares_memory(slots, line)
    lent = values[:]
    moved = arena.move(values, [weakref.ref(lent)])
    assert np.shares_memory(moved, line)
    assert (moved == 1.0).all()
    big = arena.allocate(1000, "float32", 3.0, is_values=True)
    assert not np.shares_memory(big, line), "there was still room"
    assert arena.size_bytes == 400 * 3 + 4000
    assert line[:400].view(np.float32).tolist() == [1.0] * 100


def test_memory_with_several_readers_is_reused_after_the_last_one() -> None:
    arena = Arena()
    values = arena.allocate(5, np.float32, 1.0, is_values=True)
    readers = [values[:1], values[1:], values[:]]
    place, references = values.ctypes.data, [weakref.ref(reader) for reader in readers]
    arena.release(values, references, [])
    del values
    while readers:
        assert arena.allocate(5, np.float32, is_values=True).ctypes.data != place
        readers.pop()
    assert arena.allocate(5, np.float32, is_values=True).ctypes.data == place


def test_memory_of_released_blocks_is_reused_once_and_only_for_arrays_of_the_same_kind() -> None:
    arena = Arena()
    arrays = [arena.allocate(8, dtype) for dtype in (np.float32, np.float64, np.float32)]
    values = arena.allocate(8, np.float32, is_values=True)
    before = arena.size_bytes
    arena.release(values, [], arrays[:2])
    arena.release(arena.allocate(3, np.float32, is_values=True), [], arrays[2:])
    assert arena.size_bytes == 0
    places = {array.ctypes.data for array in (*arrays, values)}
    found = [arena.allocate(8, dtype, 7.0) for dtype in (np.float32, np.float64, np.float32)]
    found.append(arena.allocate(8, np.float32, is_values=True))
    assert {array.ctypes.data for array in found} == places
    assert [array.dtype for array in found] == [np.float32, np.float64, np.float32, np.float32]
    assert all((array == 7.0).all() for array in found[:3])
    assert arena.size_bytes == before
    assert arena.allocate(8, np.float32).ctypes.data not in places
