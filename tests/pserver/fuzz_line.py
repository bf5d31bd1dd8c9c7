"""Fuzzer of a line: a trainer on the same host that sends arbitrary bytes on the line of its step stream.

    python -m tests.pserver.fuzz --mode sharing

Messages go over a real Unix socket to a pserver's end of a stream. Each is a correct step, or damaged: bytes changed in
its values, its header or the header's length; truncated, extended, repeated, or followed by an announcement of a
message that never arrives. Either the step is accepted as sent, or the stream ends with one of our errors and the
hostile trainer connects again. Blocks must contain only whole gradients, and no descriptor may be left open.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import FlightedlError
from flightedl.messages.base import encode
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.pserver.meter import Meter
from flightedl.pserver.shard import Shard
from flightedl.pserver.steps.conversation import Conversation
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.pserver.steps.step_stream import StepStream
from flightedl.rpc.line import LIMIT_BYTES, Line
from flightedl.rpc.streams import Exchange
from flightedl.rpc.validation import BatchLimits
from flightedl.wire.parts import STEP_SCHEMA, encode_message
from flightedl.wire.rows import OutgoingBlocks
from tests.calls import call_of

from .plans import require_plan

_CLOCK = SystemClock()
_SIZES = (20, 15, 30)


class _Service:
    """A pserver's service, as far as the verbs use it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.meter = shard.meter

    def shard(self, plan_hash: str) -> Shard:
        require_plan(self._shard, plan_hash)
        return self._shard

    def require_lease(self) -> None:
        """Do nothing: the lease is held."""


class _Target:
    """A shard, and the pserver's end of a hostile trainer's stream."""

    def __init__(self) -> None:
        self.plan = plan_shards([ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(_SIZES)], 1)
        self.shard = Shard(self.plan, 0, SGD(lr=1.0), Async(), meter=Meter())
        member = ViewMember(trainer="t1", generation=1, member=1, first_round=0)
        self.shard.set_members(ViewRequest(plan_hash=self.plan.hash, master_generation=1, serial=1, members=[member]))
        self.service = _Service(self.shard)
        self.batch = 0
        self.connect()

    def connect(self) -> None:
        """Connect the hostile trainer, or connect it again."""
        self.theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.setblocking(False)
        self.call = call_of("step", is_cancelled=True)
        exchange = Exchange(None, None, STEP_SCHEMA, self.call, BatchLimits())  # type: ignore[arg-type]
        self.stream = StepStream(exchange, self.call, _CLOCK, self.shard.meter, lambda: None, shares_memory=True)
        self.line = self.stream._line = Line(mine)
        self.conversation = Conversation(self.stream, self.service, _CLOCK, self.call, LineLoop(_CLOCK.now))

    def end(self) -> None:
        """End the trainer's stream."""
        self.stream.end()
        self.line.close()
        self.theirs.close()

    def message(self) -> bytes:
        """Return an encoded step with -1 for every element."""
        self.batch += 1
        header = PushHeader(
            trainer="t1",
            generation=1,
            plan_hash=self.plan.hash,
            member=1,
            identity=BatchIdentity(epoch=0, task=self.batch, batch=0, batch_count=1),
            weight=1.0,
            rows=len(_SIZES),
        )
        pieces = [OutgoingBlocks(range(len(_SIZES)), 0, 0, np.full(sum(_SIZES), -1, np.float32), ())]
        values, packed, _ = encode_message(pieces, encode(header), checksums=True)
        assert values is not None
        return b"".join(values) + packed + len(packed).to_bytes(4, "little") + b"\1"

    def serve(self, *, by_loop: bool) -> bool:
        """Process received messages as the pserver's handler or its loop does. Return False if the stream is over."""
        if not by_loop:
            self.conversation._is_small = False
            return self.conversation.serve_one()
        self.conversation._line = self.line
        return self.conversation.receive() or self.conversation.handle(self.conversation._handed.get_nowait())

    def check(self) -> None:
        for block in self.shard.blocks():
            (value,) = set(block.values.tolist())
            assert value == block.rounds.version, "a partial gradient was applied"


def _damaged(message: bytes, chance: random.Random) -> bytes:
    found = bytearray(message)
    kind = chance.randrange(6)
    if kind == 0:
        for _ in range(chance.choice((1, 1, 4))):
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del found[chance.randrange(len(found)) :]
    elif kind == 2:
        words = (0, 1, 4, len(found), len(found) - 5, (1 << 32) - 1, 1 << 31, chance.randrange(1 << 32))
        found[-5:-1] = chance.choice(words).to_bytes(4, "little")
    elif kind == 3:
        found[-1] = chance.choice((0, 2, 3, 255))
    elif kind == 4:
        found[:0] = bytes(chance.choice((1, 4, 60, LIMIT_BYTES)))
    else:
        # Damage that no checksum detects, because the header is consistent.
        start = 4 * sum(_SIZES)
        body = found[start + 8 : -5]
        body[chance.randrange(min(40, len(body)))] = chance.choice((0, 1, 2, 4, 5, 127, 255))
        found[start : start + 8] = xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
        found[start + 8 : -5] = body
    return bytes(found)


def attack_line(count: int, seed: int) -> Counter[str]:
    """Send ``count`` messages and count their results. Raises AssertionError for a finding."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    before = len(list(Path("/proc/self/fd").iterdir()))
    target = _Target()
    for _ in range(count):
        message = target.message()
        if chance.random() < 0.8:
            message = _damaged(message, chance)
        for _ in range(chance.choice((1, 1, 1, 2))):
            with suppress(OSError):
                target.theirs.send(message)
        if chance.random() < 0.1:
            target.theirs.close()
        is_open = False
        try:
            is_open = target.serve(by_loop=chance.random() < 0.5)
            found["taken" if is_open else "left"] += 1
        except FlightedlError as error:
            found[error.code] += 1
        if is_open and chance.random() < 0.5:
            with suppress(OSError):
                target.theirs.recv(1 << 17)
        target.check()
        if not is_open or chance.random() < 0.05:
            target.end()
            target.connect()
    target.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "descriptors were not closed"
    return found
