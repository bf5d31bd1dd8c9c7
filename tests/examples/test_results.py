import json

import numpy as np
import pytest

from flightedl.examples.results import save_arrays, save_json


def test_arrays_survive_writing_and_reading(tmp_path):
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([0.5])}
    path = save_arrays(tmp_path / "new" / "model.npz", arrays)
    with np.load(path, allow_pickle=False) as loaded:
        assert set(loaded) == {"w", "b"}
        for name, values in arrays.items():
            np.testing.assert_array_equal(loaded[name], values, strict=True)
    assert [file.name for file in path.parent.iterdir()] == ["model.npz"]


def test_json_survives_writing_and_reading(tmp_path):
    path = save_json(tmp_path / "metrics.json", {"auc": 0.75, "flights": 3})
    assert json.loads(path.read_text()) == {"auc": 0.75, "flights": 3}


def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = save_json(tmp_path / "metrics.json", {"auc": 0.75})
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_json(path, {"auc": 0.9})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
