"""The dataset's index, which every rank of a group requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.errors import NotReadyError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.stored_index import index_from_pieces
from flightedl.master.tasks import Tasks


def dataset_of(path: Path, records: int) -> SimpleNamespace:
    pq.write_table(pa.table({"id": range(records)}), path, row_group_size=10)
    return SimpleNamespace(layout=TaskLayout(build_index(FsspecFiles(), DatasetSpec((str(path),))), 1))


def test_an_index_is_encoded_once_for_each_dataset(tmp_path: Path) -> None:
    state = SimpleNamespace(dataset=None)
    tasks = Tasks(state)  # type: ignore[arg-type]
    with pytest.raises(NotReadyError, match="no dataset is declared yet"):
        tasks.index_pieces()
    for records in (50, 70):
        state.dataset = dataset_of(tmp_path / f"{records}.parquet", records)
        first = tasks.index_pieces()
        assert tasks.index_pieces() is first
        assert index_from_pieces(first).content_hash() == state.dataset.layout.index.content_hash()
