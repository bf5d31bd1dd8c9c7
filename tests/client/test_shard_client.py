"""Requests of a client to its pserver, and what it records of their answers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.client.model.shard_client import ShardClient
from flightedl.client.model.step_plan import StepPlans, at_one_version
from flightedl.client.model.values import ModelValues
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import Block, plan_shards, runs_of
from flightedl.domain.trainer.transfers import Answer, Pull, Push
from flightedl.errors import MessageError, UnavailableError
from flightedl.kernels.compiled import half_kernels
from flightedl.kernels.half_precision import shortened
from flightedl.messages.base import decode
from flightedl.messages.parameters import Outcome, PullTicket
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks

NOTHING: Any = SimpleNamespace(rows=None)


class Client(ShardClient):
    """A client of a pserver with two runs of two blocks, and nothing to talk to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._index, self._buckets, self._placement = 0, range(4, 4), 0
        self._run_of = {0: 0, 1: 0, 2: 1, 3: 1}
        self.conversation: Any = SimpleNamespace(phase="push")
        self._values: Any = SimpleNamespace(store=lambda *_: self.calls.append("store"))
        self._servers: Any = SimpleNamespace(pserver=lambda _: (5, None))
        self._sender: Any = SimpleNamespace(trainer="t", generation=1, require_final=self.require_final)
        self._steps: Any = SimpleNamespace(handle_answers=lambda *handled: self.handled.append(handled))
        self._plan_hash, self._is_newest = "p", lambda _: True
        #: Arguments of each call of ``handle_answers``.
        self.handled: list[tuple[Any, ...]] = []
        #: Raised when a pserver that lacks the final values is about to be read.
        self.not_final: Exception | None = None
        #: Raised by the check whether the values were still lent after they were copied.
        self.error: Exception | None = None

    def require_lent(self) -> None:
        self.calls.append("require")
        if self.error is not None:
            raise self.error

    def require_final(self, index: int, generation: int) -> None:
        self.calls.append("require final")
        if self.not_final is not None:
            raise self.not_final

    def _read(self, wanted: object, answers: list[Answer], *_: object) -> None:
        self.calls.append("read")
        answers.append(Answer(0, 2, Outcome.NONE, 7))

    def _push(self, push: object, answers: list[Answer], *_: object) -> None:
        answers.append(Answer(0, 2, Outcome.ACCEPTED, 7))
        raise UnavailableError("the connection broke")

    def answers(self, blocks: range) -> list[Answer]:
        found: list[Answer] = []
        stream: Any = SimpleNamespace(is_borrowing=True, require_lent=self.require_lent)
        try:
            self._store_parts([ReceivedBlocks(blocks, 7, Outcome.ACCEPTED, memoryview(bytes(8)))], found, stream)
        except UnavailableError:
            self.calls.append("failed")
        return found


def test_values_count_only_if_they_were_lent_until_they_had_been_copied() -> None:
    client = Client()
    assert client.answers(range(2)) == [Answer(0, 2, Outcome.ACCEPTED, 7)]
    assert client.calls == ["store", "require"]
    client.error = UnavailableError("the stream ended")
    assert client.answers(range(2)) == []
    assert client.calls[2:] == ["store", "require", "failed"]


@pytest.mark.parametrize("blocks", [range(1, 3), range(3, 5), range(5, 6)])
def test_values_of_blocks_that_were_not_requested_together_are_not_stored(blocks: range) -> None:
    client = Client()
    with pytest.raises(MessageError, match="does not own"):
        client.answers(blocks)
    assert not client.calls


def test_answers_that_arrived_before_an_error_count() -> None:
    client = Client()
    pushed: Any = SimpleNamespace(serial=3, batch="batch", member=1)
    client._attempt(Push((0, 1, 2, 3), {}), pushed, NOTHING)
    ((serial, index, generation, answers, error),) = client.handled
    assert (serial, index, generation, answers) == (3, 0, 5, [Answer(0, 2, Outcome.ACCEPTED, 7)])
    assert isinstance(error, UnavailableError)
    assert not client.calls, "a batch may be pushed to any process"


def test_values_are_read_outside_of_a_batch_only_from_processes_that_have_the_final_ones() -> None:
    client = Client()
    read: Any = SimpleNamespace(serial=3, batch=None, member=0)
    client._attempt(Pull({0: 0}), read, NOTHING)
    assert client.calls == ["require final", "read"]
    client.not_final = UnavailableError("the final values are lost")
    client._attempt(Pull({0: 0}), read, NOTHING)
    assert client.calls == ["require final", "read", "require final"]
    assert client.handled[1][3:] == ([], client.not_final)


def test_a_rejected_sum_of_several_blocks_names_the_batches_once() -> None:
    client, found = Client(), list[Answer]()
    data = memoryview(b"\x05\x07" * 2)
    client._store_parts([ReceivedBlocks(range(2), 7, Outcome.PARTLY_APPLIED, data)], found)
    assert found == [Answer(0, 2, Outcome.PARTLY_APPLIED, None, b"\x05\x07")]
    assert not client.calls, "bits are no values"


