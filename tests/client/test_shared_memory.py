"""Steps with values in shared memory: the same results as by TCP, despite faults."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from flightedl.client.model import step_channel
from flightedl.client.model.step_channel import StepChannel
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import SGD, Adam
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import FlightedlError, GradientError, MessageError, OutcomeUnknownError, UnavailableError
from flightedl.messages.base import encode
from flightedl.messages.parameters import BatchIdentity, Outcome
from flightedl.process import shared_memory
from flightedl.process.socket_abort import abort_connections
from flightedl.pserver import flight
from flightedl.pserver.steps import session, step_stream
from flightedl.rpc import ClientExchange, Exchange, ServerIdentity
from flightedl.wire import shared_values
from flightedl.wire.parts import STEP_END, ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks

from .pserver_bench import CLOCK, Cluster
from .test_tables import table_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")

SHAPES = {"w": (300, 1000), "a": (7,), "c": (3, 5), "big": (2_600_000,)}
USERS = TableSpec("users", 64, SGD(lr=1.0))


@pytest.fixture(autouse=True)
def nothing_mapped_behind() -> Iterator[None]:
    yield
    _wait_for(lambda: _mapped() == 0)


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("flightedl-values")


def _wait_for(there: Callable[[], object]) -> None:
    gc.collect()
    for _ in range(500):
        if there():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def _streams(cluster: Cluster) -> list[tuple[int, int]]:
    return [service.meter.streams for service in cluster.services]


@functools.lru_cache(maxsize=8)
def _gradients(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {name: np.asarray(chance.standard_normal(shape, np.float32)) for name, shape in SHAPES.items()}


def _trained(cluster: Cluster, members: int, steps: int = 3) -> list[dict[str, np.ndarray]]:
    """Return each member's parameters after some steps."""

    def train(member: int) -> dict[str, np.ndarray]:
        trainer = trainers[member - 1]
        for number in range(steps):
            batch = number * members + member - 1
            trainer.begin(batch)
            trainer.step(batch, _gradients(batch))
        trainer.parameters.pull()
        return {name: values.copy() for name, values in trainer.parameters.items()}

    trainers = [cluster.trainer(member) for member in range(1, members + 1)]
    with ThreadPoolExecutor(members) as pool:
        return list(pool.map(train, range(1, members + 1)))


