"""Checkpoints that one pserver writes and another one restores."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, manifest_name
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import Momentum
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.errors import UnavailableError
from flightedl.formats.shard_files import StoredBlock, load_shard
from flightedl.kernels.half_precision import shortened
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.ports import StoredFile
from flightedl.pserver.cuts.copier import _LEAD, CopyMemory, SnapshotCopier
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.restoring import load_newest
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.wire.rows import OutgoingBlocks, decode_batch, encode_rows
from tests.support.memory import MemoryStorage

from .carrier import carry

SPECS = [ParameterSpec("w", (40_000,)), ParameterSpec("b", (3,))]
JOB = "j"


class Pserver:
    """A shard with its snapshots, and a member that pushes."""

    def __init__(
        self,
        storage: MemoryStorage,
        mode: Mode,
        index: int = 0,
        count: int = 1,
        cut_for: int = 0,
        dtype: str = "float32",
        momentum: float = 0.5,
        specs: Sequence[ParameterSpec] = SPECS,
        on_lost: Callable[[str], None] = pytest.fail,
    ) -> None:
        self.specs = [replace(spec, dtype=dtype) for spec in specs]
        self.plan: ShardPlan = plan_for(self.specs, count, cut_for)
        self.index = index
        self.storage = storage
        self.shard = Shard(self.plan, index, Momentum(lr=1.0, momentum=momentum), mode, on_lost=on_lost)
        self.snapshots = Snapshots(self.shard.copying, storage, JOB, index, count, SystemClock())
        self.serial = 0
        self.view(1, first_round=0)

    def view(self, *members: int, first_round: int) -> None:
        self.serial += 1
        self.shard.set_members(
            ViewRequest(
                plan_hash="p",
                master_generation=1,
                serial=self.serial,
                members=[ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=first_round) for m in members],
            )
        )

    def push(self, batch: int, base: int = 0, member: int = 1) -> list[OutgoingBlocks]:
        return self.push_some(batch, range(self.shard.block_count), base, member)

    def push_some(self, batch: int, places: range, base: int = 0, member: int = 1) -> list[OutgoingBlocks]:
        """Push to the blocks at these positions."""
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=self.plan.hash,
            member=member,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=1000),
            weight=1.0,
            rows=1,
        )
        numbers = [self.shard.numbers[place] for place in places]
        kind = self.specs[0].short_kind
        ones = [np.full(self.plan.block(n).size, 1 + 2**-7, np.float32) for n in numbers]
        gradients = [shortened(one, kind) if kind else np.ones_like(one) for one in ones]
        rows = decode_batch(encode_rows(numbers, [base] * len(numbers), gradients))
        return [pushed.piece for pushed in self.shard.push_rows(header, rows)]

    def order(self, number: int, at_round: int | None = None, serial: int = 1) -> SnapshotReply:
        name = f"c-{number}/shard-{self.index}-{serial}.arrow"
        return self.snapshots.order(SnapshotRequest(OrderNumber(1, number, serial), at_round, name, plan_hash="p"))

    def finished(self, *states: str) -> SnapshotReply:
        waited = threading.Event()
        for _ in range(500):
            progress = self.snapshots.progress
            assert progress is not None
            if progress.state in states:
                return progress
            waited.wait(0.01)
        raise AssertionError(progress)

    def checkpoint(self, number: int, at_round: int | None = None) -> ShardFile:
        self.order(number, at_round)
        file = self.finished("written").file
        assert file is not None
        return ShardFile.of(self.index, 10 + self.index, file)

    def restore(self) -> int | None:
        found = load_newest(self.storage, JOB, self.specs, self.plan, self.index, self.shard)
        if found.applied is not None:
            self.shard.restored(found.applied)
        return found.number

    def state(self) -> list[tuple[int, bytes, list[bytes], int]]:
        return [
            (b.rounds.version, b.values.tobytes(), [s.tobytes() for s in b.slots], b.updates)
            for b in self.shard.blocks()
        ]

    def has(self, batch: int) -> set[bool]:
        applied = self.shard.applied()
        return {applied.has(number, Batch(0, 0, batch)) for number in applied.numbers}


def publish(storage: MemoryStorage, number: int, plan: ShardPlan, *files: ShardFile, cut_for: int = 0) -> None:
    manifest = Manifest(
        job=JOB,
        number=number,
        plan_hash=plan.hash,
        pserver_count=len(files),
        cut_for=cut_for or plan.pserver_count,
        round=None,
        created_s=0.0,
        shards=files,
    )
    storage.publish(manifest_name(number), [manifest.encode()])


@pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum")])
def test_restored_blocks_equal_the_copied_blocks_and_train_identically(mode: Mode) -> None:
    storage = MemoryStorage()
    old, new = Pserver(storage, mode), Pserver(storage, mode)
    old.push(0)
    publish(storage, 1, old.plan, old.checkpoint(1))
    copied = old.state()
    old.push(1, base=1)
    new.view(first_round=0)
    assert new.restore() == 1
    assert new.state() == copied
    assert (new.has(0), new.has(1)) == ({True}, {False})
    new.view(2, first_round=1)
    assert {p.outcome for p in new.push(0, base=1, member=2)} == {Outcome.ALREADY_APPLIED}
    if isinstance(mode, Sync):
        new.push(1, base=2, member=2)
    else:
        new.push(1, base=1, member=2)
    assert [state[1] for state in new.state()] == [state[1] for state in old.state()]


def test_a_copy_at_a_round_excludes_later_updates() -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Sync(reduce="sum"))
    pserver.push(0)
    assert pserver.order(1, at_round=2).state == "waiting"
    pserver.push(1, base=1)
    pserver.push(2, base=2)
    file = pserver.finished("written").file
    assert file is not None
    assert (file.lowest_version, file.highest_version) == (2, 2)
    publish(storage, 1, pserver.plan, ShardFile.of(0, 10, file))
    other = Pserver(storage, Sync(reduce="sum"))
    other.restore()
    assert [other.has(batch) for batch in range(3)] == [{True}, {True}, {False}]


def test_a_copy_excludes_gradients_of_the_open_round() -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Sync(reduce="sum"))
    pserver.view(1, 2, first_round=0)
    pserver.push(0)
    publish(storage, 1, pserver.plan, pserver.checkpoint(1))
    other = Pserver(storage, Sync(reduce="sum"))
    other.restore()
    assert (pserver.has(0), other.has(0)) == ({True}, {False})
    assert {version for version, *_ in other.state()} == {0}


def test_a_snapshot_at_a_past_round_is_rejected() -> None:
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"))
    pserver.push(0)
    progress = pserver.order(1, at_round=0)
    assert (progress.state, progress.highest_open_round) == ("refused", 1)


def test_only_the_newest_order_completes() -> None:
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"))
    pserver.order(2, at_round=5)
    assert pserver.order(1).order.number == 2
    pserver.order(2, serial=2)
    assert pserver.finished("written").order.serial == 2


def test_a_storage_failure_is_reported() -> None:
    class Broken(MemoryStorage):
        def publish(self, name: str, parts: object) -> int:
            raise UnavailableError("no space left")

    pserver = Pserver(Broken(), Async())
    pserver.order(1)
    assert pserver.finished("failed").reason == "no space left"
    pserver.push(0)
    assert pserver.has(0) == {True}


def test_an_unexpected_error_of_a_snapshot_is_reported() -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Async())
    storage.plan.fail_at("publish:start", 1, ZeroDivisionError())
    pserver.order(1)
    assert pserver.finished("failed").reason == "snapshot failed by ZeroDivisionError: see the log of the server"
    assert pserver.checkpoint(2)


@pytest.mark.parametrize("damage", ["torn", "flipped", "no manifest"])
def test_a_damaged_checkpoint_is_skipped_and_the_previous_one_is_loaded(damage: str) -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Async())
    publish(storage, 1, pserver.plan, pserver.checkpoint(1))
    pserver.push(0)
    file = pserver.checkpoint(2)
    data = bytearray(storage.read(file.name))
    if damage == "torn":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    storage.publish(file.name, [bytes(data)])
    if damage != "no manifest":
        publish(storage, 2, pserver.plan, file)
    other = Pserver(storage, Async())
    assert other.restore() == 1
    assert other.has(0) == {False}


def test_another_number_of_pservers_restores_the_same_values() -> None:
    storage = MemoryStorage()
    old = [Pserver(storage, Async(), index, 2) for index in range(2)]
    for pserver in old:
        pserver.push(0)
        pserver.push(1, base=1)
    publish(storage, 1, old[0].plan, *(pserver.checkpoint(1) for pserver in old), cut_for=2)
    new = [Pserver(storage, Async(), index, 3, cut_for=2) for index in range(3)]
    assert [pserver.restore() for pserver in new] == [1, 1, 1]
    blocks = {b.place.number: b.values.tobytes() for pserver in old for b in pserver.shard.blocks()}
    assert {b.place.number: b.values.tobytes() for pserver in new for b in pserver.shard.blocks()} == blocks
    assert {(True,)} == {tuple(pserver.has(1)) for pserver in new if pserver.shard.block_count}


def test_a_pserver_that_began_without_blocks_saves_the_slots_of_those_that_moved_to_it() -> None:
    storage = MemoryStorage()
    source, target = (Pserver(storage, Async(), index, 3, cut_for=1) for index in (0, 2))
    assert not target.shard.block_count
    source.push(0)
    (moved,) = (block for block in source.shard.blocks() if block.place.number == source.shard.numbers[0])
    slot = moved.slots[0].tobytes()
    assert carry(source.shard, target.shard, range(moved.place.number, moved.place.number + 1))
    file = target.checkpoint(1)
    _, _, stored = load_shard(storage, file.name, file.size_bytes, file.hash)
    assert [each.slots[0].tobytes() for each in stored if isinstance(each, StoredBlock)] == [slot]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_float32_copy_of_16_bit_parameters_is_saved(dtype: str) -> None:
    storage = MemoryStorage()
    old = [Pserver(storage, Async(), index, 2, dtype=dtype) for index in range(2)]
    for each in old:
        for batch in range(5):
            each.push(batch)
    publish(storage, 1, old[0].plan, *(each.checkpoint(1) for each in old))
    new = [Pserver(storage, Async(), index, 3, cut_for=2, dtype=dtype) for index in range(3)]
    assert [each.restore() for each in new] == [1, 1, 1]
    kept = {block.place.number: block for each in old for block in each.shard.blocks()}
    found = {block.place.number: block for each in new for block in each.shard.blocks()}
    assert found.keys() == kept.keys()
    for number, block in found.items():
        assert block.values.dtype == np.float32
        np.testing.assert_array_equal(block.values, kept[number].values)
        np.testing.assert_array_equal(block.slots[0], kept[number].slots[0])
        # It has bits that 16-bit floats have not.
        assert np.any(block.values.view(np.uint32) & 0x1FFF)


def test_a_push_continues_while_complete_copies_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing thread removes the copies between the protocol's decision and the push's copy."""
    pserver = Pserver(MemoryStorage(), Async())
    carry_out = pserver.shard.copying.carry_out
    dropped: list[object] = []

    def drop(span: ArraySpan, effect: CopyBlocks) -> None:
        assert isinstance(effect, CopyBlocks)
        dropped.append(effect)
        pserver.shard.copying.drop(snapshot.copies)
        carry_out(span, effect)

    snapshot = ByHand(pserver)
    monkeypatch.setattr(pserver.shard.copying, "carry_out", drop)
    pserver.push_some(0, range(1))
    monkeypatch.undo()
    assert dropped
    pserver.push(0)
    assert pserver.has(0) == {True}


