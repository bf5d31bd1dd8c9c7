"""The feed: whatever is lost, repeated, late or restored from older states, a follower gets the present model."""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flightedl.domain.feed.follower import FollowedFeeds, Use
from flightedl.domain.feed.server import ServerFeed, State
from flightedl.messages.feed import ChangesHeader, Position

BLOCKS = range(4)
SERVERS = range(3)
#: Versions after which a row without updates expires.
UNUSED = 3
#: Maximum number of removed rows that wait for the feed to be read.
MOST_PENDING = 2


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


def unpacked(ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // 8}Q", ids))


@dataclass
class Block:
    """A block with a value and rows; an id's row is (version of its last update, value)."""

    version: int = 0
    value: int = 0
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)

    def living(self) -> dict[int, int]:
        return {row: value for row, (version, value) in self.rows.items() if version >= self.version - UNUSED}


@dataclass
class Answer:
    """A base or increment on its way."""

    server: int
    header: ChangesHeader
    blocks: dict[int, tuple[int, int]]
    removed: list[int]
    #: (block, row) -> (version, value), and blocks that are complete.
    rows: dict[tuple[int, int], tuple[int, int]]
    complete: set[int]
    oldest: dict[int, int]
    asked: float


class Server:
    """A pserver's content and feed. Rows are numbered as the product numbers records."""

    def __init__(self, generation: int, blocks: dict[int, Block], placement: int) -> None:
        self.blocks = blocks
        self.placement = placement
        self.feed = ServerFeed(1, generation, most_removed=2)
        self.row_numbers: dict[tuple[int, int], int] = {}
        self.dirty = {(block, row) for block, content in blocks.items() for row in content.rows}
        self.arrived: dict[int, int] = {}
        self.arrivals: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.pending: list[bytes] = []

    def answer(self, server: int, since: Position | None, asked: float = 0.0) -> Answer:
        feed = self.feed
        number = feed.note(
            {block: State(self.arrivals.get(block, 0), content.version) for block, content in self.blocks.items()}
        )
        for ids in self.pending:
            feed.remove(0, ids)
        self.pending.clear()
        self.row_numbers.update(dict.fromkeys(self.dirty, number))
        self.dirty.clear()
        start = feed.start_of(since)
        own = dict(self.blocks)
        changed = feed.changed_after(start)
        rows = {
            (block, row): content.rows[row]
            for block, content in own.items()
            for row in content.rows
            if start is None or self.row_numbers[block, row] > start
        }
        complete = {block for block in own if start is None or self.arrived.get(block, 0) > start}
        feed.check()
        return Answer(
            server,
            ChangesHeader(
                position=feed.position(self.placement),
                since=start,
                buckets=[(block, block + 1) for block in own],
                leaving=[(block, block + 1) for block in self.leaving],
            ),
            {block: (own[block].version, own[block].value) for block in changed},
            [row for removed in feed.removed_after(start) for row in unpacked(removed.ids)],
            rows,
            complete,
            {block: content.version - UNUSED for block, content in own.items()},
            asked,
        )


class Client:
    """A follower's copy of the model."""

    def __init__(self) -> None:
        self.feeds = FollowedFeeds()
        self.values: dict[int, int] = {}
        self.rows: dict[int, dict[int, tuple[int, int]]] = {block: {} for block in BLOCKS}

    def take(self, answer: Answer) -> None:  # noqa: C901 - the order of a message's parts
        if self.feeds.use_of(answer.server, answer.header) is not Use.APPLY:
            return
        have = [first for first, _ in answer.header.buckets]
        mine = self.feeds.owned(answer.header, have)
        for block in answer.complete & mine:
            self.rows[block].clear()
        for row in answer.removed:
            if row % len(BLOCKS) in mine:
                self.rows[row % len(BLOCKS)].pop(row, None)
        for (block, row), content in answer.rows.items():
            if block in mine:
                self.rows[block][row] = content
        for block, oldest in answer.oldest.items():
            if block in mine:
                self.rows[block] = {row: each for row, each in self.rows[block].items() if each[0] >= oldest}
        for block, (_, value) in answer.blocks.items():
            if block in mine:
                self.values[block] = value
        self.feeds.applied(answer.server, answer.header, have, answer.asked)


