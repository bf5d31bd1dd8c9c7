"""Bytes from strangers: refused, counted, nothing of them applied, and the pserver goes on.

``FLIGHTEDL_FUZZ_MESSAGES`` sets how many mutated messages the long run makes; 200,000 take a few minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from flightedl.domain.modes import Async, Mode, Sync
from flightedl.domain.optimizers import SGD
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import ShardPlan, plan_shards
from flightedl.errors import FencedError, FlightedlError
from flightedl.pserver.shard import ShardState, Wanted
from flightedl.rpc.received import BatchLimits, Tally, check_schema
from flightedl.wire.messages import BatchIdentity, PushHeader, ViewMemberMessage, ViewRequest, decode, encode
from flightedl.wire.rows import PUSH_SCHEMA, decode_batch, encode_rows

SIZES = (16, 16, 3, 40)
#: What lengths and offsets are most afraid of.
WORDS = (b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", bytes(4))
LIMITS = BatchLimits(batch_rows=1000, batch_bytes=1 << 20)


class Target:
    """One shard that a correct sender and a hostile one push to, through what a server does with a message."""

    def __init__(self, mode: Mode) -> None:
        self.plan: ShardPlan = plan_shards([ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(SIZES)], 1)
        self.shard = ShardState(self.plan, 0, SGD(lr=1.0), mode)
        self.shard.set_members(
            ViewRequest(
                master_generation=1,
                serial=1,
                members=[ViewMemberMessage(trainer="t", generation=7, member=9, first_round=0)],
            )
        )
        self.is_sync = isinstance(mode, Sync)
        self.batch = 0
        self.accepted = self.refused = 0

    def header(self) -> bytes:
        self.batch += 1
        identity = BatchIdentity(epoch=0, task=self.batch, batch=0, batch_count=1)
        return encode(
            PushHeader(
                trainer="t",
                generation=7,
                plan_hash=self.plan.hash,
                member=9,
                identity=identity,
                weight=1.0,
                rows=len(SIZES),
            )
        )

    def message(self) -> bytes:
        versions = [block.rounds.version if self.is_sync else 0 for block in self.shard.blocks()]
        arrays = [np.full(size, -1, np.float32) for size in SIZES]
        return encode_rows(range(len(SIZES)), versions, arrays).serialize().to_pybytes()

    def take(self, header: bytes, message: bytes) -> None:
        """As ``rpc`` and ``flight`` do it."""
        try:
            request = decode(header, PushHeader)
            self.shard.require_plan(request.plan_hash)
            batch = pa.ipc.read_record_batch(pa.py_buffer(message), PUSH_SCHEMA)
            check_schema(batch.schema, PUSH_SCHEMA)
            Tally(PUSH_SCHEMA, LIMITS).take(batch)
            self.shard.push(request, decode_batch(batch))
        except (FlightedlError, pa.ArrowException, OSError, EOFError):
            self.refused += 1
        else:
            self.accepted += 1

    def check(self) -> None:
        """Every block has exactly as many gradients as it says, whole ones; the books agree."""
        for block in self.shard.blocks():
            assert set(block.values.tolist()) == {float(block.updates)}, (
                "something else than whole gradients was applied"
            )
            block.rounds.check()
        self.shard._applied.check()

    def is_healthy(self) -> bool:
        before = self.shard.counts.accepted
        versions = [block.rounds.version for block in self.shard.blocks()]
        arrays = [np.full(size, -1, np.float32) for size in SIZES]
        good = encode_rows(range(len(SIZES)), versions, arrays).serialize().to_pybytes()
        self.take(self.header(), good)
        pieces, _ = self.shard.read(Wanted(range(len(SIZES)), 0), 0)
        return bool(pieces) and self.shard.counts.accepted == before + len(SIZES)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to a few small damages."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        kind = chance.randrange(6)
        place = chance.randrange(len(found)) if found else 0
        if kind == 0 and found:
            found[place] ^= 1 << chance.randrange(8)
        elif kind == 1 and found:
            found[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, 0xC0))
        elif kind == 2:
            del found[place:]
        elif kind == 3:
            found[place:place] = chance.randbytes(chance.choice((1, 4, 8, 64)))
        elif kind == 4 and len(found) >= 8:
            start = place & ~3
            found[start : start + 4] = chance.choice(
                (b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", bytes(4))
            )
        else:
            del found[place : place + chance.choice((1, 4, 8))]
    return bytes(found)


def attack(count: int, seed: int, mode: Mode) -> Target:
    chance = random.Random(seed)
    target = Target(mode)
    for number in range(count):
        header, message = target.header(), target.message()
        if chance.random() < 0.3:
            header = mutated(header, chance)
        else:
            message = mutated(message, chance)
        target.take(header, message)
        if number % 500 == 0:
            target.check()
            assert target.is_healthy()
    target.check()
    assert target.is_healthy()
    return target


@pytest.fixture(params=[Async(), Sync(reduce="sum")], ids=["async", "sync"])
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    return request.param


def test_damaged_messages_change_nothing(mode: Mode) -> None:
    target = attack(2_000, seed=1, mode=mode)
    assert target.refused > 1_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_very_many_damaged_messages_change_nothing(mode: Mode) -> None:
    count = int(os.environ.get("FLIGHTEDL_FUZZ_MESSAGES", "20000"))
    target = attack(count, seed=2, mode=mode)
    print(f"{target.refused} refused, {target.accepted} accepted, of {count} damaged and the correct ones between")
    assert target.refused > count // 2


def test_another_plan_is_fenced() -> None:
    with pytest.raises(FencedError, match="plan"):
        Target(Async()).shard.require_plan("0" * 32)


@pytest.mark.parametrize(
    ("field", "value"), [("member", 8), ("generation", 6), ("trainer", "u")], ids=["member", "generation", "trainer"]
)
def test_who_only_nearly_is_the_member_is_refused_and_counted(field: str, value: object) -> None:
    target = Target(Async())
    header = msgspec.structs.replace(decode(target.header(), PushHeader), **{field: value})
    target.take(encode(header), target.message())
    assert (target.shard.counts.refused, target.shard.counts.accepted) == (len(SIZES), 0)
    target.check()
