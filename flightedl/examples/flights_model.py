"""Features of flights, and a wide-and-deep network that uses them (Cheng et al. 2016).

A record becomes two things:

* *dense* inputs (see ``features``): the time of day, the distance, the weather, the weekday and the month;
* an id in each of ``FIELDS``: carrier, aircraft, origin, destination, flight number and hour. For each field, an
  embedding table has a row of 1 + ``EMBEDDING_SIZE`` numbers per id.

The network returns ``sigmoid(wide + deep)``. *Wide* is linear, like a logistic regression: the weighted dense inputs,
plus the first number of each row. *Deep* is a network with two hidden layers. Its inputs are the dense inputs and the
remaining numbers of the rows. ``loss_and_gradients`` computes the gradients explicitly in NumPy, so that the example
hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Floats = npt.NDArray[np.float32]
#: The network's arrays by name, as returned by ``first_parameters`` and ``fe.Job.parameters``.
Parameters = Mapping[str, npt.NDArray[Any]]
#: Field -> rows of n records, (n, 1 + EMBEDDING_SIZE).
Rows = Mapping[str, npt.NDArray[Any]]

#: Delay, in minutes, above which an arrival counts as late.
LATE_MINUTES = 15

#: Columns that contain ids of rows in tables.
FIELDS = ("carrier", "tailnum", "origin", "dest", "flight", "hour")
EMBEDDING_SIZE = 8

#: Approximate mean and standard deviation in the training files, for normalizing inputs.
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
#: Number of inputs: time of day (as an angle), distance, weather, missing weather, weekday and month.
DENSE_COUNT = 2 + 1 + len(_SCALES) + 2 + 7 + 12
HIDDEN_COUNTS = (128, 64)


#: Final learning rate as a fraction of the initial one.
FINAL_RATE = 0.02


@dataclass(frozen=True, slots=True)
class Training:
    """Settings for training the network, in a job or in a single process.

    Learning rates fall linearly to ``FINAL_RATE`` times their initial values, over as many updates as there are
    batches. A sync job with two trainers makes only half as many updates, so its learning rates fall only half as far.
    """

    epochs: int = 2
    batch_size: int = 1024
    #: Learning rate of the network (Adam).
    learning_rate: float = 1e-3
    #: Learning rate of the tables (row-wise Adagrad).
    row_learning_rate: float = 0.05
    #: Weight decay of updated rows, which prevents overfitting to aircraft with few flights.
    row_weight_decay: float = 1e-4
    #: Maximum absolute value of the initial values of rows.
    row_spread: float = 0.05
    seed: int = 0

    def updates(self, record_count: int) -> int:
        """Return the number of updates during which the learning rates fall."""
        return max(1, self.epochs * record_count // self.batch_size)


@dataclass(frozen=True, slots=True)
class Features:
    """Arrays of n records."""

    #: (n, DENSE_COUNT) float32.
    dense: Floats
    #: Return 1.0 for flights that arrived late and 0.0 for the others, (n,).
    late: Floats


def features(batch: pa.RecordBatch | pa.Table) -> Features:
    """Convert records of ``flights_data.SCHEMA`` to arrays. ``arr_delay`` must not contain nulls."""
    day_angle = _column(batch, "minute_of_day") * (2 * np.pi / 1440)
    distance = (_column(batch, "distance") - _DISTANCE_SCALE[0]) / _DISTANCE_SCALE[1]
    columns = [np.sin(day_angle), np.cos(day_angle), distance]
    for name, (middle, spread) in _SCALES.items():
        # Clip outliers: the rain of one cloudburst is 40 standard deviations above the mean, and would dominate a step.
        columns.append(np.clip((_column(batch, name) - middle) / spread, -5, 5))
    # A missing gust means that there were no gusts. A missing temperature means that the whole report is missing.
    columns += [np.isnan(_column(batch, "wind_gust")), np.isnan(_column(batch, "temp"))]
    columns += [_column(batch, "weekday") == day for day in range(7)]
    columns += [_column(batch, "month") == month for month in range(1, 13)]
    return Features(
        dense=np.nan_to_num(np.stack(columns, axis=1).astype(np.float32), nan=0.0),
        late=(_column(batch, "arr_delay") > LATE_MINUTES).astype(np.float32),
    )


def _column(batch: pa.RecordBatch | pa.Table, name: str) -> Floats:
    """Return a numeric column as float32, (n,), with NaN for null. The conversion is exact for integers below 2**24."""
    return np.asarray(batch.column(name).cast(pa.float32()), dtype=np.float32)


def first_parameters(seed: int) -> dict[str, Floats]:
    """Return the initial values. The same seed gives the same values."""
    random = np.random.default_rng(seed)
    first, second = HIDDEN_COUNTS
    inputs = DENSE_COUNT + len(FIELDS) * EMBEDDING_SIZE

    def normal(*shape: int, size: float = 1.0) -> Floats:
        values: Floats = (size * np.sqrt(2 / shape[0]) * random.standard_normal(shape)).astype(np.float32)
        return values

    return {
        "wide": np.zeros(DENSE_COUNT, np.float32),
        "hidden_1": normal(inputs, first),
        "bias_1": np.zeros(first, np.float32),
        "hidden_2": normal(first, second),
        "bias_2": np.zeros(second, np.float32),
        # Small values, so that the linear part is learned first. This halves the seed's effect on the result.
        "output": normal(second, size=0.1),
        "bias": np.zeros(1, np.float32),
    }


def probabilities(parameters: Parameters, rows: Rows, inputs: Features) -> Floats:
    """Return the probability that each flight arrives late, (n,)."""
    forward = _Forward(parameters, rows, inputs)
    return _sigmoid(forward.logits)


def loss_and_gradients(
    parameters: Parameters, rows: Rows, inputs: Features
) -> tuple[float, dict[str, Floats], dict[str, Floats]]:
    """Return the mean log loss of n records in nats, its gradients by parameter, and the gradients of rows by field."""
    forward = _Forward(parameters, rows, inputs)
    logits, late = forward.logits, inputs.late
    # Compute log(1 + exp(z)) - y z without overflow of exp.
    loss = float(np.mean(np.maximum(logits, 0) - late * logits + np.log1p(np.exp(-np.abs(logits)))))
    by_logit = (_sigmoid(logits) - late) / np.float32(len(late))  # (n,)
    by_second = np.outer(by_logit, parameters["output"]) * (forward.second > 0)  # (n, second)
    by_first = (by_second @ parameters["hidden_2"].T) * (forward.first > 0)  # (n, first)
    by_input = by_first @ parameters["hidden_1"][DENSE_COUNT:].T  # (n, fields * EMBEDDING_SIZE)
    gradients = {
        "wide": inputs.dense.T @ by_logit,
        "hidden_1": forward.deep.T @ by_first,
        "bias_1": by_first.sum(axis=0),
        "hidden_2": forward.first.T @ by_second,
        "bias_2": by_second.sum(axis=0),
        "output": forward.second.T @ by_logit,
        "bias": by_logit.sum(keepdims=True),
    }
    by_field = np.split(by_input, len(FIELDS), axis=1)
    by_row = {
        name: np.column_stack([by_logit, by_embedding]) for name, by_embedding in zip(FIELDS, by_field, strict=True)
    }
    return loss, gradients, by_row


class _Forward:
    """The forward pass for n records, layer by layer."""

    def __init__(self, parameters: Parameters, rows: Rows, inputs: Features) -> None:
        #: (n, DENSE_COUNT + fields * EMBEDDING_SIZE)
        self.deep = np.concatenate([inputs.dense, *(rows[name][:, 1:] for name in FIELDS)], axis=1)
        #: (n, HIDDEN_COUNTS[0]), (n, HIDDEN_COUNTS[1])
        self.first = np.maximum(self.deep @ parameters["hidden_1"] + parameters["bias_1"], 0)
        self.second = np.maximum(self.first @ parameters["hidden_2"] + parameters["bias_2"], 0)
        wide = inputs.dense @ parameters["wide"] + sum(rows[name][:, 0] for name in FIELDS)
        #: (n,)
        self.logits: Floats = wide + self.second @ parameters["output"] + parameters["bias"]


def _sigmoid(logits: Floats) -> Floats:
    chances: Floats = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * logits))
    return chances