class FeedMachine(RuleBasedStateMachine):
    """Three pservers, checkpoints, moves, and two followers that receive answers in any order.

    At the beginning, one pserver has no blocks.
    """

    @initialize()
    def begin(self) -> None:
        self.generation = 10
        self.placement = 1
        self.value = 0
        self.clients = [Client(), Client()]
        self.now = 0
        #: Client, instant, and values of the blocks at that instant, which the client then waits for.
        self.waits: list[tuple[int, int, dict[int, int]]] = []
        #: Block -> former owner that has not read the new placement.
        self.moved: dict[int, int] = {}
        halves = [{block: Block() for block in BLOCKS if block % 2 == server} for server in SERVERS]
        self.servers = [Server(self.next_generation(), half, 1) for half in halves]
        self.saved: list[dict[int, Block]] = [copy.deepcopy(server.blocks) for server in self.servers]
        self.on_way: list[tuple[int, Answer]] = []

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def server_of(self, block: int) -> Server:
        """Return the owner; a former owner that has not read the placement has an older copy of the block."""
        former = self.moved.get(block)
        return next(each for place, each in enumerate(self.servers) if place != former and block in each.blocks)

    def owned_by(self, server: int) -> dict[int, Block]:
        found = self.servers[server]
        return {block: content for block, content in found.blocks.items() if self.server_of(block) is found}

    @rule(block=st.sampled_from(BLOCKS), row=st.integers(0, 3), is_new=st.booleans())
    def push(self, block: int, row: int, is_new: bool) -> None:
        server = self.server_of(block)
        if block in server.leaving:
            return
        content = server.blocks[block]
        content.version += 1
        self.value += 1
        content.value = self.value
        if is_new:
            number = row * len(BLOCKS) + block
            content.rows[number] = content.version, self.value
            server.dirty.add((block, number))

    @rule(block=st.sampled_from(BLOCKS))
    def sweep(self, block: int) -> None:
        content = self.server_of(block).blocks[block]
        content.rows = {row: each for row, each in content.rows.items() if row in content.living()}

    @rule(server=st.sampled_from(SERVERS), row=st.integers(0, 3))
    def save(self, server: int, row: int) -> None:
        """Make a checkpoint, which removes small rows."""
        found = self.servers[server]
        for block, content in self.owned_by(server).items():
            number = row * len(BLOCKS) + block
            if content.rows.pop(number, None) is not None:
                found.pending.append(packed([number]))
                found.dirty.discard((block, number))
        if len(found.pending) > MOST_PENDING:
            # Too many ids wait for the feed to be read. The next increment has all rows instead.
            found.pending.clear()
            found.arrived.update(dict.fromkeys(found.blocks, found.feed.number + 1))
            found.dirty |= {(block, row) for block, content in found.blocks.items() for row in content.rows}
        self.saved = [copy.deepcopy(self.owned_by(each)) for each in SERVERS]

    @rule(server=st.sampled_from(SERVERS))
    def die(self, server: int) -> None:
        """Replace a server by one that restores the checkpoint, in which its blocks may be older."""
        saved = {block: content for blocks in self.saved for block, content in blocks.items()}
        own = {block: copy.deepcopy(saved[block]) for block in self.owned_by(server)}
        self.moved = {block: source for block, source in self.moved.items() if source != server}
        self.servers[server] = Server(self.next_generation(), own, self.placement)
        self.waits.clear()

    @rule(block=st.sampled_from(BLOCKS))
    def freeze(self, block: int) -> None:
        self.server_of(block).leaving.add(block)

    @rule(block=st.sampled_from(BLOCKS))
    def thaw(self, block: int) -> None:
        self.server_of(block).leaving.discard(block)

    @rule(block=st.sampled_from(BLOCKS), to=st.sampled_from([1, 2]), is_read_at_once=st.booleans())
    def move(self, block: int, to: int, is_read_at_once: bool) -> None:
        """Move a block; its former owner keeps a frozen copy until it reads the placement."""
        if block in self.moved:
            return
        source = self.server_of(block)
        target = self.servers[(self.servers.index(source) + to) % len(SERVERS)]
        self.placement += 1
        source.leaving.add(block)
        content = copy.deepcopy(source.blocks[block])
        # The target reads the placement, which also shows which of its own blocks have left.
        self.read_placement(self.servers.index(target))
        target.blocks[block] = content
        target.arrived[block] = target.feed.number + 1
        target.arrivals[block] = target.arrivals.get(block, 0) + 1
        target.dirty |= {(block, row) for row in content.rows}
        self.moved = {**self.moved, block: self.servers.index(source)}
        if is_read_at_once:
            self.read_placement(self.moved[block])

    @rule(server=st.sampled_from(SERVERS))
    def read_placement(self, server: int) -> None:
        found = self.servers[server]
        gone = [block for block, source in self.moved.items() if source == server]
        for block in gone:
            del found.blocks[block]
            found.leaving.discard(block)
        found.dirty = {each for each in found.dirty if each[0] not in gone}
        found.placement = self.placement
        self.moved = {block: source for block, source in self.moved.items() if source != server}

    @rule(server=st.sampled_from(SERVERS), client=st.sampled_from([0, 1]))
    def ask(self, server: int, client: int) -> None:
        since = self.clients[client].feeds.since(server)
        self.now += 1
        self.on_way.append((client, self.servers[server].answer(server, since, self.now)))

    @rule(servers=st.sets(st.sampled_from(SERVERS), min_size=1), client=st.sampled_from([0, 1]))
    def exchange(self, servers: set[int], client: int) -> None:
        for server in servers:
            self.ask(server, client)
            self.clients[client].take(self.on_way.pop()[1])

    @rule(client=st.sampled_from([0, 1]))
    def begin_to_wait(self, client: int) -> None:
        values = {block: self.server_of(block).blocks[block].value for block in BLOCKS}
        self.waits.append((client, self.now, values))

    @precondition(lambda self: self.on_way)
    @rule(data=st.data(), is_kept=st.booleans())
    def deliver(self, data: Any, is_kept: bool) -> None:
        place = data.draw(st.integers(0, len(self.on_way) - 1))
        client, answer = self.on_way[place]
        if not is_kept:
            del self.on_way[place]
        self.clients[client].take(answer)

    @invariant()
    def has_what_it_waited_for(self) -> None:
        """When the core says so, a client has everything that the servers had when it began to wait."""
        for client, begun, values in getattr(self, "waits", []):
            if self.clients[client].feeds.covers(BLOCKS, begun):
                assert all(self.clients[client].values[block] >= value for block, value in values.items())

    @invariant()
    def catches_up(self) -> None:
        """Answers to fresh requests give each client exactly the present model."""
        if not hasattr(self, "clients"):
            return
        later = copy.copy(self)
        later.servers, later.clients = copy.deepcopy((self.servers, self.clients))
        for server in SERVERS:
            later.read_placement(server)
            later.servers[server].leaving.clear()
        for client in later.clients:
            for _ in range(2):
                for number, server in enumerate(later.servers):
                    client.take(server.answer(number, client.feeds.since(number), self.now + 1))
            assert client.feeds.covers(BLOCKS, self.now)
            for block in BLOCKS:
                content = later.server_of(block).blocks[block]
                assert client.values[block] == content.value
                assert {row: value for row, (_, value) in client.rows[block].items()} == content.living()


