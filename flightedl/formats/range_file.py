"""A stored file as a file object for Arrow. It is read in ranges with read-ahead, or once from beginning to end."""

from __future__ import annotations

import io

import xxhash

from flightedl.ports import Storage


class RangeFile(io.RawIOBase):
    """A stored file of known size. If ``digest`` is given, the file is read once from beginning to end, and hashed.

    Raises the storage's exceptions.
    """

    def __init__(
        self, storage: Storage, name: str, size_bytes: int, window_bytes: int, digest: xxhash.xxh3_128 | None = None
    ) -> None:
        self._storage = storage
        self._name = name
        self._size_bytes = size_bytes
        self._window_bytes = window_bytes
        self._digest = digest
        self._window = memoryview(b"")
        self._window_start = 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._digest is None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def size(self) -> int:
        return self._size_bytes

    def read(self, size: int = -1, /) -> bytes:
        rest = max(0, self._size_bytes - self._position)
        size = rest if size < 0 else min(size, rest)
        pieces = []
        while size:
            inside = self._position - self._window_start
            if not 0 <= inside < len(self._window):
                self._fetch(size)
                inside = 0
            piece = self._window[inside : inside + size]
            pieces.append(piece)
            self._position += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _fetch(self, size: int) -> None:
        length = max(size, self._window_bytes) if self._digest is None else self._window_bytes
        length = min(length, self._size_bytes - self._position)
        data = self._storage.read_range(self._name, self._position, length)
        if self._digest is not None:
            self._digest.update(data)
        self._window, self._window_start = memoryview(data), self._position
