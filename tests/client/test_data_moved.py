"""Moved folders that a dataset's URLs cannot use are refused."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.client.data.job_data import JobData
from flightedl.errors import UsageError
from flightedl.messages.declarations import DatasetDeclaration


class Files:
    def declare(self, urls: object, moved: object) -> None:
        self.declared = urls, moved


@pytest.mark.parametrize(
    ("url", "old", "is_used"),
    [
        ("/new/train/*.parquet", "/new", True),
        ("/old/a.parquet", "/old", True),
        ("/data/*/train/*.parquet", "/data/old", True),
        ("s3://bucket/old/*.parquet", "s3://bucket/old", True),
        ("/data/a.parquet", "/dta", False),
        ("/data-2/a.parquet", "/data", False),
    ],
)
def test_a_moved_folder_must_concern_the_declared_urls(url: str, old: str, *, is_used: bool) -> None:
    data: Any = object.__new__(JobData)
    data._moved, data._files = {}, Files()
    declaration = DatasetDeclaration(urls=[url], batch_size=1)
    if is_used:
        moved = {old: "/new"}
        assert data._admitted(declaration, moved).data_moved == moved
    else:
        with pytest.raises(UsageError, match="no file of the dataset is in either folder"):
            data._admitted(declaration, {old: "/elsewhere"})
