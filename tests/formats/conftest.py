"""What the tests of formats share: tables, and files made of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flightedl.formats.registry import named_format
from flightedl.testing.memory import MemoryFiles, MemoryStorage


class World:
    """In-memory files that tests fill, and a storage."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.storage = MemoryStorage()

    def put(self, url: str, content: bytes) -> str:
        self.files.contents[url] = content
        return url

    def write(self, url: str, table: pa.Table, format_name: str, rows: int = 1 << 20) -> str:
        """The table in a format, ``rows`` to a chunk where the format has such a thing."""
        batches = table.combine_chunks().to_batches(max_chunksize=rows)
        return self.put(url, b"".join(named_format(format_name).write(batches, table.schema)))


@pytest.fixture
def world() -> World:
    return World()
