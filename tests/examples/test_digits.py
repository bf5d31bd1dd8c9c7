import builtins
import json

import numpy as np
import pyarrow as pa
import pytest

from flightedl.errors import DataError
from flightedl.examples import digits


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("digits")
    digits.write_digits(directory)
    return directory


def batches(path):
    with pa.ipc.open_file(str(path)) as reader:
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def test_every_image_is_in_exactly_one_file(data):
    files = sorted(path.name for path in data.iterdir())
    assert files == ["test.arrow", *(f"train-{number:05d}-of-00003.arrow" for number in range(3))]
    rows = {name: sum(batch.num_rows for batch in batches(data / name)) for name in files}
    assert sum(rows.values()) == 1797
    assert rows["test.arrow"] == 359
    assert sum(len(batches(data / name)) for name in files[1:]) == 15


def test_images_equal_those_of_scikit_learn(data):
    from sklearn.datasets import load_digits

    expected = {
        (image.astype(np.uint8).tobytes(), int(digit))
        for image, digit in zip(*load_digits(return_X_y=True), strict=True)
    }
    for path in data.iterdir():
        for batch in batches(path):
            images, labels = digits.images_and_digits(batch)
            got = {((i * 16).astype(np.uint8).tobytes(), int(d)) for i, d in zip(images, labels, strict=True)}
            assert got <= expected


def test_a_slice_has_the_images_of_its_records(data):
    batch = batches(data / "test.arrow")[0]
    complete, part = digits.images_and_digits(batch), digits.images_and_digits(batch.slice(10, 7))
    np.testing.assert_array_equal(complete[0][10:17], part[0])
    np.testing.assert_array_equal(complete[1][10:17], part[1])


def test_gradients_agree_with_finite_differences(data, difference):
    images, labels = digits.images_and_digits(batches(data / "test.arrow")[0])
    parameters = {name: values.astype(np.float64) for name, values in digits.first_parameters(seed=1).items()}
    exact = images.astype(np.float64)
    _, gradients = digits.loss_and_gradients(parameters, exact, labels)
    for name, gradient in gradients.items():
        for flat in np.argsort(np.abs(gradient), axis=None)[-5:]:
            position = np.unravel_index(flat, gradient.shape)
            expected = difference(
                lambda p: digits.loss_and_gradients(p, exact, labels)[0], parameters, name, position, 1e-6
            )
            assert gradient[position] == pytest.approx(expected, rel=1e-4), (name, position)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_model_recognizes_95_percent_of_the_test_images(job, tmp_path, capsys, mode):
    digits.main(["--data", str(tmp_path / "digits"), "--mode", mode])
    figures = json.loads((job.output_dir / "metrics.json").read_text())
    assert figures["test_accuracy"] >= 0.95
    assert f"test accuracy: {figures['test_accuracy']:.1%}" in capsys.readouterr().out
    with np.load(job.output_dir / "model.npz", allow_pickle=False) as saved:
        assert digits.accuracy(dict(saved), tmp_path / "digits") == figures["test_accuracy"]


def test_only_the_chosen_trainer_reports(job, tmp_path, capsys):
    job.names.add("report")
    digits.main(["--data", str(tmp_path / "digits"), "--epochs", "1"])
    assert job.model.steps == 45
    assert capsys.readouterr().out == ""
    assert list(job.output_dir.iterdir()) == []


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install .*'scikit-learn"):
        digits.write_digits(tmp_path)
