"""Fuzzer of a shard: hundreds of thousands of damaged messages. The shard accepts whole gradients of whole batches, or
nothing.

    python -m tests.pserver.fuzz --messages 200000

Attacks on shared memory are in ``fuzz_sharing``, those on a stream's line in ``fuzz_line``.

Every mutated message passes through the same steps as in a server: the JSON of the header, Arrow's reader, the checks
of ``rpc.validation``, the rows' checksums, the shard. Findings are crashes of the process, applied values that no
correct sender sent, a wrong record of the applied batches, and a server that a correct sender can no longer use.

Half of the messages of steps have their values in memory that the sender may change at any time. Half of the others
have them behind their header.

In sync mode the hostile sender is one of two members, so that its rows reach open rounds, which the correct member
closes. In async mode half of the messages are sums of several batches.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import xxhash

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_shards
from flightedl.errors import FlightedlError
from flightedl.kernels.compiled import finite_copy
from flightedl.messages.base import decode, encode
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PullTicket, PushHeader
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import Pushed, Wanted
from flightedl.rpc.validation import BatchLimits, Tally, check_schema
from flightedl.wire.parts import STEP_SCHEMA, Place, decode_message, place_of
from flightedl.wire.rows import PUSH_SCHEMA, OutgoingBlocks, decode_batch, encode_rows
from flightedl.wire.shared_values import CopyingInbox, Outbox

from ..wire.encoded import encode_parts
from .fuzz_line import attack_line
from .fuzz_sharing import attack_descriptors, attack_lending
from .plans import require_plan

SIZES = (16, 16, 3, 40)
#: Values most likely to break lengths and offsets.
WORDS = (b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", bytes(4))
LIMITS = BatchLimits(batch_rows=1000, batch_bytes=1 << 20)
MODES: dict[str, Mode] = {"async": Async(), "sync": Sync(reduce="sum"), "bounded": Bounded(staleness=1000)}
HOSTILE, CORRECT = 9, 10
#: Epoch of correct batches, which no damaged number reaches.
FAR = 1 << 50


class Target:
    """A shard with its members and its invariants."""

    def __init__(self, mode: Mode) -> None:
        specs = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(SIZES)]
        self.plan: ShardPlan = plan_shards(specs, 1)
        self.shard = Shard(self.plan, 0, SGD(lr=1.0), mode)
        members = [HOSTILE, CORRECT] if isinstance(mode, Sync) else [HOSTILE]
        self.shard.set_members(
            ViewRequest(
                plan_hash=self.plan.hash,
                master_generation=1,
                serial=1,
                members=[ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in members],
            )
        )
        self.is_sync = isinstance(mode, Sync)
        self.takes_sums = isinstance(mode, Async)
        self.batch = 0
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        #: Memory shared with the senders, with room for a few messages.
        self.memory = np.zeros(4096, np.uint8)
        self.inbox = CopyingInbox(self.memory, finite_copy())
        #: Highest possible value of each block: the number of gradients pushed to it.
        self.pushed = 0

    def header(self, member: int = HOSTILE, epoch: int = 0, batches: int = 1) -> PushHeader:
        self.batch += batches
        named = [BatchIdentity(epoch=epoch, task=self.batch - i, batch=0, batch_count=1) for i in range(batches)]
        return PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=self.plan.hash,
            member=member,
            identity=named[0],
            further=named[1:],
            weight=1.0,
            rows=len(SIZES),
        )

    def versions(self) -> list[int]:
        return [block.rounds.version for block in self.shard.blocks()]

    def values(self) -> list[float]:
        return [float(block.values[0]) for block in self.shard.blocks()]

    def message(self) -> bytes:
        arrays = [np.full(size, -1, np.float32) for size in SIZES]
        return encode_rows(range(len(SIZES)), self.versions(), arrays).serialize().to_pybytes()

    def step_message(self, chance: random.Random, request: bytes) -> tuple[bytes | None, bytes]:
        """Return the same push as the first message of a step: its batch, if it has values, and its header."""
        versions = self.versions()
        together = chance.random() < 0.5 and len(set(versions)) == 1
        ranges = [range(len(SIZES))] if together else [range(n, n + 1) for n in range(len(SIZES))]
        pieces = [
            OutgoingBlocks(
                blocks, versions[blocks[0]], Outcome.NONE, np.full(sum(SIZES[n] for n in blocks), -1, np.float32), ()
            )
            for blocks in ranges
        ]
        outbox = None
        if chance.random() < 0.5:
            outbox = Outbox(self.memory, 0)
            outbox.put([], chance.randrange(2048))
        batch, packed = encode_parts(pieces, request, outbox=outbox, inline=chance.random() < 0.5)
        return None if batch is None else batch.serialize().to_pybytes(), packed

    def damage_memory(self, chance: random.Random) -> None:
        """Damage some bytes of the shared memory."""
        found = mutated(self.memory.tobytes(), chance)[: self.memory.size]
        self.memory[: len(found)] = np.frombuffer(found, np.uint8)

    def take_step(self, message: bytes | None, packed: bytes) -> set[int]:
        """Process a message of a step, and return its outcomes; none if it was rejected."""

        def push() -> list[Pushed]:
            batch, columns = (None, ()) if message is None else _sound(message, STEP_SCHEMA)
            parts, attached = decode_message(batch, packed, columns, self.inbox)
            # Accepted values were copied, so that later changes by the sender have no effect.
            self.memory[:] = 0xFF
            request = decode(attached, PushHeader)
            require_plan(self.shard, request.plan_hash)
            return self.shard.push(request, parts)

        return self._taken(push)

    def take(self, header: bytes, message: bytes) -> set[int]:
        """Process a message as ``rpc`` and ``flight`` do, and return its outcomes; none if it was rejected."""

        def push() -> list[Pushed]:
            request = decode(header, PushHeader)
            require_plan(self.shard, request.plan_hash)
            batch, _ = _sound(message, PUSH_SCHEMA)
            return self.shard.push_rows(request, decode_batch(batch))

        return self._taken(push)

    def _taken(self, push: Callable[[], list[Pushed]]) -> set[int]:
        self.pushed += 1
        try:
            outcomes = {pushed.piece.outcome for pushed in push()}
        except FlightedlError as error:
            self.refused[error.code] += 1
            return set()
        except (pa.ArrowException, OSError, EOFError):
            self.refused["arrow"] += 1
            return set()
        self.accepted += 1
        return outcomes

    def take_ticket(self, ticket: bytes) -> None:
        """Process a pull that may be damaged."""
        try:
            request = decode(ticket, PullTicket)
            require_plan(self.shard, request.plan_hash)
            blocks = self.shard.numbers if request.blocks is None else request.blocks
            if len(request.min_versions) in {1, len(blocks)}:
                for wanted in self.shard.wanted(blocks, request.min_versions):
                    self.shard.read(wanted, request.member)
        except FlightedlError as error:
            self.refused[error.code] += 1
        else:
            self.accepted += 1

    def check(self) -> None:
        """Assert that only whole pushed gradients were applied, and that the records are consistent."""
        for block in self.shard.blocks():
            (value,) = set(block.values.tolist())
            assert value == int(value), "a partial gradient was applied"
            assert 0 <= value <= self.pushed, "more was applied than was pushed"
            block.rounds.check()
        self.shard._protocol._applied.check()

    def require_healthy(self) -> None:
        """Assert that a correct sender's batch counts once on each block, and that the values can be read."""
        member = CORRECT if self.is_sync else HOSTILE
        for sender in {member, HOSTILE}:
            # Both members arrive, which closes rounds that the hostile member left open with its whole gradients.
            good = self.message()
            assert self.take(encode(self.header(sender, FAR)), good), "a correct message was rejected"
        before = self.values()
        for sender in {member, HOSTILE}:
            outcomes = self.take(encode(self.header(sender, FAR)), self.message())
            assert outcomes == {Outcome.ACCEPTED}, outcomes
        gained = [after - was for after, was in zip(self.values(), before, strict=True)]
        assert gained == [2.0 if self.is_sync else 1.0] * len(SIZES), gained
        pieces, rest = self.shard.read(Wanted(range(len(SIZES)), 0), 0)
        assert pieces
        assert not rest


