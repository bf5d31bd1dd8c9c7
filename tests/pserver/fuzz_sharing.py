"""Fuzzer of shared memory: trainers on the same host that lie about loans, locations of values and descriptors.

    python -m tests.pserver.fuzz --mode sharing

Two attacks, each with many attempts from one seed:

* ``attack_descriptors`` sends every kind of descriptor over a real Unix socket in place of shared memory. Either it is
  rejected with a message, or it is memory that nobody can shrink. No descriptor and no mapping may be left.
* ``Lending`` has two trainers' streams to one shard, one honest, one hostile. Values lent to the honest trainer must
  remain one whole version until it acknowledges them, whatever the hostile trainer says and pushes, and whichever
  stream ends. A message's offset and lengths must be in the hostile trainer's own memory, or the message is rejected.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import secrets
import socket
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import FlightedlError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.process.shared_memory import NONCE_BYTES, SIZE_BYTES, SharedMemory
from flightedl.pserver.meter import Meter
from flightedl.pserver.shard import Shard
from flightedl.pserver.steps.session import StepSession
from flightedl.pserver.steps.step_stream import StepStream, inbox_of
from flightedl.rpc import same_host
from flightedl.rpc.same_host import SharedPair
from flightedl.wire.parts import decode_message
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import Inbox, Outbox

from ..wire.encoded import encode_parts
from .plans import require_plan

_WHOLE_BYTES = 4096 + SIZE_BYTES
_SEALS = (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, 0x10)
_CLOCK = SystemClock()


# descriptors


def _memfd(chance: random.Random, nonce: bytes) -> int:
    descriptor = os.memfd_create("flightedl-hostile", os.MFD_ALLOW_SEALING if chance.random() < 0.9 else 0)
    sizes = (0, 1, 15, 40, 4096, _WHOLE_BYTES - 1, *[_WHOLE_BYTES] * 12, _WHOLE_BYTES + 1, 1 << 62)
    size = chance.choice(sizes)
    with suppress(OSError):
        os.ftruncate(descriptor, size)
    if size >= 32:
        start = chance.choice((b"flightedl memory", b"flightedl memory", b"flightedl memorz"))
        os.pwrite(descriptor, start + (nonce if chance.random() < 0.7 else secrets.token_bytes(NONCE_BYTES)), 0)
    seals = _SEALS if chance.random() < 0.7 else chance.sample(_SEALS, chance.randrange(len(_SEALS)))
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(seals))
    return descriptor


def _file(_chance: random.Random, nonce: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(b"flightedl memory" + nonce)
        file.truncate(_WHOLE_BYTES)
        return os.dup(file.fileno())


def _one_end(pair: tuple[int, int]) -> int:
    os.close(pair[1])
    return pair[0]


def _socket(*_: object) -> int:
    with socket.socket(socket.AF_UNIX) as made:
        return os.dup(made.fileno())


_KINDS: tuple[Callable[[random.Random, bytes], int], ...] = (
    *[_memfd] * 8,
    _file,
    lambda *_: _one_end(os.pipe()),
    _socket,
    lambda *_: os.eventfd(0),
    lambda *_: os.open("/dev/zero", os.O_RDWR),
    lambda *_: os.open("/", os.O_RDONLY),
    lambda *_: os.open("/proc/self/mem", os.O_RDONLY),
)


def _left() -> tuple[int, int]:
    """Return this process's open descriptors and its mappings of other processes' memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("flightedl-hostile" in line for line in maps)