@pytest.mark.parametrize(
    ("placement", "wanted", "named"),
    [
        (1, {0: 3, 1: 3, 2: 3, 3: 3}, None),
        (2, {0: 3, 1: 3, 2: 3, 3: 3}, [0, 1, 2, 3]),
        (1, {0: 3, 1: 3, 2: 3}, [0, 1, 2]),
        (1, {0: 3, 1: 3, 2: 3, 3: 4}, [0, 1, 2, 3]),
    ],
)
def test_blocks_are_named_unless_the_pserver_has_exactly_those(
    placement: int, wanted: dict[int, int], named: list[int] | None
) -> None:
    """After blocks have moved, a pserver may have others than this trainer knows."""
    client, tickets = Client(), list[PullTicket]()
    client._placement = placement

    @contextlib.contextmanager
    def get(ticket: bytes, **_: object) -> Iterator[list[Any]]:
        tickets.append(decode(ticket, PullTicket))
        yield []

    connection: Any = SimpleNamespace(get=get)
    client._pull(wanted, [], 1, connection)
    assert tickets[0].blocks == named
    versions = list(wanted.values())
    assert tickets[0].min_versions == (versions if len(set(versions)) > 1 else versions[:1])


def test_rows_of_an_earlier_attempt_are_forgotten_before_the_next_one() -> None:
    """Otherwise rows of two versions could be mixed."""
    client = Client()

    def begin(*_: object, **__: object) -> None:
        client.calls.append("begin a stream")
        raise UnavailableError("gone")

    client.channel = SimpleNamespace(begin=begin)  # type: ignore[assignment]
    connection: Any = SimpleNamespace(has_checksums=False)
    rows: Any = SimpleNamespace(begin=lambda index: client.calls.append(f"forget {index}"))
    with pytest.raises(UnavailableError):
        client._exchange([[]], b"", [], rows, connection)
    assert client.calls == ["forget 0", "begin a stream"]


def test_all_parameters_of_a_stored_run_are_reported_as_changed() -> None:
    plan = plan_shards([ParameterSpec(name, (3,)) for name in "abc"], 1)
    values = ModelValues(plan, {number: plan.block(number) for number in range(3)}, None)
    values.stored = set()
    data = np.arange(6, dtype=np.float32)
    values.store(range(1, 3), memoryview(data).cast("B"))
    assert values.stored == {1, 2}
    assert [values.views[name].tolist() for name in "abc"] == [[0, 0, 0], [0, 1, 2], [3, 4, 5]]
    for size in (5, 7):
        with pytest.raises(MessageError, match="bytes arrived"):
            values.store(range(1, 3), memoryview(bytes(4 * size)))
    assert values.views["c"].tolist() == [3, 4, 5]


SIZES = {"a": (7,), "b": (3, 4), "c": (), "d": (40_000,), "e": (5,), "f": (2, 9000), "g": (1,)}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("wire", ["", "bfloat16"])
def test_each_block_is_sent_its_part_of_its_gradient(seed: int, wire: str) -> None:
    """Whatever gradients a batch has, however many pservers there are, and whichever blocks lack it."""
    chance = random.Random(seed)
    specs = [ParameterSpec(name, shape) for name, shape in SIZES.items()]
    plan = plan_shards(specs, chance.randrange(1, 4), block_bytes=1 << 15)
    runs = [runs_of(plan, index) for index in range(plan.pserver_count)]
    blocks = {number: plan.block(number) for number in range(plan.block_count)}
    values = ModelValues(plan, blocks, half_kernels(wire) if wire else None)
    names = [name for name in SIZES if chance.random() < 0.7]
    gradients = {
        name: np.random.default_rng([seed, place]).standard_normal(SIZES[name], np.float32)[...]
        for place, name in enumerate(names)
    }
    with ThreadPoolExecutor(1) as pool:
        dtypes = dict.fromkeys(SIZES, np.dtype(np.float32))
        outgoing = StepPlans(plan, runs, dtypes, wire, None, pool).sound(gradients, "batch 0")
    client = Client()
    client._values = values
    bases = {number: chance.choice([3, 3, 3, 4]) for number in blocks}
    wanted = frozenset(number for number in blocks if chance.random() < 0.7)
    for chosen in (None, wanted):
        received: dict[int, Any] = {}
        for index in range(plan.pserver_count):
            for run in outgoing.plan.pieces[index]:
                for message in client._messages_of(run, bases, chosen, outgoing):
                    for piece in message:
                        assert {bases[number] for number in piece.blocks} == {piece.version}
                        received.update(_parts_of(piece, blocks))
        assert sorted(received) == sorted(blocks if chosen is None else chosen)
        for number, part in received.items():
            block = blocks[number]
            name = specs[block.parameter].name
            if name not in gradients:
                assert part is None
                continue
            exact = np.ravel(gradients[name])[block.start : block.stop]
            assert part.tobytes() == (shortened(np.ascontiguousarray(exact), wire) if wire else exact).tobytes()


def _parts_of(piece: OutgoingBlocks, blocks: dict[int, Block]) -> Iterator[tuple[int, Any]]:
    at = 0
    for number in piece.blocks:
        size = blocks[number].size
        yield number, None if piece.values is None else piece.values[at : at + size]
        at += size
    assert piece.values is None or at == piece.values.size


def test_ranges_of_one_version_contain_each_wanted_block_once() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        bases = {number: chance.randrange(2) for number in range(5, 17)}
        wanted = None if seed % 2 else {number for number in bases if chance.random() < 0.6}
        found = at_one_version(range(5, 17), bases, wanted)
        assert [number for blocks in found for number in blocks] == sorted(bases if wanted is None else wanted)
        assert all(len({bases[number] for number in blocks}) == 1 for blocks in found)
        for before, after in itertools.pairwise(found):
            assert before.stop < after.start or bases[before[-1]] != bases[after[0]], "two ranges could be one"