def _sound(message: bytes, schema: pa.Schema) -> tuple[pa.RecordBatch, list[pa.Array]]:
    """Return a received batch that has passed the checks of streams, with its columns."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
    check_schema(batch.schema, schema)
    return batch, Tally(schema, LIMITS).take(batch)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Damage the bytes in one to a few places."""
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
            found[start : start + 4] = chance.choice(WORDS)
        else:
            del found[place : place + chance.choice((1, 4, 8))]
    return bytes(found)


def attack(count: int, seed: int, mode: Mode) -> Target:
    """Send ``count`` mutated messages. Raises AssertionError for a finding."""
    chance = random.Random(seed)
    target = Target(mode)
    for number in range(count):
        draw = chance.random()
        if draw < 0.05:
            ticket = PullTicket(plan_hash=target.plan.hash, member=HOSTILE, blocks=[0, 2], min_versions=[0, 0])
            target.take_ticket(mutated(encode(ticket), chance))
        else:
            batches = chance.choice((1, 1, 2, 5)) if target.takes_sums else 1
            header = encode(target.header(batches=batches))
            is_step = chance.random() < 0.5
            if draw < 0.35:
                header = mutated(header, chance)
            message, packed = target.step_message(chance, header) if is_step else (target.message(), b"")
            if is_step and 0.35 <= draw < 0.7:
                packed = mutated(packed, chance)
                if chance.random() < 0.5:
                    # A deliberate lie with valid checksums: only the checks of the header remain.
                    stop = int.from_bytes(packed[16:24], "little") if place_of(packed) is Place.HEADER else None
                    packed = xxhash.xxh3_64_intdigest(packed[8:stop]).to_bytes(8, "little") + packed[8:]
            elif draw >= 0.35 and message is None:
                target.damage_memory(chance)
            elif draw >= 0.35:
                message = mutated(message, chance)
            if is_step:
                target.take_step(message, packed)
            else:
                target.take(header, message)
        if number % 250 == 249:
            target.check()
            target.require_healthy()
    target.check()
    target.require_healthy()
    return target


