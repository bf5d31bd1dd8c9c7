"""Shared by tests of formats: tables, and files made of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flightedl.formats.registry import named_format
from tests.support.memory import MemoryFiles, MemoryStorage


class World:
    """In-memory files and an in-memory storage."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.storage = MemoryStorage()

    def put(self, url: str, content: bytes) -> str:
        self.files.contents[url] = content
        return url

    def write(self, url: str, table: pa.Table, format_name: str, rows: int = 1 << 20) -> str:
        """Write the table in a format, with ``rows`` records per chunk if the format has chunks."""
        batches = table.combine_chunks().to_batches(max_chunksize=rows)
        return self.put(url, b"".join(named_format(format_name).write(batches, table.schema)))


@pytest.fixture
def world() -> World:
    return World()
