"""Every Python example of the pages runs unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.adapters.storage import FsspecFiles
from flightedl.client.arguments import dataset_declaration, indexed_declaration, mixture_declaration
from flightedl.client.data.options import decoding
from flightedl.client.data.transforms import Transform
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.mixed_layout import layout_of
from flightedl.formats.reader import Decode, first_records, read_task
from flightedl.formats.recordio import RecordIO
from flightedl.formats.stored_index import load_or_build
from flightedl.messages.declarations import DatasetDeclaration
from tests.support.etcd_server import EtcdServer

from .pages import PAGES, ROOT, examples


class DatasetOfOne:
    """Dataset of a job's only trainer, checked, indexed and read by the product's code."""

    def __init__(
        self,
        declaration: DatasetDeclaration,
        decode: Decode | None = None,
        *,
        read_ahead_mb: int = 64,
        transform: Transform = lambda batch: batch,
    ) -> None:
        assert read_ahead_mb > 0
        self.declaration, self.spec = declaration, spec_of(declaration)
        self.decode, self.transform = decode, transform

    @property
    def index(self) -> ChunkIndex:
        return load_or_build(FsspecFiles(), None, self.spec).index

    @property
    def schema(self) -> pa.Schema:
        return first_records(FsspecFiles(), [self.index.chunk(0)], self.spec, 1, schema=self.index.schema).schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        declared, index = self.declaration, self.index
        layout, seed = layout_of(index, declared, declared.batch_size), declared.seed if declared.shuffle else None
        more = {"schema": index.schema, "decode": self.decode}
        for task in range(layout.task_count):
            chunks = layout.chunks_of(task)
            yield from map(self.transform, read_task(FsspecFiles(), chunks, self.spec, seed, 0, task, **more))


def data_of_one(urls: object, **given: Any) -> DatasetOfOne:
    """Return the data declared by these arguments of ``job.dataset``."""
    own = {name: given.pop(name) for name in ("read_ahead_mb", "transform") if name in given}
    decode = given.pop("decode", None)
    return DatasetOfOne(*decoding(dataset_declaration(urls=urls, **given), decode), **own)


class JobOfOne:
    """A job whose data is read in this process, without a server."""

    def dataset(self, urls: object, **given: Any) -> DatasetOfOne:
        return data_of_one(urls, **given)

    def indexed(self, n: object, get: object, **given: Any) -> DatasetOfOne:
        more = {
            "columns": (),
            "batched": False,
            "shuffle": False,
            "seed": 0,
            "stop": "first",
            "has_rounds": False,
        } | given
        declaration, by_index = indexed_declaration(n, get, **more)
        return DatasetOfOne(declaration, transform=by_index)

    def mixture(self, sources: object, *, batch_size: int, seed: int = 0, stop: str = "first") -> DatasetOfOne:
        return DatasetOfOne(mixture_declaration(sources, stop, batch_size, seed, {}))


API, INDEX = ROOT / "docs" / "api.md", ROOT / "docs" / "index.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory of the examples, with their data."""
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for number in range(2):
        x, y = random.standard_normal((2, 500))
        table = pa.table({"x": x, "y": y, "label": (x + y > 0).astype(np.int64)})
        pq.write_table(table, tmp_path / "data" / f"part-{number}.parquet", row_group_size=250)
    records = pa.record_batch({"record": [json.dumps({"n": n}).encode() for n in range(4)]})
    (tmp_path / "numbers.recordio").write_bytes(b"".join(RecordIO().write([records], records.schema)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page: Path, group: str, **given: object) -> None:
    namespace: dict[str, object] = {"__name__": "__main__", **given}
    for example in examples(page, group):
        example.run(namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_without_a_server_run(page: Path, folder: Path) -> None:
    run(page, "", fe=fe, np=np, job=JobOfOne())


def test_every_group_of_examples_is_run() -> None:
    groups = {(page.stem, example.group) for page in PAGES for example in examples(page) if example.group}
    assert groups == {
        ("api", "group"),
        ("api", "job"),
        ("api", "numbered"),
        ("api", "local"),
        ("index", "front"),
        *(("data-only", g) for g in ("before", "ddp", "ddp-weighted", "accelerate", "lightning", "torchft")),
        ("frameworks", "jax"),
        *(("local-sgd", g) for g in ("torch", "island")),
        *(("start", g) for g in ("data", "loop", "train")),
        ("frameworks", "sklearn"),
        *(("torch", g) for g in ("torch", "accelerate", "lightning")),
    }


@pytest.mark.etcd
@pytest.mark.slow
def test_examples_of_a_job_run(etcd: EtcdServer, job_name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fe.local(pservers=2, job=job_name, etcd=etcd.address):
        monkeypatch.setenv("FLIGHTEDL_ETCD", etcd.address)
        monkeypatch.setenv("FLIGHTEDL_JOB", job_name)
        run(API, "job")
    with fe.local(pservers=2, job=f"{job_name}-front", etcd=etcd.address):
        monkeypatch.setenv("FLIGHTEDL_JOB", f"{job_name}-front")
        run(INDEX, "front")
    assert {"model.npz", "model.arrow"} <= {path.name for path in folder.iterdir()}


@pytest.mark.etcd
@pytest.mark.slow
def test_examples_of_a_group_run(etcd: EtcdServer, job_name: str, folder: Path) -> None:
    with fe.local(pservers=0, job=job_name, etcd=etcd.address) as cluster, cluster.connect() as job:
        run(API, "group", job=job)
    with fe.local(pservers=0, job=f"{job_name}-numbered", etcd=etcd.address) as cluster, cluster.connect() as job:
        run(API, "numbered", job=job)


@pytest.mark.etcd
@pytest.mark.slow
def test_examples_of_a_cluster_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLIGHTEDL_FOLLOW_EVERY_S", "0.2")
    run(API, "local", np=np)