def main() -> int:
    """Attack all modes in turn, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=200_000, help="in all, divided over the modes")
    parser.add_argument("--mode", choices=[*MODES, "sharing", "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    names = [*MODES, "sharing"] if chosen.mode == "all" else [chosen.mode]
    count = -(-chosen.messages // len(names))
    for name in names:
        if name == "sharing":
            _attack_sharing(count, chosen.seed)
            continue
        began = time.monotonic()
        target = attack(count, chosen.seed, MODES[name])
        codes = ", ".join(f"{number:,} {code}" for code, number in target.refused.most_common())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"{name}: {count:,} mutated messages in {time.monotonic() - began:.0f} s, 0 crashes; refused: {codes}; "
            f"{target.accepted:,} taken, the correct ones between them included; peak memory {peak} MiB"
        )
    return 0


def _attack_sharing(count: int, seed: int) -> None:
    """Attack as a trainer on the same host, mostly with messages."""
    attacks = (("turns", attack_lending, 10), ("descriptors", attack_descriptors, 20), ("lines", attack_line, 10))
    for what, attacked, share in attacks:
        began = time.monotonic()
        found = ", ".join(f"{number:,} {code}" for code, number in attacked(count // share, seed).most_common())
        print(f"sharing: {count // share:,} {what} in {time.monotonic() - began:.0f} s, 0 crashes; {found}")


if __name__ == "__main__":
    sys.exit(main())
