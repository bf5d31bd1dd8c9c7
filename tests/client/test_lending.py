"""``model.lend_to``: values shown in shared memory instead of being copied."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from flightedl.client.model.lending import Lending
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.errors import UsageError
from flightedl.process.socket_abort import abort_connections
from flightedl.pserver.stores.interface import distinct
from flightedl.wire.shared_values import UNCONSUMED_LIMIT_BYTES

from .pserver_bench import Cluster, Trainer

SHAPES = {"w": (300, 1000), "a": (7,), "scale": (), "big": (2_600_000,)}


class Device:
    """A copy of the model on another device."""

    def __init__(self) -> None:
        self.arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
        self.calls = 0

    def put(self, name: str, start: int, values: np.ndarray) -> None:
        assert not values.flags.writeable
        assert values.dtype == np.float32
        self.arrays[name].reshape(-1)[start : start + values.size] = values
        self.calls += 1

    def forget(self) -> None:
        for array in self.arrays.values():
            array.fill(np.nan)


@functools.lru_cache(maxsize=8)
def _gradients(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {name: np.asarray(chance.standard_normal(shape, np.float32)) for name, shape in SHAPES.items()}


def _step(trainer: Trainer, batch: int) -> None:
    trainer.begin(batch)
    trainer.step(batch, _gradients(batch))


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "tcp"])
@pytest.mark.parametrize("wire", ["", "bfloat16"])
def test_shown_values_equal_those_of_other_trainers(mode: Mode, shares_memory: bool, wire: str) -> None:
    with Cluster(SHAPES, mode, pservers=2, wire=wire, shares_memory=shares_memory) as cluster:
        trainer = cluster.trainer()
        device = Device()
        trainer.parameters.lend_to(device.put)
        assert all((array == 0).all() for array in device.arrays.values()), "the present values are shown at once"
        for batch in range(3):
            device.forget()
            _step(trainer, batch)
            other = cluster.trainer()
            for name, array in device.arrays.items():
                assert np.array_equal(array, other.parameters[name]), (batch, name)
        device.forget()
        trainer.parameters.pull(["a"])
        assert np.isfinite(device.arrays["a"]).all()
        assert np.isnan(device.arrays["big"]).all()
        assert set(trainer.parameters.versions.values()) == {3}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_nothing_is_copied_on_one_host() -> None:
    # All answers of a step may be unread at the same time: the pserver does not wait for any of them.
    shape = (UNCONSUMED_LIMIT_BYTES // 4,)
    with Cluster({"big": shape}, Async()) as cluster:
        trainer = cluster.trainer()
        lent: list[bool] = []
        trainer.parameters.lend_to(lambda _name, _start, values: lent.append(_lies_in_pservers_memory(values)))
        lent.clear()
        trainer.begin(0)
        trainer.step(0, {"big": np.ones(shape, np.float32)})
        assert lent
        assert all(lent)


def _lies_in_pservers_memory(values: np.ndarray) -> bool:
    place = values.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        for line in maps:
            first, _, last = line.split()[0].partition("-")
            if int(first, 16) <= place < int(last, 16):
                return "flightedl-model" in line and "r--s" in line
    return False


def test_the_trainer_keeps_no_copy() -> None:
    with Cluster(SHAPES, Async()) as cluster:
        trainer = cluster.trainer()
        parameters = trainer.parameters
        parameters.lend_to(Device().put)
        assert list(parameters) == list(SHAPES)
        assert len(parameters) == 4
        assert "w" in parameters
        assert "v" not in parameters
        assert parameters._values._line.size == 0
        for ask in (lambda: parameters["w"], lambda: parameters.tree, lambda: parameters.listen(trainer)):
            with pytest.raises(UsageError, match=r"model\.lend_to"):
                ask()
        with pytest.raises(KeyError, match="no parameter 'v'"):
            parameters["v"]


KEEPERS: dict[str, Callable[[list[object], np.ndarray], object]] = {
    "itself": lambda kept, values: kept.append(values),
    "a part": lambda kept, values: kept.append(values[1:2]),
    "its bytes": lambda kept, values: kept.append(memoryview(values)),
    "its shape": lambda kept, values: kept.append(values.reshape(1, -1).T),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_function_that_keeps_lent_values_raises_and_the_batch_counts(kind: str) -> None:
    with Cluster(SHAPES, Async()) as cluster:
        trainer, kept = cluster.trainer(), []
        device = Device()
        is_keeping = False

        def show(name: str, start: int, values: np.ndarray) -> None:
            device.put(name, start, values)
            if is_keeping and name == "big":
                KEEPERS[kind](kept, values)

        trainer.parameters.lend_to(show)
        is_keeping = True
        trainer.begin(0)
        with pytest.raises(UsageError, match="values of 'big' were kept, but were only lent"):
            trainer.parameters.step(_gradients(0))
        is_keeping = False
        kept.clear()
        assert set(trainer.parameters.versions.values()) == {1}, "the batch counts"
        trainer.parameters.pull()
        _step(trainer, 1)
        other = cluster.trainer()
        assert all(np.array_equal(device.arrays[name], other.parameters[name]) for name in SHAPES)
        assert all(block.rounds.version == 2 for block in cluster.shards[0].blocks())


def test_after_an_error_nothing_is_shown_until_it_has_been_raised() -> None:
    shown: list[str] = []

    def show(name: str, _: int, values: np.ndarray) -> None:
        shown.append(name)
        if name == "bad":
            raise ZeroDivisionError

    lending = Lending(show)
    for name in ("good", "bad", "later", "bad"):
        lending.show(name, 0, memoryview(bytes(4)), np.dtype(np.float32))
    assert shown == ["good", "bad"]
    with pytest.raises(ZeroDivisionError):
        lending.require()
    lending.require()
    lending.show("good", 0, memoryview(bytes(4)), np.dtype(np.float32))
    assert shown == ["good", "bad", "good"]


def test_an_error_of_the_function_is_raised_after_the_step() -> None:
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        trainer = cluster.trainer()
        trainer.parameters.lend_to(lambda *_: None)

        def fail(*_: object) -> None:
            raise ZeroDivisionError("no device")

        trainer.parameters._values.lending._show = fail
        trainer.begin(0)
        with pytest.raises(ZeroDivisionError, match="no device"):
            trainer.parameters.step(_gradients(0))
        assert all(block.rounds.version == 1 for shard in cluster.shards for block in shard.blocks())
        with pytest.raises(ZeroDivisionError, match="no device"):
            cluster.trainer().parameters.lend_to(fail)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_values_reclaimed_while_they_are_shown_are_shown_again(mode: Mode) -> None:
    with Cluster(SHAPES, mode) as cluster:
        trainer, device, strikes = cluster.trainer(), Device(), []

        def late(name: str, start: int, values: np.ndarray) -> None:
            if name == "big" and len(strikes) < 3:
                # While the trainer was frozen, its stream ended and the values changed.
                strikes.append(name)
                abort_connections(cluster.servers[0].port)
                while cluster.services[0].meter.streams != (0, 0):
                    time.sleep(0.01)
                for span in distinct(cluster.shards[0].dense.spans):
                    with span.lock:
                        span.detach_for_write()[:] -= 1
            device.put(name, start, values)

        trainer.parameters.lend_to(device.put)
        trainer.parameters._values.lending._show = late
        for batch in range(2):
            trainer.begin(batch)
            trainer.step(batch, {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
        trainer.parameters.pull()
        assert len(strikes) == 3
        for name, array in device.arrays.items():
            assert (array == -5).all(), name
