"""A job can start from files of ``save_model``, ``flightedl checkpoint export`` and other libraries."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import flightedl as fe
from flightedl.coordination.checkpoint_places import write_model
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import DataError, UsageError

VALUES = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([1.5, -2.0]),
    "h": np.array([1.0, 2.0], np.float16),
}
SPECS = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in VALUES.items()]


@pytest.mark.parametrize("ending", ["safetensors", "npz", "arrow"])
def test_a_saved_model_is_loaded(ending: str, tmp_path: Path) -> None:
    place = tmp_path / f"m.{ending}"
    write_model(str(place), "", SPECS, ((spec, VALUES[spec.name]) for spec in SPECS))
    found = fe.load(place)
    assert list(found) == list(VALUES)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype


def test_models_saved_by_other_libraries_are_loaded(tmp_path: Path) -> None:
    values = {"w": np.ones((2, 3), ml_dtypes.bfloat16), "n": np.arange(3)}
    safetensors.numpy.save_file(values, tmp_path / "m.safetensors", {"of": "others"})
    found = fe.load(tmp_path / "m.safetensors")
    assert found["w"].dtype == values["w"].dtype
    np.testing.assert_array_equal(found["n"], values["n"])
    np.savez(tmp_path / "m.npz", w=VALUES["w"])
    np.testing.assert_array_equal(fe.load(tmp_path / "m.npz")["w"], VALUES["w"])


@pytest.mark.parametrize("ending", ["safetensors", "npz", "arrow"])
@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 100, b"PK\x03\x04" + b"\0" * 50, b"\x10" + b"\0" * 7 + b'{"w": {"dtype":1}}']
)
def test_a_file_without_a_model_raises_one_sentence(ending: str, data: bytes, tmp_path: Path) -> None:
    place = tmp_path / f"m.{ending}"
    place.write_bytes(data)
    with pytest.raises(DataError, match=f"m.{ending} cannot be read as {ending}"):
        fe.load(place)


def test_loading_executes_no_code_of_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", w=np.array([print], dtype=object))
    with pytest.raises(DataError, match="allow_pickle"):
        fe.load(tmp_path / "m.npz")


def test_a_missing_file_raises_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*/m\.npz"):
        fe.load(tmp_path / "m.npz")
    with pytest.raises(DataError, match="has no checkpoint, and its name does not end in"):
        fe.load(tmp_path)
    for job in ("a", "b"):
        (tmp_path / job / "c-1").mkdir(parents=True)
        (tmp_path / job / "c-1" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has checkpoints of a, b: choose one, as in load"):
        fe.load(tmp_path)
    with pytest.raises(DataError, match="has no complete checkpoint of job a"):
        fe.load(tmp_path, job="a")
    with pytest.raises(DataError, match="has no complete checkpoint of job b"):
        fe.load(tmp_path / "b")
    with pytest.raises(UsageError, match="url is None"):
        fe.load(None)  # type: ignore[arg-type]
