"""Every order in which blocks are frozen, sent and staged while the intent, the view and the blocks change."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

from flightedl.domain.consistency.modes import Async
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.moving.server import State
from flightedl.domain.moving.values import Acknowledged, Intent, Move, StoredIntent, Transaction
from flightedl.errors import NotReadyError, StalePlacementError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import Placement
from flightedl.messages.moving import MoveHeader, MoveReply
from flightedl.messages.parameters import Outcome
from flightedl.pserver.moving import mover, parcels
from flightedl.pserver.moving.departure import Departure
from flightedl.pserver.moving.mover import Mover
from flightedl.pserver.moving.parcels import Digest
from flightedl.pserver.moving.peers import Reading
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores import held
from tests.pserver.test_snapshots import Pserver
from tests.support.memory import MemoryStorage
from tests.support.planting import bug, rewrites, swaps

from .scheduler import Run, VirtualClock, explore, finds

SPECS = [ParameterSpec("w", (2,)), ParameterSpec("b", (3,))]
#: Generations of pserver 0, which sends blocks, and of pserver 1.
SOURCE, DESTINATION = 1, 2


class Peers:
    """Stored placement and intent, and the messages that one pserver sends."""

    def __init__(self) -> None:
        self.revision = 10
        self.placement = Placement(version=1, pservers=2, blocks=((0, len(SPECS)),))
        self.intent: StoredIntent | None = None
        #: (kind, attempt) of each upload.
        self.uploads: list[tuple[str, int]] = []
        self.acknowledged: list[Acknowledged] = []

    def intend(self, block: int) -> int:
        """Store an intent to move a block, and return the attempt."""
        self.revision += 1
        generations = ((0, SOURCE), (1, DESTINATION))
        self.intent = StoredIntent(self.revision, Intent(1, (Move(block, 0, 1),), generations))
        return self.revision

    def commit(self, acknowledged: Acknowledged) -> None:
        self.revision += 1
        blocks = range(acknowledged.block, acknowledged.block + 1)
        self.placement, self.intent = self.placement.moved([(blocks, 1)], acknowledged.attempt), None

    def end(self, attempt: int) -> None:
        if self.intent is not None and self.intent.attempt == attempt:
            self.revision += 1
            self.intent = None

    def read(self, index: int) -> Reading:
        return Reading(self.revision, self.placement, self.intent, (SOURCE, DESTINATION)[index])

    def give_up(self, transaction: Transaction) -> None:
        self.end(transaction.attempt)

    def acknowledge(self, acknowledged: Acknowledged, _generation: int) -> None:
        self.acknowledged.append(acknowledged)

    def pserver(self, _index: int, _generation: int) -> Peers:
        return self

    def put(self, header: bytes, _schema: object, batches: Iterable[object], **_: object) -> bytes:
        sent = decode(header, MoveHeader)
        list(batches)
        self.uploads.append((sent.kind, sent.attempt))
        return encode(MoveReply())


def pserver_with(blocks: range) -> Pserver:
    made = Pserver(MemoryStorage(), Async(), specs=SPECS, momentum=0.0)
    for number in range(len(SPECS)):
        if number not in blocks:
            unit = range(number, number + 1)
            assert made.shard.freeze(unit)
            made.shard.drop(unit)
            made.shard.thaw(unit)
    return made


def mover_of(index: int, pserver: Pserver, peers: Peers) -> Mover:
    reach: Any = peers
    state = State(tuple(pserver.shard.numbers), 1, 1)
    return Mover(index, (SOURCE, DESTINATION)[index], state, pserver.shard, reach, VirtualClock(), _ignore, _fail)


def _ignore(_placement: Placement) -> None:
    pass


def _fail(reason: str) -> None:
    raise AssertionError(reason)


def freezing(run: Run) -> None:
    """Frozen blocks do not change. They contain the gradients of exactly those batches that are marked as applied."""
    pserver = pserver_with(range(2))
    frozen: list[object] = []
    answered: set[int] = set()

    def marks() -> list[set[int]]:
        applied = pserver.shard.applied()
        return [{batch for batch in range(2) if applied.has(number, Batch(0, 0, batch))} for number in range(2)]

    def freeze() -> None:
        if pserver.shard.freeze(range(2)):
            frozen.append((pserver.state(), marks()))

    def push() -> None:
        for batch, places in enumerate((range(1, 2), range(2))):
            with contextlib.suppress(StalePlacementError):
                pserver.push_some(batch, places)
                answered.add(batch)

    run.threads(freeze, push)
    assert frozen == [(pserver.state(), marks())], "a push has changed frozen blocks"
    assert [-float(block.values.mean()) for block in pserver.shard.blocks()] == [len(each) for each in marks()]
    assert answered <= marks()[1], "a gradient is lost"


def test_frozen_blocks_do_not_change() -> None:
    assert explore(freezing, [held]).is_complete


def test_a_push_between_the_check_and_the_flag_is_found() -> None:
    body = inspect.getsource(Shard.freeze)
    start, middle, end = (body.index(each) for each in ("if numbers not in", "with contextlib", "if is_frozen"))
    flag, check = body[start:middle], body[middle:end]
    flaw = bug(
        "a push is applied after the check that no round is open, and before pushes are rejected",
        swaps("pserver.shard:Shard.freeze", flag + check, (check + flag).replace("\n" + " " * 8, "\n")),
    )
    finds(flaw, freezing, [held])


def sending(run: Run) -> None:
    """A block whose attempt has ended is not frozen, and the next attempt's block is sent."""
    pserver, peers = pserver_with(range(2)), Peers()
    moves = mover_of(0, pserver, peers)
    attempts: list[int] = []

    def change() -> None:
        attempts.append(peers.intend(0))
        moves.look()
        peers.end(attempts[0])
        moves.look()
        attempts.append(peers.intend(1))
        moves.look()

    run.threads(change)
    run.sleep(10.0)
    assert ("last", attempts[1]) in peers.uploads, "a unit is not sent"
    assert peers.intent is None, "an attempt that takes too long is not given up"
    with moves.no_unit_is_pinned():
        outcomes = {piece.outcome for piece in pserver.push(0)}
    assert outcomes == {Outcome.ACCEPTED}


