"""What the loop of lines hands back to a stream's handler is complete, whatever the loop could not do itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import MessageError, NotReadyError, ReplacedError
from flightedl.messages.base import encode
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.meter import Meter
from flightedl.pserver.steps.conversation import Conversation
from flightedl.pserver.steps.session import MOMENT_S
from flightedl.pserver.steps.step_stream import BY_STREAM
from flightedl.wire.parts import STEP_END, ReceivedBlocks, decode_message, encode_message
from flightedl.wire.rows import OutgoingBlocks
from tests.support.clock import FakeClock
from tests.support.memory import MemoryStorage

from .test_snapshots import Pserver

SPECS = [ParameterSpec("w", (2,)), ParameterSpec("b", (3,))]


class Bench:
    """A conversation whose stream and line are doubles, and a pserver with two members."""

    def __init__(self, mode: Mode) -> None:
        self.pserver = Pserver(MemoryStorage(), mode, specs=SPECS, momentum=0.0)
        self.pserver.view(1, 2, first_round=0)
        self.clock = FakeClock(100.0)
        #: False if answers of the loop have no room on the line.
        self.has_room = True
        #: (outcomes, (version, values) of blocks with values, attached bytes) of each answer.
        self.answers: list[tuple[list[int], list[tuple[int, list[float]]], bytes]] = []
        self.served: list[int] = []
        self.incoming: list[Any] = []
        self.call: Any = SimpleNamespace(
            is_late=False,
            closing=threading.Event(),
            is_resting=True,
            deadline=200.0,
            check_begin=self._check_begin,
            check=lambda: None,
        )
        self.is_leased = True
        service: Any = SimpleNamespace(
            meter=Meter(), shard=lambda _: self.pserver.shard, require_lease=self._require_lease
        )
        stream: Any = SimpleNamespace(
            line=SimpleNamespace(receive=self._receive, fileno=7),
            member=0,
            decoded=decode_message,
            serves=self.served.append,
            write=self._write,
            write_word=lambda word: self.answers.append(([], [], word)),
            write_at_once=self._write_at_once,
            end_at_rest=lambda: self.answers.append(([], [], b"rest")),
        )
        lines: Any = SimpleNamespace(wake=lambda: None)
        self.conversation = Conversation(stream, service, self.clock, self.call, lines)

    def _check_begin(self) -> None:
        raise NotReadyError("the server is stopping")

    def _require_lease(self) -> None:
        if not self.is_leased:
            raise ReplacedError("the lease has expired")

    def _receive(self) -> Any:
        if not self.incoming:
            raise BlockingIOError
        return self.incoming.pop(0)

    def _write(self, pieces: list[OutgoingBlocks], attached: bytes = b"", **_: object) -> None:
        values = [(piece.version, piece.values.tolist()) for piece in pieces if piece.values is not None]
        self.answers.append(([piece.outcome for piece in pieces], values, attached))

    def _write_at_once(self, pieces: list[OutgoingBlocks], attached: bytes, **_: object) -> bool:
        if self.has_room:
            self._write(pieces, attached)
        return self.has_room

    def send(self, batch: int = 0, base: int = 0) -> None:
        """Let a small step of the first member arrive on the line."""
        header = PushHeader(
            trainer="t1",
            generation=1,
            plan_hash=self.pserver.plan.hash,
            member=1,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=1000),
            weight=1.0,
            rows=2,
            pull=True,
            wait_s=5.0,
        )
        piece = OutgoingBlocks(range(2), base, Outcome.NONE, np.ones(5, np.float32), [0, 8, 20])
        values, packed, _ = encode_message([piece], encode(header), checksums=False)
        self.incoming.append((memoryview(b"".join(values or [])), packed))

    def handed(self) -> Any:
        return self.conversation._handed.get_nowait()


@pytest.fixture
def alone() -> Bench:
    return Bench(Async())


@pytest.fixture
def together() -> Bench:
    return Bench(Sync(reduce="sum"))


def test_an_answer_without_room_on_the_line_is_sent_completely_by_the_handler(alone: Bench) -> None:
    alone.send()
    alone.has_room = False
    assert not alone.conversation.receive()
    assert not alone.call.is_resting, "the step is still in progress"
    assert alone.conversation.handle(alone.handed())
    assert alone.answers == [([Outcome.ACCEPTED], [(1, [-1.0] * 5)], STEP_END)]
    assert alone.served == [1]


@pytest.mark.parametrize("closes", ["before", "after"])
def test_a_parked_answer_without_room_is_sent_completely_by_the_handler(together: Bench, closes: str) -> None:
    """The round closes before the loop finds that there is no room, or after it."""
    together.send()
    assert together.conversation.receive()
    assert together.conversation.due_at == 100.0 + MOMENT_S
    together.has_room = False
    together.clock.advance(1.0)
    if closes == "before":
        together.pserver.push(1, 0, 2)
    assert not together.conversation.look(together.clock.now())
    assert together.conversation.due_at is None
    if closes == "after":
        together.pserver.push(1, 0, 2)
    assert together.conversation.handle(together.handed())
    outcomes = [outcome for each in together.answers for outcome in each[0]]
    assert outcomes[0] == Outcome.ACCEPTED, "the outcome of the push is lost"
    assert [value for each in together.answers for value in each[1]] == [(1, [-2.0] * 5)]
    assert together.answers[-1][2] == STEP_END


def test_a_parked_step_sends_its_outcome_after_a_moment_and_its_values_once(together: Bench) -> None:
    together.send()
    assert together.conversation.receive()
    assert not together.answers, "the values may come in a moment"
    assert not together.call.is_resting
    assert together.conversation.look(together.clock.now())
    assert not together.answers
    together.clock.advance(MOMENT_S)
    assert together.conversation.look(together.clock.now())
    assert together.answers == [([Outcome.ACCEPTED], [], b"")]
    together.pserver.push(1, 0, 2)
    assert together.conversation.look(together.clock.now())
    assert together.answers[1:] == [([Outcome.NONE], [(1, [-2.0] * 5)], STEP_END)]
    assert together.conversation.due_at is None
    assert together.call.is_resting


def test_a_parked_step_ends_at_its_deadline_without_values(together: Bench) -> None:
    together.send()
    assert together.conversation.receive()
    together.clock.advance(5.0)
    assert together.conversation.look(together.clock.now())
    assert together.answers == [([Outcome.ACCEPTED], [], STEP_END)]
    assert together.call.is_resting
    # Another step may follow.
    together.send(batch=1)
    assert together.conversation.receive()


def test_a_parked_step_is_handed_back_when_the_line_ends(together: Bench) -> None:
    together.send()
    assert together.conversation.receive()
    together.incoming.append(None)
    assert not together.conversation.receive()
    assert together.conversation.due_at is None
    together.pserver.push(1, 0, 2)
    assert together.conversation.handle(together.handed())
    assert together.answers[-1][1:] == ([(1, [-2.0] * 5)], STEP_END)
    # Without a parked step, the end of the line is the end of the stream.
    together.incoming.append(None)
    assert not together.conversation.receive()
    assert not together.conversation.handle(together.handed())
    assert together.answers[-1][2] == b"rest"


def test_a_step_that_arrives_while_another_one_is_parked_is_an_error(together: Bench) -> None:
    together.send()
    together.send(batch=1)
    assert together.conversation.receive()
    with pytest.raises(MessageError, match="before the previous one has ended"):
        together.conversation.receive()


@pytest.mark.parametrize("how", ["large", "moving"])
def test_a_step_that_the_loop_does_not_serve_is_handed_back_unchanged(
    alone: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "large":
        monkeypatch.setattr("flightedl.pserver.steps.conversation.SMALL_STEP_BYTES", 19)
    else:
        alone.pserver.shard.approach(range(7, 8))
    alone.send()
    assert not alone.conversation.receive()
    assert alone.pserver.shard.meter.messages == 0
    assert alone.conversation.handle(alone.handed())
    assert alone.answers == [([Outcome.ACCEPTED], [(1, [-1.0] * 5)], STEP_END)]
    assert alone.served == [1]
    assert alone.conversation._is_small == (how == "moving")


def test_a_step_that_is_announced_on_the_line_is_read_from_the_stream(alone: Bench) -> None:
    alone.send()
    following: list[Any] = [decode_message(*alone.incoming.pop()), None]
    alone.conversation._stream.request_by_stream = lambda: following.pop(0)  # type: ignore[method-assign]
    for goes_on in (True, False):
        alone.incoming.append(BY_STREAM)
        assert not alone.conversation.receive()
        assert alone.conversation.handle(alone.handed()) == goes_on
    assert alone.answers == [([Outcome.ACCEPTED], [(1, [-1.0] * 5)], STEP_END)]


def test_a_parked_step_is_looked_for_when_blocks_change(together: Bench) -> None:
    woken: list[bool] = []
    together.conversation._lines = SimpleNamespace(wake=lambda: woken.append(True))  # type: ignore[assignment]
    together.send()
    assert together.conversation.receive()
    assert not woken
    together.pserver.push(1, 0, 2)
    assert woken


def test_the_time_of_a_step_is_measured_from_its_first_message(together: Bench) -> None:
    seconds: list[float] = []
    for meter in (together.pserver.shard.meter, together.conversation._service.meter):
        meter.step = seconds.append  # type: ignore[method-assign]
    together.send()
    assert together.conversation.receive()
    together.clock.advance(0.5)
    together.pserver.push(1, 0, 2)
    assert together.conversation.look(together.clock.now())
    assert seconds == [0.5]


@pytest.mark.parametrize("trouble", ["stopping", "no lease"])
def test_a_step_that_may_not_be_served_changes_nothing(alone: Bench, trouble: str) -> None:
    if trouble == "stopping":
        alone.call.closing.set()
    else:
        alone.is_leased = False
    alone.send()
    with pytest.raises((NotReadyError, ReplacedError)):
        alone.conversation.receive()
    data = memoryview(np.ones(5, np.float32)).cast("B")
    alone.send()
    _, request = decode_message(*alone.incoming.pop())
    with pytest.raises((NotReadyError, ReplacedError)):
        alone.conversation.handle(([ReceivedBlocks(range(2), 0, 0, data)], request))
    assert alone.pserver.shard.meter.messages == 0
    assert not alone.answers


class Lines:
    """A loop that hands a conversation back at once, or never."""

    def __init__(self, handed: object) -> None:
        self.handed = handed
        self.events: list[str] = []

    def enter(self) -> None:
        self.events.append("enter")

    def leave(self) -> None:
        self.events.append("leave")

    def lend(self, conversation: Conversation) -> None:
        self.events.append("lend")
        if self.handed is not Ellipsis:
            conversation._handed.put(self.handed)  # type: ignore[arg-type]

    def take_back(self, _: Conversation) -> None:
        self.events.append("take back")


def lent_to(bench: Bench, lines: Any) -> Conversation:
    conversation = bench.conversation
    conversation._lines, conversation._is_small = lines, True
    conversation._stream.is_over = lambda: True  # type: ignore[method-assign]
    return conversation


def test_a_stream_rests_only_while_it_is_lent(alone: Bench) -> None:
    """A server that stops does not wait for resting streams, and would cut off a step in progress."""
    alone.send()
    _, request = decode_message(*alone.incoming.pop())
    data = memoryview(np.ones(5, np.float32)).cast("B")
    lines = Lines(([ReceivedBlocks(range(2), 0, 0, data)], request))
    conversation, write, resting = lent_to(alone, lines), alone._write, list[bool]()
    conversation._stream.write = lambda *args, **more: (resting.append(alone.call.is_resting), write(*args, **more))
    alone.call.is_resting = False
    assert conversation.serve_one()
    assert resting == [False]
    assert lines.events == ["lend"]


def test_a_conversation_is_taken_back_when_its_stream_is_over(alone: Bench) -> None:
    lines = Lines(...)
    conversation = lent_to(alone, lines)
    conversation.serve()
    assert lines.events == ["enter", "lend", "take back", "leave"]
    assert alone.answers == [([], [], b"rest")]


def test_an_error_of_the_loop_is_raised_and_the_stream_leaves_the_loop(alone: Bench) -> None:
    lines = Lines(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        lent_to(alone, lines).serve()
    assert lines.events == ["enter", "lend", "leave"]


def test_a_step_by_stream_may_wait_for_its_round_as_long_as_the_trainer_allows(together: Bench) -> None:
    """Here the clock is real, because the handler waits."""
    together.conversation._clock = SystemClock()
    together.call.deadline = SystemClock().now() + 60.0
    together.send()
    parts, request = decode_message(*together.incoming.pop())
    timer = threading.Timer(0.05, lambda: together.pserver.push(1, 0, 2))
    timer.start()
    assert together.conversation.handle((parts, request))
    timer.join()
    assert [value for each in together.answers for value in each[1]] == [(1, [-2.0] * 5)]
    assert next(outcome for each in together.answers for outcome in each[0]) == Outcome.ACCEPTED
    assert [each[2] for each in together.answers][-1] == STEP_END