TestFeed = FeedMachine.TestCase
TestFeed.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_block_that_was_away_is_sent_even_if_its_version_is_the_same() -> None:
    """Its other owner may have restored an older state, and trained it to the same version."""
    feed = ServerFeed(1, 5)
    feed.note({0: State(0, 5)})
    assert feed.is_behind({0: State(1, 5)})
    feed.note({0: State(1, 5)})
    assert feed.changed_after(1) == [0]


def test_a_late_message_of_a_former_owner_does_not_overwrite_the_new_owners_content() -> None:
    block = Block()
    source, target, client = Server(11, {0: block}, 1), Server(12, {}, 1), Client()
    block.version, block.value, block.rows = 1, 7, {4: (1, 7)}
    source.dirty.add((0, 4))
    late = source.answer(0, None)
    source.blocks.clear()
    target.blocks[0] = block
    target.arrived[0], target.arrivals[0], target.dirty = 1, 1, {(0, 4)}
    source.placement = target.placement = 2
    block.version, block.value, block.rows = 2, 8, {4: (2, 8)}
    client.take(target.answer(1, None))
    client.take(late)
    for server, each in ((0, source), (1, target)):
        client.take(each.answer(server, client.feeds.since(server)))
    assert (client.values[0], client.rows[0]) == (8, {4: (2, 8)})


