"""The recipes of docs/data-only.md for accelerate and Lightning, stopped within an epoch and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.client.data.group_dataset import GroupDataset
from tests.support.etcd_server import EtcdServer

from ..docs.pages import ROOT, examples

# Warnings of these packages are not ours to fix.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.etcd, pytest.mark.timeout(120)]

RECORDS = 600
PAGE = ROOT / "docs" / "data-only.md"


class StopError(Exception):
    pass


@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_a_recipe_resumes_within_an_epoch(
    package: str, etcd: EtcdServer, job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    x, y = np.random.default_rng(0).standard_normal((2, RECORDS))
    table = pa.table({"x": x, "y": y, "label": (x + y > 0).astype(np.int64), "id": np.arange(RECORDS)})
    pq.write_table(table, tmp_path / "data" / "all.parquet", row_group_size=20)
    monkeypatch.chdir(tmp_path)
    rounds, yielded = GroupDataset.rounds, []
    limit = 25

    def written(data: GroupDataset) -> Iterator[Any]:
        for batch in rounds(data):
            if len(yielded) == limit:
                raise StopError
            yielded.append([(data.epoch, record) for record in batch["id"].to_pylist()])
            yield batch

    monkeypatch.setattr(GroupDataset, "rounds", written)
    (block,) = examples(PAGE, package)
    with fe.local(pservers=0, job=job_name, etcd=etcd.address) as cluster:
        with pytest.raises(StopError), cluster.connect() as job:
            block.run({"fe": fe, "job": job})
        limit = -1
        # Both save after 10 and 20 batches.
        del yielded[20:]
        with cluster.connect() as job:
            block.run({"fe": fe, "job": job})
    assert Counter(each for batch in yielded for each in batch) == Counter(
        (epoch, record) for epoch in range(2) for record in range(RECORDS)
    )
