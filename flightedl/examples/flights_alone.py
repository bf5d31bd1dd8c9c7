"""Reference models for the flights example, trained by a single process on the same flights, without servers.

* ``logistic_regression``: scikit-learn's logistic regression on the same dense inputs and the same ids, which are
  one-hot encoded. Without a penalty it would memorize single aircraft. The penalty is the best of four (C = 1, 0.1,
  0.03, 0.01) *on the held-out days*, which also determined the network's learning rates and sizes.
* ``network_alone``: the same network in NumPy, trained with the optimizers that the pservers use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flightedl.errors import DataError
from flightedl.examples.flights_model import (
    EMBEDDING_SIZE,
    FIELDS,
    FINAL_RATE,
    Features,
    Floats,
    Training,
    features,
    first_parameters,
    loss_and_gradients,
    probabilities,
)
from flightedl.process.importing import install_command

Places = npt.NDArray[np.int64]


class Flights:
    """The flights for training and for evaluation.

    Args:
        train: Records of ``flights_data.SCHEMA``, labelled.
        held_out: Likewise.
    """

    def __init__(self, train: pa.Table, held_out: pa.Table) -> None:
        self.train, self.held_out = features(train), features(held_out)
        #: Maps each field to its distinct ids in the training data.
        self.known = {name: pc.unique(train[name].combine_chunks()) for name in FIELDS}
        #: Maps each field to an (n,) array: the position of each record's id in ``known``, or ``len(known)`` if
        #: unknown.
        self.train_places = self._places(train)
        self.held_out_places = self._places(held_out)

    def _places(self, table: pa.Table) -> dict[str, Places]:
        return {
            name: np.asarray(pc.index_in(table[name], value_set=known).fill_null(len(known)), np.int64)
            for name, known in self.known.items()
        }


def logistic_regression(flights: Flights) -> Floats:
    """Return the predicted probabilities for the held-out flights, (n,).

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise DataError(f"the flights example needs scikit-learn: {install_command('examples')}") from None
    model = LogisticRegression(C=0.03, max_iter=100)
    with warnings.catch_warnings():
        # Training until full convergence would not improve the result on the held-out days.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(_one_hot(flights, flights.train, flights.train_places), flights.train.late > 0)
    found = model.predict_proba(_one_hot(flights, flights.held_out, flights.held_out_places))
    return np.asarray(found[:, 1], np.float32)


def _one_hot(flights: Flights, inputs: Features, places: dict[str, Places]) -> Any:
    """Return a sparse matrix of the dense inputs and one column per known id."""
    from scipy import sparse

    blocks = [sparse.csr_array(inputs.dense)]
    for name, known in flights.known.items():
        rows = np.flatnonzero(places[name] < len(known))
        ones = np.ones(len(rows), np.float32)
        blocks.append(sparse.csr_array((ones, (rows, places[name][rows])), (len(inputs.late), len(known))))
    return sparse.hstack(blocks).tocsr()


def network_alone(flights: Flights, training: Training, trainers: int, report: Callable[[int, float], None]) -> Floats:
    """Train the network in this process. Return its predicted probabilities for the held-out flights, (n,).

    Args:
        flights: Data for training and evaluation.
        training: Settings of the training.
        trainers: Batches per update, as in a synchronous job with this number of trainers.
        report: Called after each update with the number of records so far and the loss.
    """
    random = np.random.default_rng(training.seed)
    size, count = training.batch_size * trainers, len(flights.train.late)
    parameters = first_parameters(training.seed)
    adam = {name: Adam(values) for name, values in parameters.items()}
    tables = {name: RowAdagrad(len(known), training, random) for name, known in flights.known.items()}
    total, done, updates = training.updates(count), 0, 0
    for _ in range(training.epochs):
        for batch in np.array_split(random.permutation(count), -(-count // size)):
            inputs = Features(flights.train.dense[batch], flights.train.late[batch])
            places = {name: flights.train_places[name][batch] for name in FIELDS}
            rows = {name: tables[name].rows[places[name]] for name in FIELDS}
            loss, gradients, by_row = loss_and_gradients(parameters, rows, inputs)
            rate = 1 + (FINAL_RATE - 1) * min(1.0, updates / total)
            for name, gradient in gradients.items():
                adam[name].update(gradient, training.learning_rate * rate)
            for name, table in tables.items():
                table.update(places[name], by_row[name], training.row_learning_rate * rate)
            updates, done = updates + 1, done + len(batch)
            report(done, loss)
    rows = {name: tables[name].rows[flights.held_out_places[name]] for name in FIELDS}
    return probabilities(parameters, rows, flights.held_out)


class Adam:
    """Adam for a single array, which it updates in place."""

    def __init__(self, values: Floats) -> None:
        self._values = values
        self._mean, self._square, self._updates = np.zeros_like(values), np.zeros_like(values), 0

    def update(self, gradient: Floats, rate: float) -> None:
        self._updates += 1
        self._mean += np.float32(0.1) * (gradient - self._mean)
        self._square += np.float32(0.001) * (gradient**2 - self._square)
        spread = np.sqrt(self._square / np.float32(1 - 0.999**self._updates)) + np.float32(1e-8)
        self._values -= np.float32(rate / (1 - 0.9**self._updates)) * self._mean / spread


class RowAdagrad:
    """A table of rows with row-wise Adagrad. Ids are 0, 1, 2, ...; all unknown ids share the last row."""

    def __init__(self, ids: int, training: Training, random: np.random.Generator) -> None:
        spread = training.row_spread
        self.rows = random.uniform(-spread, spread, (ids + 1, 1 + EMBEDDING_SIZE)).astype(np.float32)
        self._square_sums = np.zeros(ids + 1, np.float32)
        self._decay = np.float32(training.row_weight_decay)

    def update(self, ids: Places, gradients: Floats, rate: float) -> None:
        """Sum the records' gradients for each id, and apply the sums."""
        order = np.argsort(ids, kind="stable")
        used, firsts = np.unique(ids[order], return_index=True)
        summed = np.add.reduceat(gradients[order], firsts, axis=0) + self._decay * self.rows[used]
        self._square_sums[used] += (summed**2).mean(axis=1)
        self.rows[used] -= np.float32(rate) * summed / (np.sqrt(self._square_sums[used])[:, np.newaxis] + 1e-8)