def test_a_client_is_not_up_to_date_when_a_block_has_moved_between_the_answers_of_its_owners() -> None:
    block = Block(1, 7)
    source, target, client = Server(11, {0: block}, 1), Server(12, {1: Block(1, 5)}, 1), Client()
    client.take(source.answer(0, None, 1.0))
    client.take(target.answer(1, None, 1.0))
    block.version, block.value = 2, 8
    begun = 2.0
    client.take(target.answer(1, client.feeds.since(1), 3.0))
    target.blocks[0] = source.blocks.pop(0)
    target.arrived[0], target.arrivals[0] = 2, 1
    source.placement = target.placement = 2
    client.take(source.answer(0, client.feeds.since(0), 3.0))
    assert client.values[0] == 7
    assert not client.feeds.covers([0, 1], begun)
    client.take(target.answer(1, client.feeds.since(1), 4.0))
    assert (client.feeds.covers([0, 1], begun), client.values[0]) == (True, 8)


def test_the_answer_of_a_former_owner_that_has_not_read_the_placement_does_not_count() -> None:
    """The client does not know the new owner, which may have a pserver index that did not exist before."""
    feeds = FollowedFeeds()
    feeds.applied(0, header(1, None), [0, 1], 1.0)
    late = ChangesHeader(position=position(2), since=1, leaving=[(1, 2)])
    feeds.applied(0, late, [0, 1], 3.0)
    assert (feeds.covers([0], 2.0), feeds.covers([1], 2.0)) == (True, False)
    newer = Position(life=1, generation=6, placement=2, number=1)
    feeds.applied(1, ChangesHeader(position=newer, since=None), [1], 3.0)
    assert feeds.covers([0, 1], 2.0)


def position(number: int, generation: int = 5, life: int = 1) -> Position:
    return Position(life=life, generation=generation, placement=1, number=number)


def header(number: int, since: int | None, generation: int = 5) -> ChangesHeader:
    return ChangesHeader(position=position(number, generation), since=since)


@pytest.mark.parametrize(
    ("received", "use"),
    [
        (header(13, 12), Use.APPLY),
        (header(13, 9), Use.APPLY),
        (header(12, 12), Use.APPLY),
        (header(15, 13), Use.ASK_AGAIN),
        (header(11, 10), Use.IGNORE),
        (header(13, None), Use.APPLY),
        (header(11, None), Use.IGNORE),
        (header(125, 12, generation=6), Use.ASK_AGAIN),
        (header(3, None, generation=6), Use.APPLY),
        (header(99, None, generation=4), Use.IGNORE),
        (header(99, 12, generation=4), Use.IGNORE),
    ],
)
def test_a_follower_applies_what_follows_its_position(received: ChangesHeader, use: Use) -> None:
    feeds = FollowedFeeds()
    feeds.applied(0, header(12, None), [], 1.0)
    assert feeds.use_of(0, received) is use


@pytest.mark.parametrize(
    ("since", "start"),
    [
        (None, None),
        (position(2), 2),
        (position(3), 3),
        (position(4), None),
        (position(2, generation=4), None),
        (position(2, life=2), None),
    ],
)
def test_a_position_of_another_process_or_life_gets_a_base(since: Position | None, start: int | None) -> None:
    feed = ServerFeed(1, 5)
    for version in range(3):
        feed.note({0: State(0, version), 1: State(0, 0)})
    assert feed.start_of(since) == start
    assert feed.changed_after(start) == ([0, 1] if start is None else [0] if start < 3 else [])