MANY = [ParameterSpec(name, (size,)) for name, size in zip("abcdefghi", (3, 9000, 5, 7, 2, 7, 1, 1, 1), strict=True)]


COMMAND = SnapshotRequest(OrderNumber(1, 1, 0), None, "c-1/by-hand.arrow", plan_hash="p")


class ByHand:
    """A snapshot of a shard that the test advances step by step, without a thread."""

    def __init__(self, pserver: Pserver, at_round: int | None = None, replaces: ByHand | None = None) -> None:
        self.pserver = pserver
        self.memory = CopyMemory() if replaces is None else replaces.memory
        self.copies: SnapshotCopier

        def begin(versions: Mapping[int, int], _: int) -> SnapshotCopier:
            command = SnapshotRequest(COMMAND.order, at_round, COMMAND.name, plan_hash="p")
            old = None if replaces is None else replaces.copies
            self.copies = SnapshotCopier(list(versions), self.memory, command, replaces=old)
            return self.copies

        pserver.shard.copying.begin(begin)

    def copy_one(self) -> int | None:
        """Perform the thread's next step."""
        number = self.copies.next_due()
        if number is not None:
            self.pserver.shard.copying.copy_one(self.copies, number)
        return number

    def end(self) -> tuple[list[StoredBlock], AppliedBatches]:
        assert self.copies.is_complete.is_set()
        applied = self.pserver.shard.copying.end(self.copies)
        assert applied is not None
        return self.copies.pop_blocks(), applied


