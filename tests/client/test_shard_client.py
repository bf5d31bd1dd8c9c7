"""Requests of a client to its pserver, and what it records of their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.client.model.shard_client import ShardClient
from flightedl.client.model.values import ModelValues
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.trainer.transfers import Answer, Pull, Push
from flightedl.errors import MessageError, UnavailableError
from flightedl.messages.base import decode
from flightedl.messages.parameters import Outcome, PullTicket
from flightedl.wire.parts import ReceivedBlocks

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