def test_each_unit_is_sent_and_none_stays_frozen() -> None:
    assert explore(sending, [mover]).is_complete


def test_a_unit_that_is_frozen_after_its_attempt_has_ended_is_found() -> None:
    flaw = bug(
        "the end of an attempt is not noticed between two steps",
        swaps(
            "pserver.moving.mover:Mover._freeze",
            "self._is_closed or not self._core.is_leaving(leaving.copy)",
            "self._is_closed",
        ),
    )
    finds(flaw, sending, [mover])


def test_a_unit_that_waits_for_a_thread_about_to_end_is_found() -> None:
    flaw = bug(
        "a thread that is about to end is taken for one that goes on",
        rewrites(
            "pserver.moving.mover:Mover._send_all", 'del self._threads["leaving"]\n                    return', "return"
        ),
    )
    finds(flaw, sending, [mover])


def messages_of(attempt: int) -> list[tuple[MoveHeader, list[Any]]]:
    """Return the uploads that move block 0."""
    source, unit, digest = pserver_with(range(2)), range(1), Digest()
    departure = Departure(source.shard, unit)
    assert source.shard.freeze(unit)
    content = [parcels.encode(parcel) for parcel in departure.rest()]
    departure.end()
    for batch, metadata in content:
        digest.update(batch.columns, metadata)

    def header(kind: Any, number: int = 0, digest: str = "") -> MoveHeader:
        return MoveHeader(
            kind=kind, attempt=attempt, block=0, count=1, generation=DESTINATION, number=number, digest=digest
        )

    return [(header("copy"), []), (header("update", 1), content), (header("last", 1, digest.text), [])]


def acknowledging(messages: list[tuple[MoveHeader, list[Any]]], run: Run) -> None:
    """A unit that was acknowledged can be adopted, whatever views arrive."""
    target, peers = pserver_with(range(1, 2)), Peers()
    assert peers.intend(0) == messages[0][0].attempt
    peers.placement = peers.placement.moved([(range(1, 2), 1)], 1)
    moves = mover_of(1, target, peers)
    moves.look()

    def receive() -> None:
        for header, content in messages:
            incoming: Any = content
            moves.receive(header, incoming)
        if run.block(lambda: bool(peers.acknowledged), 1.0):
            peers.commit(peers.acknowledged[0])
            moves.look()

    def change_view() -> None:
        with contextlib.suppress(NotReadyError), moves.no_unit_is_pinned():
            target.view(1, 2, first_round=0)

    run.threads(receive, change_view)
    run.sleep(1.0)
    assert target.shard.numbers == ([0, 1] if peers.acknowledged else [1])
    with moves.no_unit_is_pinned():
        assert {piece.outcome for piece in target.push(0)} == {Outcome.ACCEPTED}


def test_acknowledged_units_can_be_adopted() -> None:
    assert explore(partial(acknowledging, messages_of(11)), [mover], deviations=1).is_complete


def test_a_view_that_is_applied_while_a_unit_is_acknowledged_is_found() -> None:
    flaw = bug(
        "a view is applied between the acknowledgement of a unit and its adoption",
        swaps("pserver.moving.mover:Mover.no_unit_is_pinned", "self._pinned or self._acknowledged", "self._pinned"),
    )
    finds(flaw, partial(acknowledging, messages_of(11)), [mover], deviations=1)