def test_copies_are_not_completed_once_the_blocks_are_inconsistent() -> None:
    pserver = Pserver(MemoryStorage(), Async(), on_lost=lambda _: None)
    snapshot = ByHand(pserver)
    while snapshot.copy_one() is not None:
        pass
    assert snapshot.copies.is_complete.is_set()
    pserver.shard._soundness.interrupted(MemoryError())
    assert pserver.shard.copying.end(snapshot.copies) is None


def test_rows_whose_cut_begins_after_all_were_dropped_are_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[range] = []

    def cut_rows(span: SimpleNamespace, *_: object, **__: object) -> SimpleNamespace:
        drop = partial(dropped.append, span.numbers)
        return SimpleNamespace(cut=SimpleNamespace(drop=drop), drop=drop)

    monkeypatch.setattr("flightedl.pserver.cuts.copier.CutRows", cut_rows)
    copies = SnapshotCopier(range(4), CopyMemory(), COMMAND)
    early: Any = SimpleNamespace(numbers=range(2))
    late: Any = SimpleNamespace(numbers=range(2, 4))
    copies.copy_rows(early, CopyBlocks(0, early.numbers, 1, 1))
    copies.drop_rows()
    assert dropped == [early.numbers]
    copies.copy_rows(late, CopyBlocks(0, late.numbers, 1, 1))
    assert dropped == [early.numbers, late.numbers]


