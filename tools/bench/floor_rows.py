"""Lower bound on the time of a step with an embedding table.

A step is a lookup and a push with row-wise Adagrad, over one Unix socket.

The client finds the distinct ids, requests their rows, and copies them to all positions. Then it sums the gradients of
equal ids, checks that the sums are finite, and pushes them. The server has a hash table of ids with open addressing,
and two arrays. All loops are compiled. The kind of an order is the number of a workload, which must have exactly one
table.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from .floor import listening, receive
from .tables import EPS, RATE, Group, TableWorkload, gradients_of, groups_of, steps_of
from .workers import print_line, serve

_HEADER = struct.Struct("<IIQQQ")  # kind and group, count, epoch, task, batch
_LOOKUP, _PUSH = 0, 1
_BUFFER_BYTES = 8 << 20
#: Compile with the same settings as the product's loops.
_compiled: Callable[[Any], Any] = numba.njit(nogil=True, error_model="numpy", cache=True)


@_compiled
def _hashed(number: Any) -> Any:
    bits = np.uint64(number)
    bits ^= bits >> np.uint64(33)
    bits *= np.uint64(0xFF51AFD7ED558CCD)
    return bits ^ (bits >> np.uint64(33))


@_compiled
def _rows_of(keys: Any, slots: Any, held: Any, ids: Any, out: Any) -> Any:
    """Write each id's row number to ``out``, assigning the next free rows to new ids. Return the number of rows."""
    mask = keys.size - 1
    for i in range(ids.size):
        place = np.int64(_hashed(ids[i]) & np.uint64(mask))
        while slots[place] >= 0 and keys[place] != ids[i]:
            place = (place + 1) & mask
        if slots[place] < 0:
            keys[place], slots[place] = ids[i], held
            held += 1
        out[i] = slots[place]
    return held


@_compiled
def _read(rows: Any, numbers: Any, out: Any) -> None:
    for i in range(numbers.size):
        out[i] = rows[numbers[i]]


@_compiled
def _apply(rows: Any, sums: Any, numbers: Any, gradients: Any, rate: Any, eps: Any) -> None:
    for i in range(numbers.size):
        row, square = numbers[i], np.float32(0)
        for j in range(gradients.shape[1]):
            square += gradients[i, j] * gradients[i, j]
        sums[row] += square / np.float32(gradients.shape[1])
        scale = rate / (np.sqrt(sums[row]) + eps)
        for j in range(gradients.shape[1]):
            rows[row, j] -= scale * gradients[i, j]


@_compiled
def _distinct(ids: Any, keys: Any, marks: Any, places: Any, mark: Any, out: Any, inverse: Any) -> Any:
    mask, count = keys.size - 1, 0
    for i in range(ids.size):
        place = np.int64(_hashed(ids[i]) & np.uint64(mask))
        while marks[place] == mark and keys[place] != ids[i]:
            place = (place + 1) & mask
        if marks[place] != mark:
            marks[place], keys[place], places[place], out[count] = mark, ids[i], count, ids[i]
            count += 1
        inverse[i] = places[place]
    return count


@_compiled
def _summed(gradients: Any, inverse: Any, out: Any) -> Any:
    out[:] = 0
    is_finite = True
    for i in range(inverse.size):
        for j in range(gradients.shape[1]):
            gradient = gradients[i, j]
            is_finite &= gradient - gradient == 0
            out[inverse[i], j] += gradient
    return is_finite


def _power_above(count: int) -> int:
    return 1 << (2 * count).bit_length()


def _bytes(array: Any) -> memoryview:
    return memoryview(array).cast("B")


class _Table:
    def __init__(self, group: Group, most: int) -> None:
        self._keys = np.zeros(_power_above(group.rows), np.int64)
        self._slots = np.full(self._keys.size, -1, np.int64)
        self._rows, self._sums = np.full((group.rows, group.dim), 0.01, np.float32), np.zeros(group.rows, np.float32)
        self._numbers, self._ids = np.empty(most, np.int64), np.empty(most, np.int64)
        self._gradients, self._out = np.empty((most, group.dim), np.float32), np.empty((most, group.dim), np.float32)
        every = np.arange(group.rows)
        self._held = _rows_of(self._keys, self._slots, 0, every, np.empty_like(every))

    def serve(self, connection: socket.socket, kind: int, count: int, header: bytearray) -> None:
        """Serve a message after its header has been read."""
        receive(connection, _bytes(self._ids[:count]))
        numbers = self._numbers[:count]
        self._held = _rows_of(self._keys, self._slots, self._held, self._ids[:count], numbers)
        if kind == _LOOKUP:
            _read(self._rows, numbers, self._out)
            connection.sendall(_bytes(self._out[:count]))
        else:
            receive(connection, _bytes(self._gradients[:count]))
            _apply(self._rows, self._sums, numbers, self._gradients[:count], np.float32(RATE), np.float32(EPS))
            connection.sendall(header)


def run_server(workloads: list[TableWorkload], _option: str) -> None:
    """Print the socket's path, then serve one client until it disconnects."""
    most = max(workload.ids for workload in workloads)
    tables = [_Table(group, most) for group in groups_of(workloads)]
    with listening() as (listener, path):
        print_line(path)
        connection, header = _with_buffers(listener.accept()[0]), bytearray(_HEADER.size)
        with connection:
            while receive(connection, memoryview(header)):
                kind, count = _HEADER.unpack_from(header)[:2]
                tables[kind >> 1].serve(connection, kind & 1, count, header)


def _with_buffers(connection: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return connection


def _step_of(connection: socket.socket, workload: TableWorkload, group: int) -> Callable[[], None]:
    count, dim = workload.ids, workload.group.dim
    steps, (gradients,) = steps_of(workload), gradients_of(workload)
    keys, marks, places = (np.zeros(_power_above(count), np.int64) for _ in range(3))
    distinct, inverse = np.empty(count, np.int64), np.empty(count, np.int64)
    received, sent, values = (np.empty((count, dim), np.float32) for _ in range(3))
    header, number = bytearray(_HEADER.size), 0

    def step() -> None:
        nonlocal number
        number += 1
        found = _distinct(steps[number % len(steps)][0], keys, marks, places, number, distinct, inverse)
        _HEADER.pack_into(header, 0, group << 1 | _LOOKUP, found, 0, 0, number)
        connection.sendall(header)
        connection.sendall(_bytes(distinct[:found]))
        receive(connection, _bytes(received[:found]))
        _read(received, inverse, values)
        if not _summed(gradients, inverse, sent[:found]):
            raise ValueError("gradients are not finite")
        _HEADER.pack_into(header, 0, group << 1 | _PUSH, found, 0, 0, number)
        connection.sendall(header)
        connection.sendall(_bytes(distinct[:found]))
        connection.sendall(_bytes(sent[:found]))
        receive(connection, memoryview(header))

    return step


def run_client(workloads: list[TableWorkload], path: str, _option: str) -> None:
    """Run the requested steps."""
    groups = groups_of(workloads)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        _with_buffers(connection)
        serve(*(_step_of(connection, workload, groups.index(workload.group)) for workload in workloads))
