"""A model as one file: what others read is what was written."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from flightedl.domain.parameters import ParameterSpec
from flightedl.errors import UsageError
from flightedl.formats.model_files import WRITERS, format_of

VALUES = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.float64(2.5).reshape(()),
    "empty": np.zeros((0, 3), np.float32),
}
SPECS = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in VALUES.items() if value.size]


def written(kind: str) -> bytes:
    return b"".join(bytes(part) for part in WRITERS[kind](SPECS, ((spec, VALUES[spec.name]) for spec in SPECS)))


def test_safetensors(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(written("safetensors"))
    found = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    for spec in SPECS:
        np.testing.assert_array_equal(found[spec.name], VALUES[spec.name])
        assert found[spec.name].dtype == VALUES[spec.name].dtype


def test_npz() -> None:
    found = np.load(io.BytesIO(written("npz")), allow_pickle=False)
    for spec in SPECS:
        np.testing.assert_array_equal(found[spec.name], VALUES[spec.name])


def test_arrow() -> None:
    table = pa.ipc.open_file(io.BytesIO(written("arrow"))).read_all()
    for row in table.to_pylist():
        value = np.frombuffer(row["values"], row["dtype"]).reshape(row["shape"])
        np.testing.assert_array_equal(value, VALUES[row["name"]])


def test_the_name_says_the_format() -> None:
    assert [format_of("a/m.npz"), format_of("m.safetensors"), format_of("m", "arrow")] == [
        "npz",
        "safetensors",
        "arrow",
    ]
    with pytest.raises(UsageError, match="says no format"):
        format_of("s3://b/model.bin")
