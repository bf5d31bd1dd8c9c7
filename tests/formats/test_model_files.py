"""Models in single files, read by other libraries."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import safetensors
import safetensors.numpy

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import DataError, ExhaustedError, UsageError
from flightedl.formats.model_files import WRITERS, format_of, read_model

VALUES = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.float64(2.5).reshape(()),
    "empty": np.zeros((0, 3), np.float32),
}
SPECS = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in VALUES.items() if value.size]


def written(kind: str) -> bytes:
    return b"".join(bytes(part) for part in WRITERS[kind](SPECS, ((spec, VALUES[spec.name]) for spec in SPECS)))


def test_a_model_is_written_as_safetensors(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(written("safetensors"))
    found = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    for spec in SPECS:
        np.testing.assert_array_equal(found[spec.name], VALUES[spec.name])
        assert found[spec.name].dtype == VALUES[spec.name].dtype


def test_a_model_is_written_as_npz() -> None:
    found = np.load(io.BytesIO(written("npz")), allow_pickle=False)
    for spec in SPECS:
        np.testing.assert_array_equal(found[spec.name], VALUES[spec.name])


def test_a_model_is_written_as_arrow() -> None:
    table = pa.ipc.open_file(io.BytesIO(written("arrow"))).read_all()
    for row in table.to_pylist():
        value = np.frombuffer(row["values"], row["dtype"]).reshape(row["shape"])
        np.testing.assert_array_equal(value, VALUES[row["name"]])


def test_the_name_of_a_file_determines_its_format() -> None:
    assert [format_of("a/m.npz"), format_of("m.safetensors"), format_of("m", "arrow")] == [
        "npz",
        "safetensors",
        "arrow",
    ]
    with pytest.raises(UsageError, match=r"the format of .* is unknown"):
        format_of("s3://b/model.bin")


@pytest.mark.parametrize("values", [np.float32, np.float16], ids=["master copy", "16 bits"])
def test_16_bit_parameters_are_written_as_declared(tmp_path: Path, values: type) -> None:
    master = np.array([[1.0, 1.0009, -2.5]], np.float32)
    specs = [ParameterSpec("half", (1, 3), "float16"), ParameterSpec("brain", (1, 3), "bfloat16")]
    arrays = [master.astype(values), master if values is np.float32 else master.astype(ml_dtypes.bfloat16)]

    def file(kind: str) -> bytes:
        return b"".join(bytes(part) for part in WRITERS[kind](specs, zip(specs, arrays, strict=True)))

    (tmp_path / "m.safetensors").write_bytes(file("safetensors"))
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as opened:
        assert opened.get_slice("brain").get_dtype() == "BF16"
        np.testing.assert_array_equal(opened.get_tensor("half"), master.astype(np.float16))
    npz = np.load(io.BytesIO(file("npz")), allow_pickle=False)
    assert (npz["half"].dtype, npz["brain"].dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(npz["brain"], master.astype(ml_dtypes.bfloat16).astype(np.float32))
    rows = {row["name"]: row for row in pa.ipc.open_file(io.BytesIO(file("arrow"))).read_all().to_pylist()}
    assert (rows["half"]["dtype"], rows["brain"]["dtype"]) == ("float16", "bfloat16")
    np.testing.assert_array_equal(
        np.frombuffer(rows["brain"]["values"], np.uint8).view(ml_dtypes.bfloat16), master.astype(ml_dtypes.bfloat16)[0]
    )


def test_arrays_begin_at_multiples_of_eight_bytes() -> None:
    """Readers map the file and use its arrays in place."""
    for length in range(1, 10):
        spec = ParameterSpec("w" * length, (2,))
        data = b"".join(bytes(part) for part in WRITERS["safetensors"]([spec], [(spec, np.ones(2, np.float32))]))
        (size,) = struct.unpack_from("<Q", data)
        assert size % 8 == 0
        assert read_model(data, "safetensors", "m")[spec.name].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("offsets", [(-8, 0), (4, 12), (8, 0), (0, 1 << 40)])
def test_an_array_outside_of_its_file_is_rejected(offsets: tuple[int, int]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    with pytest.raises(DataError, match=r"m\.safetensors cannot be read"):
        read_model(struct.pack("<Q", len(header)) + header + bytes(8), "safetensors", "m.safetensors")


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc failed")], ids=repr)
@pytest.mark.parametrize(("kind", "reader"), [("arrow", "pyarrow.ipc.open_file"), ("npz", "numpy.load")])
def test_a_model_for_which_memory_lacks_is_not_damaged(
    kind: str, reader: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(reader, fail)
    with pytest.raises(ExhaustedError, match=r"m\.file cannot be read: this machine has too little free memory"):
        read_model(written(kind), kind, "m.file")