def test_a_successor_that_passes_the_position_of_a_follower_sends_a_base() -> None:
    """The follower stands at 120. The successor restores an older state, and soon has the number 125."""
    feed = ServerFeed(1, 6)
    for version in range(125):
        feed.note({0: State(0, version)})
    assert feed.start_of(position(120)) is None


def test_a_client_that_needs_forgotten_removed_rows_gets_a_base() -> None:
    feed = ServerFeed(1, 5, most_removed=2)
    for number in range(3):
        feed.note({0: State(0, number)})
        feed.remove(0, packed([number]))
    assert feed.start_of(position(0)) is None
    assert [unpacked(each.ids) for each in feed.removed_after(feed.start_of(position(1)))] == [[1], [2]]
    feed.check()


def at(number: int, checkpoint: int | None, placement: int = 1) -> ChangesHeader:
    where = Position(life=1, generation=5, placement=placement, number=number)
    return ChangesHeader(position=where, since=0, checkpoint=checkpoint)


def test_a_follower_is_at_a_checkpoint_when_all_blocks_are() -> None:
    feeds = FollowedFeeds()
    feeds.applied(0, at(3, 7), [0], 2.0)
    feeds.applied(1, at(4, None), [1, 2], 2.0)
    assert (feeds.checkpoint(range(3)), feeds.waits(0), feeds.waits(1)) == (None, True, False)
    feeds.applied(1, at(5, 8), [1, 2], 3.0)
    assert (feeds.checkpoint(range(3)), feeds.waits(0), feeds.waits(1)) == (None, False, True)
    feeds.applied(0, at(6, 8), [0], 4.0)
    assert (feeds.checkpoint(range(3)), feeds.waits(0), feeds.waits(1)) == (8, True, True)
    assert not feeds.covers(range(3), 1.0), "the state of a checkpoint is older than the request"
    feeds.applied(0, at(7, None), [0], 5.0)
    assert (feeds.checkpoint(range(3)), feeds.waits(0)) == (None, False)


def test_a_late_checkpoint_of_a_former_owner_is_not_the_state_of_a_block_that_has_moved() -> None:
    feeds = FollowedFeeds()
    feeds.applied(1, at(2, None, placement=2), [1], 2.0)
    feeds.applied(0, at(3, 7), [0, 1], 2.0)
    assert (feeds.checkpoint([0]), feeds.checkpoint([0, 1])) == (7, None)


def test_changes_after_a_mark_have_higher_numbers() -> None:
    feed = ServerFeed(1, 5)
    assert feed.note({0: State(0, 0), 1: State(0, 0)}) == 1
    mark = feed.mark({0: State(0, 1), 1: State(0, 0)})
    assert (mark, feed.unchanged_after(1), feed.unchanged_after(None)) == (3, {1}, set())
    feed.note({0: State(0, 1), 1: State(0, 1)})
    assert feed.changed_after(mark) == [1]
    feed.check()


def message(life: int, placement: int, number: int = 1, generation: int = 5) -> ChangesHeader:
    position = Position(life=life, generation=generation, placement=placement, number=number)
    return ChangesHeader(position=position, since=None)


def test_a_model_that_starts_over_is_followed_from_nothing_although_its_placement_begins_again() -> None:
    feeds = FollowedFeeds()
    assert feeds.use_of(0, message(life=3, placement=7)) is Use.APPLY
    feeds.applied(0, message(life=3, placement=7), BLOCKS, 1.0)
    assert feeds.use_of(1, message(life=9, placement=1)) is Use.START_OVER
    empty = FollowedFeeds(9)
    assert empty.use_of(0, message(life=3, placement=8, number=2)) is Use.IGNORE, (
        "it began before the model started over"
    )
    assert empty.use_of(1, message(life=9, placement=1)) is Use.APPLY
    assert empty.owned(message(life=9, placement=1), BLOCKS) == set(BLOCKS)
    empty.applied(1, message(life=9, placement=1), BLOCKS, 2.0)
    assert empty.use_of(0, message(life=3, placement=8, number=3)) is Use.IGNORE
    assert empty.use_of(1, message(life=9, placement=1, number=2)) is Use.APPLY