@pytest.mark.parametrize(
    ("mode", "members", "wire"),
    [
        (Async(), 1, ""),
        (Async(), 1, "bfloat16"),
        (Sync(), 2, ""),
        (Sync(deterministic=True), 2, "float16"),
        (Bounded(staleness=1), 1, ""),
    ],
)
def test_the_values_equal_those_sent_by_tcp(mode: Mode, members: int, wire: str) -> None:
    found = []
    for shares_memory in (True, False):
        with Cluster(
            SHAPES,
            mode,
            pservers=2,
            members=members,
            optimizer=Adam(lr=0.1),
            wire=wire,
            shares_memory=shares_memory,
        ) as cluster:
            found.append(_trained(cluster, members))
            expected = (members, members if shares_memory else 0)
            assert _streams(cluster) == [expected] * 2
            of_members = dict.fromkeys(range(1, members + 1), shares_memory)
            assert [service.meter.shares_memory() for service in cluster.services] == [of_members] * 2
        _wait_for(lambda cluster=cluster: _streams(cluster) == [(0, 0)] * 2)
        assert not any(service.meter.shares_memory() for service in cluster.services)
    for shared, sent in zip(*found, strict=True):
        for name, values in shared.items():
            if members == 1:
                assert np.array_equal(values, sent[name]), name
            else:
                # A round adds gradients in the order of their arrival.
                assert np.allclose(values, sent[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_values_without_room_in_memory_are_sent(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_values, "UNCONSUMED_LIMIT_BYTES", 1)
    monkeypatch.setattr(step_stream, "_PATIENCE_S", 0.0)
    with Cluster(SHAPES, mode, members=2 if isinstance(mode, Sync) else 1) as cluster:
        members = 2 if isinstance(mode, Sync) else 1
        for values in _trained(cluster, members):
            assert np.isfinite(values["big"]).all()
            assert values["big"].any()
        (shard,) = cluster.shards
        for block in shard.blocks():
            assert block.rounds.version == 3


def test_messages_of_random_sizes_arrive_with_any_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    real = shared_values.Outbox.put

    def sometimes(self: shared_values.Outbox, values: object, size_bytes: int) -> int | None:
        return real(self, values, size_bytes) if chance.random() < 0.6 else None

    monkeypatch.setattr(shared_values.Outbox, "put", sometimes)
    monkeypatch.setattr(step_channel, "_JOINED_BYTES", 100_000)
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        trainer = cluster.trainer()
        total = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for batch in range(8):
            trainer.begin(batch)
            gradients = _gradients(batch)
            trainer.step(batch, gradients)
            for name, gradient in gradients.items():
                total[name] -= gradient
                assert np.array_equal(trainer.parameters[name], total[name]), (batch, name)


@pytest.mark.parametrize("pservers", [1, 2])
def test_rows_of_tables_use_shared_memory(pservers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[int | None] = []
    real = shared_values.Outbox.put

    def noted(self: shared_values.Outbox, values: object, size_bytes: int) -> int | None:
        put.append(real(self, values, size_bytes))
        return put[-1]

    monkeypatch.setattr(shared_values.Outbox, "put", noted)
    ids = np.random.default_rng(0).integers(0, 1 << 40, 3000)
    with Cluster({"w": (4,)}, Async(), pservers=pservers, tables=[USERS]) as cluster:
        trainer = cluster.trainer()
        users = table_of(trainer, USERS, [USERS])
        gradients = np.random.default_rng(1).standard_normal((len(ids), 64)).astype(np.float32)
        trainer.begin(0)
        assert (users.pull(ids) == 0).all()
        users.push(ids, gradients)
        trainer.step(0, {})
        trainer.begin(1)
        assert np.array_equal(users.pull(ids), -gradients)
        assert all(shared == 1 for _, shared in _streams(cluster))
    # Requested ids, returned rows, and gradients, for each pserver.
    assert sum(place is not None for place in put) >= 3 * pservers


def test_small_values_are_sent_by_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed: list[object] = []
    for kind in (ClientExchange, Exchange):
        monkeypatch.setattr(kind, "write", lambda *given, **_: streamed.append(given))
    with Cluster({"w": (100,)}, Async()) as cluster:
        trainer = cluster.trainer()
        for batch in range(3):
            trainer.begin(batch)
            trainer.step(batch, {"w": np.ones(100, np.float32)})
            assert (trainer.parameters["w"] == -1 - batch).all()
        assert _streams(cluster) == [(1, 1)]
    assert not streamed


def test_an_answer_to_a_small_step_is_received_after_the_line_has_ended() -> None:
    with Cluster({"w": (100,)}, Async()) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        trainer.step(0, {"w": np.ones(100, np.float32)})
        cluster.services[0].has_lease = False
        trainer.begin(1)
        with pytest.raises(FlightedlError, match="the lease is over"):
            trainer.step(1, {"w": np.ones(100, np.float32)})
        cluster.services[0].has_lease = True
        trainer.begin(2)
        trainer.step(2, {"w": np.ones(100, np.float32)})
        assert (trainer.parameters["w"] == -2).all()


def test_connections_breaking_at_any_moment_neither_lose_nor_repeat_a_batch() -> None:
    chance = random.Random(7)
    with Cluster({"w": (100,), "b": (3,)}, Async(), pservers=2) as cluster:
        trainer = cluster.trainer()
        is_over = threading.Event()

        def strike() -> None:
            while not is_over.wait(chance.random() * 0.02):
                abort_connections(chance.choice(cluster.servers).port)

        striker = threading.Thread(target=strike)
        striker.start()
        try:
            for batch in range(40):
                trainer.begin(batch)
                trainer.step(batch, {"w": np.ones(100, np.float32), "b": np.ones(3, np.float32)})
        finally:
            is_over.set()
            striker.join()
        trainer.parameters.pull()
        assert (trainer.parameters["w"] == -40).all()
        assert (trainer.parameters["b"] == -40).all()


def test_a_step_waiting_on_a_line_continues_when_its_pserver_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster({"w": (100,)}, Async()) as cluster:
        frozen, asked = threading.Event(), threading.Event()
        real = session.StepSession.feed

        def feed(self: session.StepSession, parts: list[ReceivedBlocks]) -> object:
            asked.set()
            frozen.wait(10.0)
            return real(self, parts)

        monkeypatch.setattr(session.StepSession, "feed", feed)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(_converse, cluster, np.ones(100, np.float32), range(1), 1)
            asked.wait(5.0)
            started = time.monotonic()
            cluster.connections[0].abort_calls()
            error = ended.exception(5.0)
            assert time.monotonic() - started < 4.5
            frozen.set()
        assert isinstance(error, UnavailableError | OutcomeUnknownError), error


@pytest.mark.parametrize("who", ["the pserver does not want to", "another host", "the memory is of nobody's"])
def test_without_shared_memory_values_travel_by_tcp(
    who: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "flightedl.client.model.step_channel")
    if who == "the pserver does not want to":
        real = flight.StepStream
        monkeypatch.setattr(flight, "StepStream", lambda *a, shares_memory: real(*a, shares_memory=False))
    elif who == "another host":
        monkeypatch.setattr("flightedl.rpc.same_host.host_mark", iter(["here", "there", "here", "there"]).__next__)
    else:
        monkeypatch.setattr(shared_memory, "_MAGIC", b"no such memory..")
        monkeypatch.setattr("flightedl.rpc.same_host.uid_of_peer", lambda _: -1)
        monkeypatch.setattr("flightedl.rpc.same_host._WAIT_S", 0.1)
    with Cluster(SHAPES, Async()) as cluster:
        trainer = cluster.trainer()
        for batch in range(3):
            trainer.begin(batch)
            trainer.step(batch, _gradients(batch))
            # Another stream does not try shared memory again.
            trainer.parameters._layout.shards[0].close()
        _wait_for(lambda: _streams(cluster) == [(0, 0)])
    said = [record.getMessage() for record in caplog.records if "by TCP" in record.getMessage()]
    assert len(said) == 1, said
    assert said[0].startswith("values from and to pserver 0 are sent by TCP: ")


def test_a_stream_uses_no_memory_of_an_earlier_stream() -> None:
    with Cluster(SHAPES, Async()) as cluster:
        trainer = cluster.trainer()
        for batch in range(3):
            trainer.begin(batch)
            trainer.step(batch, _gradients(batch))
            assert _streams(cluster) == [(1, 1)]
            assert _mapped() == 4
            trainer.parameters._layout.shards[0].close()
            _wait_for(lambda: _mapped() == 0)
        assert all(block.rounds.version == 3 for block in cluster.shards[0].blocks())


def _converse(cluster: Cluster, values: np.ndarray, numbers: range, rows: int) -> None:
    channel = StepChannel(0, CLOCK, step_bytes=values.nbytes)
    header = encode(cluster.header(1, rows=rows))
    message = [OutgoingBlocks(numbers, 0, 0, values, ())]
    stream = channel.begin(cluster.connections[0], timeout_s=10.0)
    try:
        stream.send(message, header, checksums=False)
        while stream.receive()[1] != STEP_END:
            pass
    except BaseException as error:
        channel.end(stream, error)
        raise
    channel.end(stream)
    channel.close_idle()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_rejected_at_any_position(bad: float) -> None:
    with Cluster({"w": (50_000,)}, Async()) as cluster:
        values = np.ones(50_000, np.float32)
        values[49_999] = bad
        numbers = range(len(cluster.shards[0].numbers))
        with pytest.raises(GradientError, match="NaN or infinity"):
            _converse(cluster, values, numbers, len(numbers))
        with pytest.raises(MessageError, match="bytes, not"):
            _converse(cluster, values[:-1], numbers, len(numbers))
        assert not any(block.values.any() for block in cluster.shards[0].blocks())
        _converse(cluster, np.ones(50_000, np.float32), numbers, len(numbers))
        assert all((block.values == -1).all() for block in cluster.shards[0].blocks())


def _for_a_process(cluster: Cluster) -> dict[str, object]:
    """Return the arguments of a trainer in another process."""
    return {
        "address": cluster.servers[0].address,
        "identity": asdict(ServerIdentity("bench", "pserver", 0, 1)),
        "plan_hash": cluster.plan.hash,
        "blocks": [(number, cluster.plan.block(number).size) for number in cluster.shards[0].numbers],
    }


@pytest.mark.slow
def test_a_trainer_that_keeps_changing_its_gradients_corrupts_nothing() -> None:
    with Cluster({"w": (900_000,)}, Async()) as cluster:
        (shard,) = cluster.shards
        options = {**_for_a_process(cluster), "seconds": 0.7}
        trainer = subprocess.run(
            [sys.executable, "-m", "tests.client.spoiling_trainer", json.dumps(options)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert trainer.returncode == 0, trainer.stderr
        counts = json.loads(trainer.stdout)
        assert counts["taken"], counts
        assert counts["refused"], counts
        for block in shard.blocks():
            assert np.isfinite(block.values).all()
            assert (block.values == -block.rounds.version).all(), "the block changed only by accepted gradients of ones"
            assert block.rounds.version >= counts["taken"]


@contextlib.contextmanager
def _stalled(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer process that has just been lent values; kill it in the end."""
    command = [sys.executable, "-m", "tests.client.stalling_trainer", json.dumps(_for_a_process(cluster))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert int(trainer.stdout.readline()) > 0
            yield trainer
        finally:
            trainer.kill()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_memory_of_a_trainer_killed_with_lent_values_is_reclaimed() -> None:
    with Cluster({"w": (2_000_000,)}, Async(), members=2) as cluster:
        (shard,) = cluster.shards
        _push_ones(cluster, 50)
        sizes, before = [], 0
        for turn in range(2):
            with _stalled(cluster) as trainer:
                assert _mapped() == 2
                # The lent memory is left to the trainer, and the values move elsewhere.
                _push_ones(cluster, 100 + turn)
                trainer.kill()
                trainer.wait()
            _wait_for(lambda: _mapped() == 0)
            _wait_for(lambda: _streams(cluster) == [(0, 0)])
            _push_ones(cluster, 200 + turn)
            sizes.append(sum(array.nbytes for array, _ in shard.dense._arena._left))
            before = before or _descriptors()
        # Descriptors of an ending connection may still be open.
        _wait_for(lambda: _descriptors() <= before)
        assert sizes[0] > 0, "values were moved"
        assert sizes[1:] == sizes[:-1], "memory of dead trainers is reused"
        for block in shard.blocks():
            assert (block.values == -block.rounds.version).all()


@pytest.mark.slow
def test_a_trainer_frozen_with_lent_values_detects_their_loss_when_it_wakes() -> None:
    with Cluster({"w": (2_000_000,)}, Async(), members=2) as cluster, _stalled(cluster) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        trainer.send_signal(signal.SIGSTOP)
        for batch in range(3):
            _push_ones(cluster, 100 + batch)
        trainer.send_signal(signal.SIGCONT)
        print(file=trainer.stdin, flush=True)
        assert json.loads(trainer.stdout.readline()) == [[-1.0], False], (
            "the trainer sees its version, whatever others push"
        )
    with Cluster({"w": (2_000_000,)}, Async(), members=2) as cluster, _stalled(cluster) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        trainer.send_signal(signal.SIGSTOP)
        abort_connections(cluster.servers[0].port)
        _wait_for(lambda: _streams(cluster) == [(0, 0)])
        for batch in range(3):
            _push_ones(cluster, 100 + batch)
        trainer.send_signal(signal.SIGCONT)
        print(file=trainer.stdin, flush=True)
        _, is_over = json.loads(trainer.stdout.readline())
        assert is_over, "values read after the reclaim do not count"


def test_a_trainer_with_false_acknowledgments_harms_only_itself() -> None:
    with Cluster(SHAPES, Sync(), members=2) as cluster:
        one, other = cluster.trainer(1), cluster.trainer(2)
        stop, chance = False, random.Random(0)

        def lie() -> None:
            while not stop:
                held = one.parameters._layout.shards[0].channel._kept._held
                if held is not None and held._pair is not None:
                    held._pair.own._consumed[0] = chance.randrange(1 << 64)
                del held
                time.sleep(0.001)

        def train(trainer: object, member: int) -> None:
            for number in range(4):
                batch = number * 2 + member
                trainer.begin(batch)
                trainer.step(batch, _gradients(batch))

        with ThreadPoolExecutor(3) as pool:
            liar = pool.submit(lie)
            for done in [pool.submit(train, one, 0), pool.submit(train, other, 1)]:
                done.result()
            stop = True
            liar.result()
        other.parameters.pull()
        expected = sum(_gradients(batch)["big"].astype(np.float64) for batch in range(8)) / 2
        assert np.allclose(other.parameters["big"], -expected, atol=1e-4)


def _push_ones(cluster: Cluster, batch: int) -> None:
    """Push a gradient of ones to all blocks, as another trainer."""
    (shard,) = cluster.shards
    for block in shard.blocks():
        number = block.place.number
        ones = memoryview(np.ones(block.place.size, np.float32)).cast("B")
        identity = BatchIdentity(epoch=0, task=batch, batch=0, batch_count=1)
        header = cluster.header(batch, trainer="t2", generation=2, member=2, identity=identity)
        (pushed,) = shard.push(header, [ReceivedBlocks(range(number, number + 1), block.rounds.version, 0, ones)])
        assert pushed.piece.outcome == Outcome.ACCEPTED


def test_lent_values_do_not_change_until_they_are_read() -> None:
    with Cluster({"w": (2_000_000,)}, Async(), members=2) as cluster:
        (shard,) = cluster.shards
        assert shard.memory is not None
        blocks = shard.blocks()
        values = np.ones(2_000_000, np.float32)
        pieces = []
        for block in blocks:
            gradient = values[block.place.start : block.place.stop]
            pieces.append([OutgoingBlocks(range(block.place.number, block.place.number + 1), 0, 0, gradient, ())])
        channel = StepChannel(0, CLOCK, step_bytes=0)
        header = encode(cluster.header(1, rows=len(blocks)))
        lent, batch = 0, 2
        stream, said, request = channel.begin(cluster.connections[0], timeout_s=10.0), b"", header
        while said != STEP_END:
            while pieces and not stream.is_full:
                stream.send(pieces.pop(0), request, checksums=False)
                request = b""
            parts, said = stream.receive()
            for _ in range(2):
                before = [np.frombuffer(part.data, np.float32).copy() for part in parts]
                _push_ones(cluster, batch)
                batch += 1
                for part, was in zip(parts, before, strict=True):
                    now = np.frombuffer(part.data, np.float32)
                    assert np.array_equal(now, was)
                    assert len(set(now.tolist())) == 1
                    lent += np.shares_memory(now, stream._pair.store.values)
            stream.require_lent()
            del parts, part, now
        channel.end(stream)
        del stream
        channel.close_idle()
        assert lent, "values are lent without a copy"
        for block in shard.blocks():
            assert (block.values == -block.rounds.version).all()
            assert block.rounds.version == batch - 1
        _wait_for(lambda: _streams(cluster) == [(0, 0)])


def test_a_reader_of_values_lent_by_an_ended_stream_asks_again() -> None:
    with Cluster({"w": (2_000_000,)}, Async(), members=2) as cluster:
        trainer = cluster.trainer()
        real, strikes = trainer.parameters._values.store, []

        def late(blocks: range, data: memoryview) -> None:
            if len(strikes) < 3:
                # While the trainer was frozen, its stream ended and the lent values changed.
                strikes.append(blocks)
                abort_connections(cluster.servers[0].port)
                _wait_for(lambda: _streams(cluster) == [(0, 0)])
                _push_ones(cluster, 10 + len(strikes))
            real(blocks, data)

        trainer.parameters._values.store = late
        for batch in range(2):
            trainer.begin(batch)
            trainer.step(batch, {"w": np.ones(2_000_000, np.float32)})
            for number, block in trainer.parameters._blocks.items():
                values = trainer.parameters["w"][block.start : block.stop]
                assert (values == -trainer.parameters.steps.versions[number]).all(), number
        assert len(strikes) == 3
        assert all(block.rounds.version == 5 for block in cluster.shards[0].blocks())


def test_gradients_are_lent_from_the_memory_that_is_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real, places = shared_values.Outbox.put, []

    def put(self: shared_values.Outbox, values: list[memoryview], size_bytes: int) -> int | None:
        places.append(real(self, values, size_bytes))
        return places[-1]

    with Cluster({"w": (2_000_000,)}, Async(), pservers=2) as cluster:
        trainer = cluster.trainer()
        gradient = trainer.parameters.gradient_memory()["w"]
        monkeypatch.setattr(shared_values.Outbox, "put", put)
        for batch in range(3):
            gradient.fill(batch + 1)
            trainer.begin(batch)
            trainer.step(batch, {"w": gradient})
        assert (trainer.parameters["w"] == -(1 + 2 + 3)).all()
    assert len(places) >= 3 * 2 * 2
    assert all(place is not None and place >= shared_values._IN_STORE for place in places)


@pytest.mark.parametrize("wire", ["", "float16"])
def test_gradients_that_are_encoded_have_no_memory_of_their_own(wire: str) -> None:
    with Cluster({"w": (100,)}, Async(), wire=wire) as cluster:
        assert bool(cluster.trainer().parameters.gradient_memory()) == (not wire)


def test_a_gradient_that_changed_while_a_pserver_copied_it_is_never_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, changed = threading.Event(), threading.Event()
    real = step_stream.finite_copy()

    def slow(target: np.ndarray, source: np.ndarray) -> bool:
        if copying.is_set():
            return real(target, source)
        half = len(source) // 8 * 4
        target[:half] = source[:half]
        copying.set()
        assert changed.wait(10.0)
        target[half:] = source[half:]
        return True

    monkeypatch.setattr(step_stream, "finite_copy", lambda: slow)
    with Cluster({"w": (500_000,)}, Async()) as cluster, ThreadPoolExecutor(1) as pool:
        # As within a host, where a checksum would find the mixture.
        cluster.connections[0].has_checksums = False
        trainer = cluster.trainer()
        gradient = trainer.parameters.gradient_memory()["w"]
        gradient.fill(1)
        trainer.begin(0)
        real_end = step_channel.StepChannel.end

        def end(channel: StepChannel, stream: step_channel.StepStream, error: BaseException | None = None) -> None:
            real_end(channel, stream, error)
            if error is not None:
                # The step is about to be sent again, but the loop could as well go on with the next batch.
                gradient.fill(2)
                changed.set()

        monkeypatch.setattr(step_channel.StepChannel, "end", end)
        stepped = pool.submit(trainer.step, 0, {"w": gradient})
        assert copying.wait(10.0)
        abort_connections(cluster.servers[0].port)
        for line in list(cluster.connections[0]._lines._of.values()):
            line.shut()
        stepped.result(20.0)
        (shard,) = cluster.shards
        for block in shard.blocks():
            assert block.rounds.version == 1
            assert (block.values == -2).all(), "all of it is of the gradient that was sent again"


def test_a_trainer_that_acknowledges_nothing_is_lent_at_most_the_limit() -> None:
    with Cluster({"w": (6_000_000,)}, Async()) as cluster:
        (shard,) = cluster.shards
        channel = StepChannel(0, CLOCK, step_bytes=0)
        gradient = np.ones(6_000_000, np.float32)
        lent = 0
        for batch in range(1, 5):
            pieces = [
                [OutgoingBlocks(range(number, number + 1), batch - 1, 0, gradient[place.start : place.stop], ())]
                for number in shard.numbers
                for place in [cluster.plan.block(number)]
            ]
            header = encode(cluster.header(batch, rows=len(pieces)))
            stream, said = channel.begin(cluster.connections[0], timeout_s=10.0), b""
            while said != STEP_END:
                while pieces and not stream.is_full:
                    stream.send(pieces.pop(0), header, checksums=False)
                    header = b""
                parts, said = stream.receive()
                stream._pair.own._consumed[0] = 0
                for part in parts:
                    assert (np.frombuffer(part.data, np.float32) == -batch).all()
                    values = np.frombuffer(part.data, np.uint8)
                    lent += values.nbytes * np.shares_memory(values, stream._pair.store.values)
                del parts, part, values
            channel.end(stream)
            del stream
            assert lent <= shared_values.UNCONSUMED_LIMIT_BYTES + (1 << 22)
        assert lent
        channel.close_idle()
        _wait_for(lambda: _streams(cluster) == [(0, 0)])
