"""Flights as numbers, and a network with one hidden layer on them.

A record becomes (see ``features``):

* *numeric*: sine and cosine of time of day and day of year, distance, weather, and a flag for missing weather;
* *one-hot*: carrier, origin, month, hour, weekday, each a row number of one matrix;
* *hashed*: tail number and destination. A string's id is a 63-bit FNV-1a hash (any string has one, no vocabulary is
  kept) and its row number the id folded into the field's buckets; two strings may share a row, which costs accuracy,
  not correctness.

The network is ``sigmoid(relu(numeric @ N + sum of one-hot rows + sum of hashed rows + c) @ v + d)``. A sum of rows is
what a product with a one-hot matrix would give, without making that matrix; its gradient adds each record's hidden
gradient to the rows it used and is zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
#: The network's arrays by name, as ``first_parameters`` makes them and ``fe.Job.parameters`` gives them back.
Parameters = Mapping[str, npt.NDArray[Any]]

#: Minutes after which an arrival counts as late.
LATE_MINUTES = 15

CARRIERS = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")
ORIGINS = ("EWR", "JFK", "LGA")

#: Rough mean and spread over the training files, so that inputs are of size one; not fitted to anything.
_SCALES = {
    "temp": (57.0, 18.0),
    "dewp": (42.0, 19.0),
    "humid": (59.0, 19.0),
    "wind_speed": (11.0, 5.6),
    "wind_gust": (25.0, 6.0),
    "precip": (0.005, 0.03),
    "pressure": (1018.0, 7.4),
    "visib": (9.3, 2.0),
}
_DISTANCE_SCALE = (1040.0, 730.0)
NUMERIC_COUNT = 4 + 1 + len(_SCALES) + 2

#: Sizes of the one-hot fields in the order of their columns; carrier and origin have one row for "another".
ONE_HOT_SIZES = (len(CARRIERS) + 1, len(ORIGINS) + 1, 12, 24, 7)
#: Buckets of tail number and destination.
HASHED_SIZES = (4096, 512)
HIDDEN_COUNT = 64


@dataclass(frozen=True, slots=True)
class Features:
    """n records as arrays."""

    #: (n, NUMERIC_COUNT) float32.
    numeric: Floats
    #: (n, fields) row numbers into the one-hot weights.
    one_hot: Ids
    #: (n, fields) row numbers into the hashed weights.
    hashed: Ids
    #: (n, fields) the ids that ``hashed`` was folded from: tail number, destination.
    ids: Ids
    #: (n,) 1.0 where the flight arrived late.
    late: Floats


def features(batch: pa.RecordBatch | pa.Table) -> Features:
    """Turn records of ``flights_data.SCHEMA`` into arrays; needs labelled ones (no null in ``arr_delay``)."""
    minute = _column(batch, "minute_of_day").astype(np.int64)
    one_hot_fields = (
        _position(batch, "carrier", CARRIERS),
        _position(batch, "origin", ORIGINS),
        _column(batch, "month").astype(np.int64) - 1,
        minute // 60,
        _column(batch, "weekday").astype(np.int64),
    )
    ids = np.stack([string_ids(batch.column("tailnum")), string_ids(batch.column("dest"))], axis=1)
    return Features(
        numeric=_numeric(batch, minute),
        one_hot=np.stack(one_hot_fields, axis=1) + _starts(ONE_HOT_SIZES),
        hashed=ids % np.array(HASHED_SIZES) + _starts(HASHED_SIZES),
        ids=ids,
        late=(_column(batch, "arr_delay") > LATE_MINUTES).astype(np.float32),
    )


def string_ids(strings: pa.Array | pa.ChunkedArray) -> Ids:
    """(n,) ids in [0, 2**63): FNV-1a (Fowler, Noll, Vo) of the UTF-8 bytes, high half folded in; null is as empty.

    The same string has the same id in every process and version. Zero bytes are skipped, since NumPy pads with them.
    """
    encoded = np.asarray(strings.cast(pa.binary()).fill_null(b"").to_numpy(zero_copy_only=False), dtype=np.bytes_)
    width = max(1, encoded.dtype.itemsize)
    letters = np.ascontiguousarray(encoded).view(np.uint8).reshape(len(encoded), width)
    hashes = np.full(len(encoded), 0xCBF29CE484222325, dtype=np.uint64)
    for column in letters.T:
        mixed = (hashes ^ column) * np.uint64(0x100000001B3)
        hashes = np.where(column != 0, mixed, hashes)
    return ((hashes ^ (hashes >> np.uint64(32))) >> np.uint64(1)).astype(np.int64)


def _numeric(batch: pa.RecordBatch | pa.Table, minute: Ids) -> Floats:
    day_angle = minute * (2 * np.pi / 1440)
    year_angle = _column(batch, "day_of_year") * (2 * np.pi / 365.25)
    distance = (_column(batch, "distance") - _DISTANCE_SCALE[0]) / _DISTANCE_SCALE[1]
    columns = [np.sin(day_angle), np.cos(day_angle), np.sin(year_angle), np.cos(year_angle), distance]
    for name, (middle, spread) in _SCALES.items():
        # Clipped: one cloudburst is 40 spreads of rain, and would own the step that it is in.
        columns.append(np.clip((_column(batch, name) - middle) / spread, -5, 5))
    # A missing gust means that none was worth noting; a missing temperature means a missing report.
    columns += [np.isnan(_column(batch, "wind_gust")), np.isnan(_column(batch, "temp"))]
    return np.nan_to_num(np.stack(columns, axis=1).astype(np.float32), nan=0.0)


def _column(batch: pa.RecordBatch | pa.Table, name: str) -> npt.NDArray[np.float32]:
    """A number column as (n,) float32, null as NaN; exact for the integers here, which are below 2**24."""
    array = batch.column(name).cast(pa.float32())
    if isinstance(array, pa.ChunkedArray):
        return np.asarray(array.to_numpy(), dtype=np.float32)
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.float32)


def _position(batch: pa.RecordBatch | pa.Table, name: str, vocabulary: tuple[str, ...]) -> Ids:
    found = pc.index_in(batch.column(name), value_set=pa.array(vocabulary)).fill_null(len(vocabulary))
    return np.asarray(found.to_numpy(), dtype=np.int64)


def _starts(sizes: tuple[int, ...]) -> Ids:
    """First row of each field where the fields' rows lie one after the other."""
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