def test_a_round_is_copied_after_it_closes_and_before_the_next_update() -> None:
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"))
    pserver.view(1, 2, first_round=0)
    snapshot = ByHand(pserver, at_round=1)
    assert snapshot.copies.next_due() is None
    pserver.push(0, 0, 1)
    pserver.push(1, 0, 2)
    assert snapshot.copies.next_due() == 0
    pserver.push(2, 1, 1)
    assert not snapshot.copies.is_complete.is_set()
    pserver.push(3, 1, 2)
    blocks, applied = snapshot.end()
    assert {block.version for block in blocks} == {1}
    assert {block.values[0] for block in blocks} == {-2.0}
    has = [{applied.has(number, Batch(0, 0, n)) for number in applied.numbers} for n in range(4)]
    assert has == [{True}, {True}, {False}, {False}]


def test_the_copying_thread_runs_ahead_of_a_push_that_had_to_copy() -> None:
    pserver = Pserver(MemoryStorage(), Async(), specs=MANY)
    snapshot = ByHand(pserver)
    count = pserver.shard.block_count
    assert snapshot.copy_one() == 0
    pserver.push_some(0, range(2, 3))
    ahead = 3 + _LEAD
    assert ahead < count
    assert [snapshot.copy_one() for _ in range(count - 2)] == [*range(ahead, count), 1, *range(3, ahead)]
    assert snapshot.copy_one() is None
    snapshot.end()


def test_replaced_copies_do_not_change_the_memory_of_newer_copies() -> None:
    pserver = Pserver(MemoryStorage(), Async())
    old = ByHand(pserver)
    new = ByHand(pserver, replaces=old)
    pserver.shard.copying.copy_due(new.copies)
    pserver.push(0)
    pserver.shard.copying.copy_due(old.copies)
    assert not old.copies.is_complete.is_set()
    blocks, applied = new.end()
    assert {value for block in blocks for value in block.values.tolist()} == {0.0}
    assert not applied.has(0, Batch(0, 0, 0))


def test_other_copies_do_not_affect_those_of_a_checkpoint() -> None:
    pserver = Pserver(MemoryStorage(), Async())
    first = ByHand(pserver)
    pserver.push(0)
    second = ByHand(pserver)
    pserver.push(1)
    pserver.shard.copying.copy_due(first.copies)
    pserver.shard.copying.copy_due(second.copies)
    for snapshot, has, value in ((first, [False, False], 0.0), (second, [True, False], None)):
        blocks, applied = snapshot.end()
        assert [applied.has(0, Batch(0, 0, number)) for number in (0, 1)] == has
        assert value is None or {each for block in blocks for each in block.values.tolist()} == {value}


@pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Sync(reduce="sum", backup=1)], ids=["a", "s", "b"])
@pytest.mark.parametrize("seed", range(15))
def test_copied_blocks_match_their_applied_batches_in_any_interleaving(mode: Mode, seed: int) -> None:
    """Pushes of some blocks and steps of the thread in any order. Each element counts the batches that it contains."""
    chance = random.Random(seed)
    pserver = Pserver(MemoryStorage(), mode, momentum=0.0, specs=MANY)
    members = (1, 2, 3)
    pserver.view(*members, first_round=0)
    count = pserver.shard.block_count
    at_round = chance.randint(0, 3) if isinstance(mode, Sync) else None
    bases = {(member, local): 0 for member in members for local in range(count)}
    value_at = {(local, 0): 0.0 for local in range(count)}
    snapshot: ByHand | None = None
    batch = 0
    for step in range(400):
        if step == 5 and (at_round is None or pserver.shard.version_range()[1] <= at_round):
            snapshot = ByHand(pserver, at_round=at_round)
        if snapshot is not None and chance.random() < 0.2:
            snapshot.copy_one()
        if snapshot is not None and snapshot.copies.is_complete.is_set():
            break
        member, first = chance.choice(members), chance.randrange(count)
        some = range(first, chance.randint(first + 1, count))
        together = len({bases[member, local] for local in some}) == 1
        for part in [some] if together else [range(local, local + 1) for local in some]:
            pserver.push_some(batch, part, bases[member, part.start], member)
        batch += 1
        for block in pserver.shard.blocks():
            bases[member, block.place.number] = block.rounds.version
            value_at[block.place.number, block.rounds.version] = float(block.values[0])
    if snapshot is None:
        return
    blocks, applied = snapshot.end()
    for local, block in enumerate(blocks):
        taken = sum(applied.has(local, Batch(0, 0, n)) for n in range(batch))
        assert set(block.values.tolist()) == {-float(taken)} == {value_at[local, block.version]}
        assert at_round is None or block.version == at_round


def test_if_a_checkpoint_is_deleted_while_it_is_read_the_next_one_is_loaded() -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Async())
    first = pserver.checkpoint(1)
    publish(storage, 1, pserver.plan, first)
    second = pserver.checkpoint(2)

    class Swept(MemoryStorage):
        def read_range(self, name: str, offset: int, length: int) -> bytes:
            if name == first.name:
                publish(storage, 2, pserver.plan, second)
                storage.delete(first.name)
                storage.delete(manifest_name(1))
            return storage.read_range(name, offset, length)

        def read(self, name: str) -> bytes:
            return storage.read(name)

        def list(self, prefix: str) -> tuple[StoredFile, ...]:
            return storage.list(prefix)

    assert load_newest(Swept(), JOB, SPECS, pserver.plan, 0, Pserver(storage, Async()).shard).number == 2


def test_copies_made_during_pushes_match_their_applied_batches() -> None:
    """Each element of the copy counts the batches that the file lists as applied to its block."""
    storage = MemoryStorage()
    plan = plan_for(SPECS, 1)
    pserver = Pserver(storage, Async())
    pserver.shard = shard = Shard(plan, 0, Momentum(lr=1.0, momentum=0.0), Async())
    pserver.snapshots = Snapshots(shard.copying, storage, JOB, 0, 1, SystemClock())
    pserver.view(1, first_round=0)
    thread = threading.Thread(target=lambda: [pserver.push(batch) for batch in range(100)])
    thread.start()
    for number in range(1, 12):
        publish(storage, number, plan, pserver.checkpoint(number))
        other = Pserver(storage, Async())
        other.shard = Shard(plan, 0, Momentum(lr=1.0, momentum=0.0), Async())
        assert other.restore() == number
        for block in other.shard.blocks():
            applied = other.shard._protocol._applied
            count = sum(applied.has(block.place.number, Batch(0, 0, batch)) for batch in range(100))
            assert set(block.values.tolist()) == {-float(count)}
    thread.join()


def test_checkpoints_that_etcd_does_not_allow_are_not_read() -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Async())
    for number in (1, 2, 3):
        publish(storage, number, pserver.plan, pserver.checkpoint(number))

    def loaded(allowed: range) -> int | None:
        target = Pserver(storage, Async()).shard
        return load_newest(storage, JOB, SPECS, pserver.plan, 0, target, allowed).number

    assert loaded(range(2, 3)) == 2, "checkpoint 3 belongs to a deposed master"
    storage.delete(manifest_name(2))
    assert loaded(range(2, 3)) is None, "checkpoint 1 may have other first values"


def test_a_thread_that_waits_for_copies_learns_at_once_that_they_were_given_up() -> None:
    order = SnapshotRequest(OrderNumber(1, 1, 1), None, "c-1", plan_hash="p")
    copies = SnapshotCopier([0], CopyMemory(), order)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(copies.wait, 60.0)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        copies.give_up("not enough memory")
        with pytest.raises(UnavailableError, match="not enough memory"):
            waiting.result(20.0)
