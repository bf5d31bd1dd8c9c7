"""The master's reaction to answers and leases of pservers: which processes count, and what is noted."""

from __future__ import annotations

import pytest

from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.messages.control import AppliedReply, AppliedRequest, SnapshotRequest, ViewRequest
from flightedl.messages.declarations import ModelDeclaration
from flightedl.messages.status import PserverStatusReply

from .test_core import PSERVER, A, B, Bench, save, status

#: Index of a process that does not belong to this job any more.
BEYOND = 99


def notes(effects: list[out.Effect], kind: out.Kind) -> list[out.Note]:
    return [each for each in effects if isinstance(each, out.Note) and each.kind is kind]


def is_admitted(bench: Bench) -> bool:
    bench.serve()
    bench.take()
    joining = bench.join()
    bench.serve()
    return joining in bench.answers and bool(bench.reply(joining).member)


def test_an_excess_pserver_changes_nothing() -> None:
    bench = Bench()
    before = bench.core.encode()
    bench.see({"a": A, "b": B}, {0: PSERVER, 1: BEYOND})
    assert bench.core.encode() == before
    assert is_admitted(bench)


def before_the_model(pservers: dict[int, int]) -> MasterCore:
    core = MasterCore(CoreSettings(generation=5, pserver_count=1, keeps_checkpoints=False), 0.0)
    core.apply(events.LeasesSeen({}, pservers, 100), 0.0)
    declared = ModelDeclaration(parameters=[], optimizer={}, mode=Sync().to_json())
    core.apply(events.ModelPlanned(declared, "p", 1), 0.0)
    return core


def test_an_excess_pserver_that_registered_before_the_model_changes_nothing() -> None:
    alone, beside = before_the_model({0: PSERVER}), before_the_model({0: PSERVER, 1: BEYOND})
    assert alone.encode() == beside.encode() != before_the_model({}).encode()


def lacking() -> AppliedReply:
    return AppliedReply(summary=AppliedSummary().encode(), lacks_election=3)


def test_an_excess_pserver_does_not_initialize_the_model_again() -> None:
    bench = Bench()
    bench.see({"a": A, "b": B}, {0: PSERVER, 1: BEYOND})
    effects = bench.apply(events.Answered(1, BEYOND, AppliedRequest(plan_hash=""), lacking()))
    assert not any(isinstance(each, out.DeleteElection) for each in effects)


def test_lost_values_are_noted_once() -> None:
    bench = Bench()
    first, again = (bench.apply(events.Answered(0, PSERVER, AppliedRequest(plan_hash=""), lacking())) for _ in range(2))
    assert [len(notes(effects, out.Kind.VALUES_LOST)) for effects in (first, again)] == [1, 0]


def audited(bench: Bench, **done: bytes) -> list[out.Effect]:
    """Return the effects of an answer to an audit."""
    bench.now += 1.0
    call = bench.control()
    assert isinstance(call, out.ControlCall)
    assert call.audit is not None
    return bench.applied(call, done={0: done["done"]} if done else {})


def test_work_found_missing_by_an_audit_is_noted_and_stored() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    bench.finish(bench.take())
    before = bench.core.revision
    (note,) = notes(audited(bench), out.Kind.WORK_LOST)
    assert note.values == (0, PSERVER, 1, 1, 0)
    assert note.is_warning
    assert bench.core.revision > before


def test_a_clean_audit_changes_nothing() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    bench.finish(bench.take())
    before = bench.core.revision
    effects = audited(bench, done=b"\x01")
    assert not notes(effects, out.Kind.WORK_LOST)
    assert bench.core.revision == before
    assert len(notes(effects, out.Kind.JOB_DONE)) == 1
    assert not notes(bench.apply(events.TimePassed()), out.Kind.JOB_DONE), "it is noted once"


@pytest.mark.parametrize("generation", [PSERVER, PSERVER + 1])
def test_only_the_current_process_takes_part_in_checkpoints(generation: int) -> None:
    bench = Bench(keeps_checkpoints=True)
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    bench.apply(
        events.Answered(0, generation, AppliedRequest(plan_hash=""), AppliedReply(summary=AppliedSummary().encode()))
    )
    bench.apply(events.TimePassed())
    assert (bench.core.checkpointing.checkpoints.under_way is not None) == (generation == PSERVER + 1)


@pytest.mark.parametrize(("mode", "has_round"), [(Sync(), True), (Async(), False)])
def test_a_checkpoint_is_made_at_a_round_if_the_mode_has_rounds(mode: Mode, has_round: bool) -> None:
    bench = Bench(mode, keeps_checkpoints=True)
    assert is_admitted(bench)
    said = bench.core.apply(events.StatusReceived([status(highest_version=7)]), 0.0)
    assert not notes(said, out.Kind.CHECKPOINT_TROUBLE)
    bench.apply(events.TimePassed())
    (order,) = [each for each in bench.serve() if isinstance(each, SnapshotRequest)]
    assert (order.round is not None) == has_round
    assert order.round is None or order.round > 7


def test_an_epoch_ends_with_a_checkpoint() -> None:
    bench = Bench(tasks=1, epochs=2, keeps_checkpoints=True, checkpoints=CheckpointSettings(interval_s=None))
    bench.serve()
    bench.apply(events.TimePassed())
    save(bench)
    bench.apply(events.TimePassed())
    assert bench.core.checkpointing.checkpoints.under_way is None
    bench.finish(bench.take())
    bench.apply(events.TimePassed())
    assert bench.core.checkpointing.checkpoints.under_way == 2


def test_a_pserver_that_shuts_down_requests_one_checkpoint() -> None:
    bench = Bench(keeps_checkpoints=True, checkpoints=CheckpointSettings(interval_s=None, at_epoch_end=False))
    bench.serve()
    for number in (1, 2):
        bench.apply(events.TimePassed())
        assert bench.core.checkpointing.checkpoints.under_way == number
        save(bench)
        bench.apply(events.StatusReceived([status(is_draining=True)]))
    bench.apply(events.TimePassed())
    assert bench.core.checkpointing.checkpoints.under_way is None


def test_a_view_contains_the_mode() -> None:
    bench = Bench(Sync(backup=1))
    bench.serve()
    bench.take()
    bench.join()
    (view,) = [each for each in bench.serve() if isinstance(each, ViewRequest)]
    assert view.mode == Sync(backup=1).to_json()


def test_a_waiting_round_names_its_trainers() -> None:
    bench = Bench()
    assert is_admitted(bench)
    assert bench.core.members is not None
    numbers = dict.fromkeys(("index", "blocks", "lowest_version", "highest_version", "size_bytes", "pushes"), 0)
    waits_for = [bench.core.members.member_of("a")]
    waits = PserverStatusReply(
        **numbers, state="serving", rows={}, members=waits_for, waits_for=waits_for, waits_s=60.0
    )
    (note,) = notes(bench.apply(events.StatusReceived([waits])), out.Kind.ROUND_WAITS)
    assert note.who == "a"
    alone = MasterCore(CoreSettings(generation=5, pserver_count=1), 0.0)
    assert not notes(alone.apply(events.StatusReceived([waits]), 0.0), out.Kind.ROUND_WAITS)
