"""Files of snapshots of real Delta and Iceberg tables, including older snapshots, and rejected tables."""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flightedl as fe
from flightedl.errors import DataError, UsageError
from tests.support.etcd_server import EtcdServer

_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def numbers(first: int, end: int) -> pa.Table:
    return pa.table({"n": pa.array(range(first, end), pa.int64())})


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A Delta table: version 0 has the numbers below 10, version 1 those below 20, and version 2 those from 5 on."""
    deltalake = pytest.importorskip("deltalake", reason="needs the package of the extra delta: deltalake")
    path = tmp_path / "delta"
    for first in (0, 10):
        deltalake.write_deltalake(path, numbers(first, first + 10), mode="append")
    deltalake.DeltaTable(path).delete("n < 5")
    return path


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """An Iceberg table with two snapshots: the numbers below 10, and those below 20."""
    sql = pytest.importorskip("pyiceberg.catalog.sql", reason="needs the package of the extra iceberg: pyiceberg")
    catalog = sql.SqlCatalog("tests", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("lake")
    table = catalog.create_table("lake.numbers", schema=numbers(0, 1).schema)
    for first in (0, 10):
        table.append(numbers(first, first + 10))
    yield table
    catalog.close()
    # pyiceberg never ends its threads.
    concurrent = pytest.importorskip("pyiceberg.utils.concurrent").ExecutorFactory
    concurrent.get_or_create().shutdown()
    concurrent._instance = None


def read(urls: list[str], etcd: EtcdServer, job_name: str) -> Counter[int]:
    with fe.local(pservers=0, job=job_name, etcd=etcd.address) as cluster, cluster.connect() as job:
        return Counter(n for batch in job.dataset(urls, batch_size=4) for n in batch["n"].to_pylist())


@pytest.mark.etcd
@pytest.mark.parametrize(("version", "expected"), [(0, range(10)), (1, range(20)), (2, range(5, 20))])
def test_each_version_of_a_delta_table_is_read(
    version: int, expected: range, delta: Path, etcd: EtcdServer, job_name: str
) -> None:
    assert read(fe.delta_files(delta, version=version), etcd, job_name) == Counter(expected)


@pytest.mark.etcd
def test_each_snapshot_of_an_iceberg_table_is_read(iceberg: Any, etcd: EtcdServer, job_name: str) -> None:
    for number, snapshot in enumerate(iceberg.snapshots()):
        files = fe.iceberg_files(iceberg, snapshot_id=snapshot.snapshot_id)
        assert read(files, etcd, f"{job_name}-{number}") == Counter(range(10 * (number + 1)))


def test_a_delta_table_requires_an_existing_version(delta: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="version is None, but must be a whole number"):
        fe.delta_files(delta, version=None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"version 7 of the Delta table .* cannot be read"):
        fe.delta_files(delta, version=7)
    with pytest.raises(DataError, match=r"version 0 of the Delta table .*missing cannot be read"):
        fe.delta_files(tmp_path / "missing", version=0)


def test_a_delta_table_with_deletion_vectors_is_rejected(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="needs the package of the extra delta: deltalake")
    deltalake.write_deltalake(tmp_path, numbers(0, 10), configuration={"delta.enableDeletionVectors": "true"})
    (log,) = (tmp_path / "_delta_log").glob("*.json")
    added = next(line["add"] for line in map(json.loads, log.read_text().splitlines()) if "add" in line)
    # A bitmap of row 0 in the format of deletion vectors in the log.
    bitmap = struct.pack("<iqiiihhih", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 0)
    text = base64.b85encode(bitmap, pad=True).translate(bytes.maketrans(_B85, _Z85)).decode()
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(bitmap), "cardinality": 1}
    lines = [{"remove": {"path": added["path"], "dataChange": True}}, {"add": added | {"deletionVector": vector}}]
    log.with_name("00000000000000000001.json").write_text("\n".join(map(json.dumps, lines)))
    assert len(fe.delta_files(tmp_path, version=0)) == 1
    with pytest.raises(DataError, match=r"has rows that were deleted without rewriting their file \(.*\): compact it"):
        fe.delta_files(tmp_path, version=1)


def test_an_iceberg_table_requires_an_existing_snapshot(iceberg: Any) -> None:
    newest = iceberg.current_snapshot().snapshot_id
    with pytest.raises(DataError, match=f"lake.numbers has no snapshot 7: the newest one is {newest}"):
        fe.iceberg_files(iceberg, snapshot_id=7)


def test_an_iceberg_snapshot_with_delete_files_is_rejected(iceberg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # pyiceberg writes no delete files, but reads those of other writers.
    scanned = type(iceberg.scan())
    tasks = list(iceberg.scan().plan_files())
    tasks[1].delete_files.add(tasks[1].file)
    monkeypatch.setattr(scanned, "plan_files", lambda _: tasks)
    with pytest.raises(DataError, match=r"Iceberg table lake.numbers has rows that were deleted without rewriting"):
        fe.iceberg_files(iceberg, snapshot_id=iceberg.current_snapshot().snapshot_id)
