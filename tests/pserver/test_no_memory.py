"""Lack of memory and interrupted changes never leave a batch marked whose gradient is not in the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.errors import BusyError, FlightedlError, NotReadyError
from flightedl.kernels.compiled import Update
from flightedl.messages.parameters import Outcome
from flightedl.pserver.cuts.copier import CopyMemory
from flightedl.pserver.stores.arena import Arena
from flightedl.pserver.stores.interface import Wanted
from flightedl.wire.rows import OutgoingBlocks
from tests.support.faults import FaultPlan
from tests.support.memory import MemoryStorage

from .test_snapshots import Pserver

MODES: dict[str, Mode] = {
    "sync": Sync(),
    "deterministic": Sync(deterministic=True),
    "backup": Sync(backup=1),
    "async": Async(),
}
ROUNDS = 3


class Short(Pserver):
    """A pserver whose memory ends as planned, with two members that push and read in turns."""

    def __init__(self, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
        self.lost: list[str] = []
        super().__init__(MemoryStorage(), mode, on_lost=self.lost.append)
        self.view(1, 2, first_round=0)
        self.faults = plan
        # What a member was sent last, and is still reading when the next gradient comes.
        self.lent: list[list[OutgoingBlocks]] = []

        def short(original: Callable[..., object]) -> Callable[..., object]:
            def allocate(*arguments: object, **named: object) -> object:
                plan.reached("memory")
                return original(*arguments, **named)

            return allocate

        monkeypatch.setattr(Arena, "_cut", short(Arena._cut))
        monkeypatch.setattr(Arena, "copy", short(Arena.copy))
        monkeypatch.setattr(CopyMemory, "_copied", short(CopyMemory._copied))

    def push_again_and_again(self, batch: int, base: int, member: int) -> None:
        for _ in range(3):
            try:
                pieces = self.push(batch, base, member)
            except BusyError as error:
                assert "memory" in str(error)  # noqa: PT017 - a refusal, after which the same is sent again
            else:
                assert {Outcome(piece.outcome) for piece in pieces} <= {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}
                return
        raise AssertionError("refused again though there was memory")

    def train(self) -> None:
        is_synchronous = isinstance(self.shard.blocks()[0].rounds.mode, Sync)
        for round_number in range(ROUNDS):
            for member in (1, 2):
                if round_number == 1 and member == 2:
                    self.order(1, at_round=1 if is_synchronous else None)
                base = round_number if is_synchronous else self.shard.version_range()[1]
                self.push_again_and_again(2 * round_number + member, base, member)
                pieces, _ = self.shard.read(Wanted(range(self.shard.block_count), 0), 0)
                self.lent.append(pieces)

    def values(self) -> list[float]:
        return [float(block.values[-1]) for block in self.shard.blocks()]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_batch_rejected_for_lack_of_memory_counts_once_when_it_is_sent_again(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        whole = Short(FaultPlan(), patch, mode)
        whole.train()
        wanted, allocations = whole.values(), whole.faults.count("memory")
    assert allocations >= ROUNDS
    for number in range(1, allocations + 1):
        with monkeypatch.context() as patch:
            plan = FaultPlan()
            short = Short(plan, patch, mode)
            plan.fail_at("memory", number, MemoryError())
            short.train()
            assert short.values() == wanted, f"without memory {number}"
            assert not short.lost
            assert short.finished("written", "failed", "refused")
            short.shard._protocol.check()


def test_a_push_continues_when_the_snapshot_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan()
    pserver = Short(plan, monkeypatch, Sync(reduce="sum"))
    pserver.order(1, at_round=0)
    progress = pserver.finished("written", "failed")
    assert progress.state == "written"
    plan.fail_at("memory", 1, MemoryError())
    pserver.order(2, at_round=0)
    progress = pserver.finished("written", "failed")
    assert (progress.state, "too little free memory" in progress.reason) == ("failed", True)
    pserver.push_again_and_again(0, 0, 1)
    pserver.push_again_and_again(1, 0, 2)
    assert pserver.shard.version_range() == (1, 1)


class Broken(Pserver):
    """A pserver whose optimizer fails in the middle of an update."""

    def __init__(self, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: list[str] = []
        super().__init__(MemoryStorage(), mode, on_lost=self.lost.append)
        self.push(0)

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(Update, "__call__", fail)


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=["sync", "async"])
def test_an_error_after_the_mark_ends_the_pserver_and_stops_reads_and_snapshots(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pserver = Broken(mode, monkeypatch)
    shard = pserver.shard
    with pytest.raises(ZeroDivisionError):
        pserver.push(1, base=1)
    assert len(pserver.lost) == 1
    assert "a bug" in pserver.lost[0]
    uses: list[Callable[[], object]] = [
        lambda: pserver.push(1, base=1),
        lambda: pserver.push(2, base=2),
        lambda: shard.read(Wanted(range(1), 0), 0),
        lambda: pserver.view(1, 2, first_round=9),
        lambda: pserver.order(1),
        shard.applied,
    ]
    for use in uses:
        with pytest.raises(NotReadyError, match="is ending"):
            use()
    assert len(pserver.lost) == 1


def test_an_error_while_a_view_closes_rounds_ends_the_pserver(monkeypatch: pytest.MonkeyPatch) -> None:
    pserver = Broken(Sync(), monkeypatch)
    pserver.view(2, 3, first_round=1)
    pserver.push(1, base=1, member=2)
    with pytest.raises(ZeroDivisionError):
        pserver.view(2, first_round=1)
    assert pserver.lost
    with pytest.raises(NotReadyError):
        pserver.push(2, base=1, member=2)


def test_a_snapshot_in_progress_at_an_error_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pserver = Broken(Sync(), monkeypatch)
    pserver.order(1, at_round=2)
    with pytest.raises(ZeroDivisionError):
        pserver.push(1, base=1)
    assert pserver.finished("failed").file is None


def test_a_rejected_push_does_not_end_the_pserver() -> None:
    pserver = Pserver(MemoryStorage(), Sync())
    with pytest.raises(FlightedlError, match="future"):
        pserver.push(0, base=7)
    assert {Outcome(piece.outcome) for piece in pserver.push(0)} == {Outcome.ACCEPTED}