def attack_descriptors(count: int, seed: int) -> Counter[str]:
    """Send ``count`` descriptors, and count the rejections by reason. Raises AssertionError for a finding."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    # Find the file system of memfds once.
    SharedMemory.create(bytes(NONCE_BYTES))
    before = _left()
    for _ in range(count):
        nonce = secrets.token_bytes(NONCE_BYTES)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine, theirs:
            mine.settimeout(1.0)
            descriptors = [chance.choice(_KINDS)(chance, nonce) for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 3)))]
            word = chance.choice((b"1", b"1", b"1", b"1", b"1", b"0", b"1" * 100))
            socket.send_fds(theirs, [word], descriptors)
            with suppress(OSError):
                _try_to_harm(descriptors, chance)
            try:
                memory, _store = same_host._receive(mine, nonce)
            except (FlightedlError, OSError) as error:
                found[type(error).__name__] += 1
            else:
                found["taken"] += 1
                _try_to_harm(descriptors, chance)
                # All of the memory must be present: reading a missing page would kill this process.
                assert memory.values.size == SIZE_BYTES
                assert memory.values[:: SIZE_BYTES // 8].max() in {0, 0xFF}
                assert memory.values[-1] in {0, 0xFF}
                del memory, _store
            for descriptor in descriptors:
                os.close(descriptor)
    assert _left() == before, "descriptors or mappings were not closed"
    return found


def _try_to_harm(descriptors: list[int], chance: random.Random) -> None:
    """Do to the memory what would kill a reader."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.ftruncate(descriptor, chance.choice((0, 4096, 1 << 40)))
        with suppress(OSError):
            os.pwrite(descriptor, b"\xff" * 64, chance.choice((0, 4096, 1 << 30)))


# loans, and locations of values


class Wire:
    """A stream's path for headers, which keeps the pserver's messages for the trainer."""

    columns = ()

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def begin(self, _schema: object) -> None:
        """Do nothing: there is nothing to announce."""

    def write_metadata(self, packed: bytes) -> None:
        self.sent.append(packed)

    def write(self, _batch: object, packed: bytes, **_: object) -> None:
        """Discard a message with values, which is only sent if the memory has no room."""
        self.sent.append(packed[:0])


