"""A job inside the test process: one trainer, parameters in memory, and Adam in NumPy.

It follows the client's contract as far as the examples use it, including rejections, so that a complete program runs in
a second. tests/launch runs the same programs with real servers.
"""

from pathlib import Path

import numpy as np
import pytest

import flightedl
from flightedl.adapters.storage import FsspecFiles
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.reader import read_task
from flightedl.formats.stored_index import load_or_build


class AdamInMemory:
    """Adam and, for tables, row-wise Adagrad. Of a schedule, only the initial rate is used."""

    def __init__(self, lr, weight_decay=0.0):
        self.lr, self.weight_decay = getattr(lr, "initial", lr), weight_decay


class TableInMemory:
    """Table with at most 8,000 rows. Ids without a row read as zeros."""

    def __init__(self, dim, optimizer):
        self.dim, self.optimizer = dim, optimizer
        self.places, self.pushed = {}, []
        self.rows, self.sums = np.zeros((8000, dim), np.float32), np.zeros(8000, np.float32)

    def pull(self, ids):
        return self.rows[[self.places.get(each, -1) for each in ids.to_pylist()]]

    def push(self, ids, gradients):
        assert gradients.shape == (len(ids), self.dim)
        assert gradients.dtype == np.float32
        assert np.isfinite(gradients).all()
        self.pushed.append(([self.places.setdefault(each, len(self.places)) for each in ids.to_pylist()], gradients))

    def step(self):
        assert len(self.places) < len(self.rows), "the last row is for ids without one"
        ((places, gradients),) = self.pushed
        self.pushed = []
        used, inverse = np.unique(places, return_inverse=True)
        total = self.optimizer.weight_decay * self.rows[used]
        np.add.at(total, inverse, gradients)
        self.sums[used] += np.mean(total**2, axis=1)
        self.rows[used] -= self.optimizer.lr * total / (np.sqrt(self.sums[used])[:, None] + 1e-8)


class ModelInMemory(dict):
    def __init__(self, initial, optimizer, tables):
        self.tables = tables
        super().__init__({name: values.copy() for name, values in initial.items()})
        self.lr = optimizer.lr
        self.steps = 0
        self.first = {name: np.zeros_like(values) for name, values in initial.items()}
        self.second = {name: np.zeros_like(values) for name, values in initial.items()}

    def step(self, gradients):
        assert gradients.keys() == self.keys()
        self.steps += 1
        for table in self.tables:
            table.step()
        for name, gradient in gradients.items():
            assert gradient.shape == self[name].shape, name
            assert gradient.dtype == self[name].dtype, name
            assert np.isfinite(gradient).all(), name
            self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
            self.second[name] = 0.999 * self.second[name] + 0.001 * gradient**2
            mean = self.first[name] / (1 - 0.9**self.steps)
            spread = np.sqrt(self.second[name] / (1 - 0.999**self.steps)) + 1e-8
            self[name] = (self[name] - self.lr * mean / spread).astype(self[name].dtype)

    def pull(self):
        pass


class DatasetInMemory:
    """Dataset that finds and reads files with the code of trainers and the master."""

    def __init__(self, spec, epochs, seed):
        self.spec, self.epochs, self.seed = spec, epochs, seed
        self.index = load_or_build(FsspecFiles(), None, spec).index
        self.schema = self.index.schema
        self.record_count = sum(self.index.chunk(number).records for number in range(len(self.index)))

    def prefetching(self, columns):
        assert set(columns.values()) <= set(self.schema.names)
        return self

    def __iter__(self):
        random = np.random.default_rng(self.seed)
        for epoch in range(self.epochs):
            count = len(self.index)
            for number in range(count) if self.seed is None else random.permutation(count).tolist():
                chunks = [self.index.chunk(number)]
                yield from read_task(FsspecFiles(), chunks, self.spec, self.seed, epoch, number, schema=self.schema)


class JobInMemory:
    def __init__(self, output_dir):
        self.output_dir = output_dir
        self.losses = []
        self.model = None
        self.tables = {}
        self.names = set()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def dataset(self, pattern, *, batch_size, epochs, shuffle, seed):
        assert epochs >= 1
        return DatasetInMemory(DatasetSpec((pattern,), batch_size=batch_size), epochs, seed if shuffle else None)

    def table(self, name, dim, *, optimizer, init, seed):
        assert self.model is None, "tables come first"
        return self.tables.setdefault(name, TableInMemory(dim, optimizer))

    def lookup(self, ids):
        return {table: table.pull(column) for table, column in ids.items()}

    def parameters(self, initial, *, optimizer, mode):
        self.model = ModelInMemory(initial, optimizer, list(self.tables.values()))
        return self.model

    def log(self, **values):
        self.losses.append(float(values["loss"]))

    def wait_for_end(self):
        pass

    def once(self, name):
        first = name not in self.names
        self.names.add(name)
        return first


@pytest.fixture
def job(monkeypatch, tmp_path: Path):
    """The job that ``fe.connect()`` returns in this test."""
    job = JobInMemory(tmp_path / "results")
    job.output_dir.mkdir()
    monkeypatch.setattr(flightedl, "connect", lambda: job, raising=False)
    for name in ("Adam", "RowAdagrad"):
        monkeypatch.setattr(flightedl, name, AdamInMemory, raising=False)
    monkeypatch.setattr(flightedl, "Sync", object, raising=False)
    monkeypatch.setattr(flightedl, "Async", object, raising=False)
    return job


def numeric_gradient(loss, parameters, name, position, step):
    """Return the central difference of ``loss(parameters)`` in one element."""
    values = []
    for sign in (1, -1):
        moved = {key: array.copy() for key, array in parameters.items()}
        moved[name][position] += sign * step
        values.append(loss(moved))
    return (values[0] - values[1]) / (2 * step)


@pytest.fixture
def difference():
    return numeric_gradient