def first_parameters(seed: int) -> dict[str, Floats]:
    """Starting values; the same seed gives the same values."""
    random = np.random.default_rng(seed)

    def normal(spread: float, *shape: int) -> Floats:
        return (spread * random.standard_normal(shape)).astype(np.float32)

    return {
        "numeric": normal(NUMERIC_COUNT**-0.5, NUMERIC_COUNT, HIDDEN_COUNT),
        "one_hot": normal(0.1, sum(ONE_HOT_SIZES), HIDDEN_COUNT),
        "hashed": normal(0.02, sum(HASHED_SIZES), HIDDEN_COUNT),
        "hidden_bias": np.zeros(HIDDEN_COUNT, np.float32),
        "output": normal(HIDDEN_COUNT**-0.5, HIDDEN_COUNT),
        "output_bias": np.zeros(1, np.float32),
    }


def probabilities(parameters: Parameters, inputs: Features) -> Floats:
    """(n,) chance that each flight arrives late."""
    return _sigmoid(_logits(parameters, _hidden(parameters, inputs)))


def loss_and_gradients(parameters: Parameters, inputs: Features) -> tuple[float, dict[str, Floats]]:
    """Mean log loss in nats of n records, and its gradient by parameter, each of the parameter's shape and dtype."""
    hidden = _hidden(parameters, inputs)
    logits = _logits(parameters, hidden)
    # log(1 + exp(z)) - y z, written so that exp never overflows.
    loss = float(np.mean(np.maximum(logits, 0) - inputs.late * logits + np.log1p(np.exp(-np.abs(logits)))))
    by_logit = (_sigmoid(logits) - inputs.late) / np.float32(len(logits))  # (n,)
    by_hidden = np.outer(by_logit, parameters["output"])  # (n, hidden)
    by_hidden *= hidden > 0
    return loss, {
        "numeric": inputs.numeric.T @ by_hidden,
        "one_hot": _sum_by_row(inputs.one_hot, by_hidden, sum(ONE_HOT_SIZES)),
        "hashed": _sum_by_row(inputs.hashed, by_hidden, sum(HASHED_SIZES)),
        "hidden_bias": by_hidden.sum(axis=0),
        "output": hidden.T @ by_logit,
        "output_bias": by_logit.sum(keepdims=True),
    }


def _hidden(parameters: Parameters, inputs: Features) -> Floats:
    total: Floats = inputs.numeric @ parameters["numeric"] + parameters["hidden_bias"]  # (n, hidden)
    for name, rows in (("one_hot", inputs.one_hot), ("hashed", inputs.hashed)):
        for field in rows.T:
            total += parameters[name][field]
    np.maximum(total, 0, out=total)
    return total


def _logits(parameters: Parameters, hidden: Floats) -> Floats:
    logits: Floats = hidden @ parameters["output"] + parameters["output_bias"]
    return logits


def _sigmoid(logits: Floats) -> Floats:
    chances: Floats = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * logits))
    return chances


def _sum_by_row(rows: Ids, values: Floats, row_count: int) -> Floats:
    """(row_count, hidden): record i's values added to each of its rows ``rows[i]``.

    The fields of ``rows`` have rows of their own, so each field is sorted and summed in runs, which is an order of
    magnitude faster than adding one row after the other (``np.add.at``).
    """
    total = np.zeros((row_count, values.shape[1]), np.float32)
    for field in rows.T:
        order = np.argsort(field, kind="stable")
        used, firsts = np.unique(field[order], return_index=True)
        total[used] = np.add.reduceat(values[order], firsts, axis=0)
    return total
