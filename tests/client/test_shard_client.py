"""What a client of a pserver records of an answer whose values turn out to be unusable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.model.shard_client import ShardClient
from flightedl.domain.trainer.transfers import Answer
from flightedl.errors import MessageError, UnavailableError
from flightedl.messages.parameters import Outcome
from flightedl.wire.parts import ReceivedBlocks


class Client(ShardClient):
    """A client of a pserver with two runs of two blocks, and nothing to talk to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._index, self._buckets, self._placement = 0, range(4, 4), 0
        self._run_of = {0: 0, 1: 0, 2: 1, 3: 1}
        self.conversation: Any = SimpleNamespace(phase="push")
        self._values: Any = SimpleNamespace(store=lambda *_: self.calls.append("store"))
        #: Raised by the check whether the values were still lent after they were copied.
        self.error: Exception | None = None

    def require_lent(self) -> None:
        self.calls.append("require")
        if self.error is not None:
            raise self.error

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