class Speaker:
    """A trainer on the same host, and the pserver's end of its stream."""

    def __init__(self, shard: Shard, member: int) -> None:
        assert shard.memory is not None
        self.shard, self.member = shard, member
        nonce = secrets.token_bytes(NONCE_BYTES)
        own, other = SharedMemory.create(nonce), SharedMemory.create(nonce)
        self.theirs = SharedMemory.received(os.dup(own.descriptor()), nonce)
        self.mine = other
        self.outbox = Outbox(other.values, 0)
        self.inbox = Inbox(self.theirs.values, _read_only(shard.memory))
        self.wire = Wire()
        self.stream = StepStream(self.wire, None, _CLOCK, Meter(), lambda: shard.memory, shares_memory=True)  # type: ignore[arg-type]
        self.stream.begin()
        received = SharedMemory.received(os.dup(other.descriptor()), nonce)
        self.stream._pair = SharedPair(own, received, None, shard.memory)  # type: ignore[arg-type]
        self.stream._inbox = inbox_of(self.stream._pair)
        self.stream._outbox = Outbox(own.values, 0, shard.memory.values)
        #: Loans that were not acknowledged: the values in place, and a copy of their original state.
        self.lent: deque[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = deque()
        #: Messages of these values.
        self.heard = 0

    def say(self, packed: bytes) -> None:
        """Send a message to the pserver."""
        received, attached = self.stream.decoded(None, packed)
        header = decode(attached, PushHeader)
        require_plan(self.shard, header.plan_hash)
        session = StepSession(self.shard, header)
        pieces = session.feed(received)
        self.outbox.consumed(1)
        self.stream.write(pieces, checksums=False)
        del received, pieces

    def hear(self) -> None:
        """Read the answers without acknowledging them yet."""
        while self.wire.sent:
            packed = self.wire.sent.popleft()
            self.heard += bool(packed)
            for part in decode_message(None, packed, inbox=self.inbox)[0] if packed else ():
                if part.data:
                    values = np.frombuffer(part.data, np.float32)
                    self.lent.append((values, values.copy()))

    def end(self) -> None:
        """End the stream at the pserver."""
        self.stream.end()


def _read_only(store: SharedMemory) -> np.ndarray[Any, Any]:
    """Return the pserver's values as a trainer maps them."""
    mapping = mmap.mmap(store.descriptor(), 4096 + store.values.size, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, np.uint8)[4096:]


class Lending:
    """A shard with an honest and a hostile trainer."""

    SIZES = (2000, 1500, 3000)

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        specs = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(self.SIZES)]
        self.plan = plan_shards(specs, 1)
        self.shard = Shard(self.plan, 0, SGD(lr=1.0), Async(), shares_memory=True)
        members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in (1, 2)]
        self.shard.set_members(ViewRequest(plan_hash=self.plan.hash, master_generation=1, serial=1, members=members))
        self.batch = 0
        self.found: Counter[str] = Counter()
        self.honest, self.hostile = Speaker(self.shard, 1), Speaker(self.shard, 2)

    def message(self, speaker: Speaker) -> bytes:
        """A step that brings -1 for every element."""
        self.batch += 1
        header = PushHeader(
            trainer=f"t{speaker.member}",
            generation=speaker.member,
            plan_hash=self.plan.hash,
            member=speaker.member,
            identity=BatchIdentity(epoch=0, task=self.batch, batch=0, batch_count=1),
            weight=1.0,
            rows=len(self.SIZES),
            pull=True,
        )
        numbers = range(len(self.SIZES))
        if self.chance.random() < 0.5:
            pieces = [OutgoingBlocks(numbers, 0, 0, np.full(sum(self.SIZES), -1, np.float32), ())]
        else:
            sizes = zip(numbers, self.SIZES, strict=True)
            pieces = [OutgoingBlocks(range(n, n + 1), 0, 0, np.full(size, -1, np.float32), ()) for n, size in sizes]
        batch, packed = encode_parts(pieces, encode(header), checksums=False, outbox=speaker.outbox)
        assert batch is None
        return packed

    def turn(self) -> None:
        """Perform a random action."""
        draw = self.chance.random()
        if draw < 0.25:
            self.honest.say(self.message(self.honest))
            self.honest.hear()
            self.found["honest"] += 1
        elif draw < 0.45:
            self._lie()
        elif draw < 0.75:
            self._say(self._mended(self.message(self.hostile)) if draw < 0.65 else self.message(self.hostile))
        elif draw < 0.95:
            self._take()
        elif draw < 0.985:
            self.hostile.end()
            self._say(self.message(self.hostile))
            self.hostile = Speaker(self.shard, 2)
        else:
            self.check()
            self.honest.end()
            assert self.honest.theirs.is_over
            self.honest = Speaker(self.shard, 1)
        self.check()

    def _lie(self) -> None:
        """Lie about acknowledged messages, or change values."""
        memory = self.hostile.mine
        memory._consumed[0] = self.chance.choice((0, 1, (1 << 64) - 1, 1 << 63, self.chance.randrange(1 << 64)))
        memory._over[0] = self.chance.randrange(2)
        memory.values[: 4 * sum(self.SIZES)] = self.chance.choice((0, 0xFF, 0x7F))

    def _mended(self, packed: bytes) -> bytes:
        """Return a message with a different offset or length, and a matching checksum of the header."""
        body = bytearray(packed[8:])
        words = (0, 1, SIZE_BYTES - 1, SIZE_BYTES, (1 << 63), (1 << 63) + 64, (1 << 64) - 1, (1 << 64) - SIZE_BYTES)
        if self.chance.random() < 0.6:
            body[8:16] = self.chance.choice(words).to_bytes(8, "little")
        else:
            place = 16 + 20 + 32 * self.chance.randrange(int.from_bytes(body[4:8], "little"))
            size = self.chance.choice((0, 1, 4, 6, 12000, (1 << 32) - 1, self.chance.randrange(1 << 32)))
            body[place : place + 4] = size.to_bytes(4, "little")
        return xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little") + bytes(body)

    def _say(self, packed: bytes) -> None:
        try:
            self.hostile.say(packed)
            self.found["taken"] += 1
        except FlightedlError as error:
            self.found[error.code] += 1
            self.hostile.outbox.consumed(1)
        self.hostile.wire.sent.clear()

    def _take(self) -> None:
        """Acknowledge some of the honest trainer's loans."""
        self.check()
        self.honest.lent.clear()
        self.honest.mine.consumed += self.honest.heard
        self.found["taken back"] += self.honest.heard
        self.honest.heard = 0

    def check(self) -> None:
        """Assert that values lent to the honest trainer are unchanged, and the blocks are consistent."""
        for values, was in self.honest.lent:
            assert np.array_equal(values, was), "lent values have changed"
        for block in self.shard.blocks():
            (value,) = set(block.values.tolist())
            assert value == int(value), "a partial gradient was applied"


def attack_lending(count: int, seed: int) -> Counter[str]:
    """Run ``count`` turns, and count their events. Raises AssertionError for a finding."""
    lending = Lending(seed)
    for _ in range(count):
        lending.turn()
    return lending.found
