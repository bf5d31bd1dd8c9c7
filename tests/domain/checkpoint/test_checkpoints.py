"""Orders of checkpoints: when, at which round, and the state after a crash at any step."""

from __future__ import annotations

import pytest

from flightedl.domain.checkpoint.checkpoints import Checkpoints, next_number_after
from flightedl.domain.checkpoint.manifest import Manifest, candidates
from flightedl.domain.checkpoint.pointer import latest_of, loadable_of
from flightedl.domain.checkpoint.values import (
    Alarm,
    CheckpointSettings,
    OpenRounds,
    OrderSnapshot,
    Persist,
    Pointer,
    Sweep,
    WriteManifest,
)
from flightedl.errors import CorruptError, UsageError
from flightedl.messages.control import SnapshotReply

from .checkpoint_shell import SETTINGS, World, shard_file


def ordered(effects):
    return [effect for effect in effects if isinstance(effect, OrderSnapshot)]


def ready(**settings) -> Checkpoints:
    master = Checkpoints(CheckpointSettings(**settings), 1, 2, 0.0)
    master.pserver_up(0, 10, 0.0)
    master.pserver_up(1, 11, 0.0)
    return master


def test_a_checkpoint_is_made_every_interval_and_only_the_newest_are_kept():
    world = World()
    world.run(60)
    assert world.stored_pointer.number >= 4
    newest = world.stored_pointer.number
    assert candidates(world.store) == (newest, newest - 1)
    assert len(world.store) == 2 * 3
    assert world.alarms == []


def test_nothing_is_ordered_before_all_pservers_are_present():
    master = Checkpoints(CheckpointSettings(interval_s=1), 1, 2, 0.0)
    master.pserver_up(0, 10, 0.0)
    assert master.tick(5.0, None) == ()
    master.pserver_up(1, 11, 5.0)
    effects = master.tick(6.0, None)
    assert effects[0] == Persist()
    assert [order.snapshot.round for order in ordered(effects)] == [None, None]


def test_the_number_is_stored_before_it_is_used_and_never_used_again():
    master = ready()
    master.request("a test")
    assert isinstance(master.tick(1.0, None)[0], Persist)
    successor = Checkpoints.restore(master.encode(), SETTINGS, 2, 2, 0.0)
    assert successor.next_number == master.under_way + 1


def test_a_refused_round_is_proposed_later_with_a_growing_margin():
    master = ready()
    master.request("a test")
    first = ordered(master.tick(1.0, OpenRounds(7)))
    assert {order.snapshot.round for order in first} == {8}
    order = first[0].snapshot.order
    second = ordered(master.progressed(0, 10, SnapshotReply(order, "refused", 12), 1.1))
    assert [(order.index, order.snapshot.round) for order in second] == [(0, 14), (1, 14)]
    assert master.progressed(1, 11, SnapshotReply(order, "written", 12), 1.2) == (), (
        "the order of the previous proposal"
    )
    order = second[0].snapshot.order
    third = ordered(master.progressed(1, 11, SnapshotReply(order, "refused", 20), 1.3))
    assert {order.snapshot.round for order in third} == {24}
    assert len({order.snapshot.name for order in (*first, *second, *third)}) == 6


def test_an_awaited_checkpoint_is_made_at_the_open_round():
    master = ready()
    master.request("a test", is_waited_for=True)
    first = ordered(master.tick(1.0, OpenRounds(7)))
    assert {order.snapshot.round for order in first} == {7}
    second = ordered(master.progressed(0, 10, SnapshotReply(first[0].snapshot.order, "refused", 9), 1.1))
    assert {order.snapshot.round for order in second} == {9}, "the known round was outdated"
    third = ordered(master.progressed(0, 10, SnapshotReply(second[0].snapshot.order, "refused", 10), 1.2))
    assert {order.snapshot.round for order in third} == {10}
    fourth = ordered(master.progressed(0, 10, SnapshotReply(third[0].snapshot.order, "refused", 12), 1.3))
    assert {order.snapshot.round for order in fourth} == {14}, "they continue"


def test_a_round_that_is_not_reached_is_replaced_by_now():
    master = ready(patience_s=5)
    master.request("a test")
    assert {order.snapshot.round for order in ordered(master.tick(1.0, OpenRounds(7)))} == {8}
    assert master.tick(5.0, OpenRounds(7)) == ()
    assert {order.snapshot.round for order in ordered(master.tick(6.5, OpenRounds(7)))} == {None}


def test_patience_ends_after_its_time_and_only_while_copies_are_missing():
    master = ready(patience_s=5, give_up_s=20)
    master.request("a test")
    orders = ordered(master.tick(1.0, OpenRounds(7)))
    assert master.tick(6.0, OpenRounds(7)) == ()
    for order in orders:
        progress = SnapshotReply(order.snapshot.order, "taken", 8)
        assert master.progressed(order.index, order.generation, progress, 6.0) == ()
    assert master.tick(21.0, OpenRounds(8)) == (), "all have their copies and are writing them"
    assert [type(effect) for effect in master.tick(21.1, OpenRounds(8))] == [Alarm]


def test_a_round_that_no_remaining_member_can_reach_is_replaced():
    master = ready(patience_s=30)
    master.request("a test")
    assert {order.snapshot.round for order in ordered(master.tick(1.0, OpenRounds(7)))} == {8}
    assert {order.snapshot.round for order in ordered(master.tick(1.1, OpenRounds(7, has_members=False)))} == {7}
    assert master.tick(1.2, OpenRounds(7, has_members=False)) == ()
    assert master.tick(1.3, OpenRounds(7)) == (), "members that join now do not matter"


def test_a_round_that_only_some_pservers_reached_before_all_members_left_is_replaced_by_now():
    master = ready(patience_s=30)
    master.request_last("the master is shutting down")
    nobody = OpenRounds(8, has_members=False)
    orders = ordered(master.tick(1.0, nobody))
    assert {order.snapshot.round for order in orders} == {8}
    master.progressed(0, 10, SnapshotReply(orders[0].snapshot.order, "taken", 8), 1.1)
    assert master.tick(1.5, nobody) == (), "the others may just be learning of it"
    assert {order.snapshot.round for order in ordered(master.tick(1.6, nobody))} == {None}


def test_a_round_that_some_have_reached_is_kept_after_all_members_left():
    master = ready(patience_s=30)
    master.request("a test")
    order = ordered(master.tick(1.0, OpenRounds(7)))[0].snapshot.order
    master.progressed(0, 10, SnapshotReply(order, "waiting", highest_open_round=8), 1.1)
    assert master.tick(1.2, OpenRounds(8, has_members=False)) == ()


def test_without_members_the_open_round_is_used():
    world = World(has_members=False)
    world.master.request("the end")
    world.tick()
    assert world.stored_pointer.number == 1
    assert b'"round":5' in world.store["c-1/manifest.json"]


def test_an_order_is_repeated_until_the_file_is_reported():
    master = ready()
    master.request("a test")
    effect = ordered(master.tick(1.0, None))[0]
    assert ordered(master.send_failed(0, 10, effect.snapshot.order)) == [effect]
    assert master.send_failed(0, 9, effect.snapshot.order) == ()


def test_a_pserver_that_dies_during_a_checkpoint_aborts_it_and_the_next_one_succeeds():
    world = World()
    world.run(9)
    world.tick()
    assert world.master.under_way == 1
    world.replace_pserver(1)
    assert world.master.under_way is None
    assert "pserver 1 was lost" in world.alarms[0]
    world.run(5)
    assert world.stored_pointer.number == 2
    assert world.master.trouble == ""


def test_a_pserver_that_dies_after_its_report_does_no_harm():
    master = ready()
    master.request("a test")
    orders = ordered(master.tick(1.0, None))
    world = World()
    for order in orders:
        file = shard_file(order.index, order.generation, order.snapshot.name, b"abc")
        effects = master.progressed(
            order.index, order.generation, SnapshotReply(order.snapshot.order, "written", 0, file), 1.5
        )
        assert master.pserver_down(order.index, 1.6) == ()
    assert effects == (WriteManifest(1),)
    assert world.master.under_way is None


def test_an_attempt_that_takes_too_long_is_aborted_and_names_the_late_pservers():
    master = ready(give_up_s=20)
    master.request("a test")
    master.tick(1.0, None)
    (alarm,) = master.tick(22.0, None)
    assert alarm == Alarm("pserver 0, 1 did not write checkpoint 1 in time")
    assert master.tick(22.5, None) == (), "not at once"
    assert ordered(master.tick(24.0, None)), "still wanted"


def test_the_alarm_is_raised_once_and_pauses_grow():
    master = ready(interval_s=None, retry_floor_s=1, retry_ceiling_s=4)
    master.request("a test")
    pauses, alarms, now = [], 0, 0.0
    for _ in range(5):
        since = now
        while not (orders := ordered(master.tick(now, None))):
            now += 0.5
        pauses.append(now - since)
        order = orders[0].snapshot.order
        alarms += len(
            master.progressed(0, 10, SnapshotReply(order, "failed", reason=f"{order.number - order.number}"), now)
        )
        assert "could not write" in master.trouble
    assert pauses[1:] == [1, 2, 4, 4]
    assert alarms == 5, "each names another checkpoint"


def test_the_end_of_an_epoch_and_finished_tasks_make_a_checkpoint_due():
    master = ready(interval_s=None, interval_tasks=10)
    assert master.tick(100.0, None) == ()
    master.tasks_finished(10)
    assert ordered(master.tick(101.0, None))
    other = ready(interval_s=None)
    other.epoch_finished(0)
    assert ordered(other.tick(1.0, None))
    quiet = ready(interval_s=None, at_epoch_end=False)
    quiet.epoch_finished(0)
    assert quiet.tick(1.0, None) == ()


def test_a_request_during_a_checkpoint_gets_the_next_one():
    world = World(has_members=False, has_rounds=False)
    world.master.request("before")
    ticket = world.master.request("a test")
    world.tick()
    assert world.master.is_satisfied(ticket)
    later = world.master.request("later")
    assert not world.master.is_satisfied(later)
    world.tick()
    assert world.master.is_satisfied(later)


@pytest.mark.parametrize("has_rounds", [True, False])
def test_the_master_may_die_after_any_step(has_rounds):
    quiet = World(has_rounds=has_rounds)
    quiet.run(45)
    for crash_in in range(1, quiet.steps + 1):
        world = World(has_rounds=has_rounds, crash_in=crash_in)
        world.run(60)
        assert world.crash_in is None, "it did crash"
        assert world.stored_pointer.number >= 3
        assert world.store.keys() == {n for n in world.store if n.startswith(tuple(f"c-{i}/" for i in range(1, 9)))}


def test_the_store_may_fail_at_any_step_and_later_checkpoints_succeed():
    quiet = World()
    quiet.run(45)
    for step in range(1, quiet.steps + 1):
        world = World(store_fails_at=frozenset({step}))
        world.run(70)
        assert world.stored_pointer.number >= 3
        assert world.master.trouble == ""


def test_a_store_that_is_down_for_long_keeps_the_last_checkpoint_and_the_alarm():
    world = World(store_fails_at=frozenset(range(60, 10_000)))
    world.run(200)
    assert world.stored_pointer is not None
    assert world.master.trouble
    assert world.master.age_s(world.now) > 100


def test_the_stored_state_is_checked():
    assert latest_of(ready().encode()) is None
    for data in (b"", b"{}", b'{"format":9,"next_number":1,"latest":null,"rejected":[]}'):
        with pytest.raises(CorruptError):
            Checkpoints.restore(data, SETTINGS, 1, 1, 0.0)


def test_a_job_restored_into_a_new_etcd_continues_with_higher_numbers():
    names = ["c-7/manifest.json", "c-7/shard-0-of-1-5-1.arrow", "c-9/shard-0-of-1-6-1.arrow", "notes.txt"]
    assert next_number_after(names) == 10
    master = Checkpoints(SETTINGS, 1, 1, 0.0, next_number=10, latest=Pointer(7, "x"), rejected=[8])
    assert Checkpoints.restore(master.encode(), SETTINGS, 2, 1, 0.0).latest == Pointer(7, "x")


def published(master: Checkpoints, number: int) -> Manifest:
    """Advance a checkpoint up to its pointer."""
    master.request("a test")
    for order in ordered(master.tick(100.0 * number, None)):
        file = shard_file(order.index, order.generation, order.snapshot.name, b"abc")
        progress = SnapshotReply(order.snapshot.order, "written", 0, file)
        master.progressed(order.index, order.generation, progress, 100.0 * number)
    manifest = master.manifest("job", "plan", 2, b"{}", None, 0.0)
    master.manifest_written(manifest.number, "x")
    master.pointer_moved(manifest.number, 100.0 * number)
    return manifest


def test_checkpoints_below_the_first_pointer_are_not_loaded():
    master = Checkpoints(SETTINGS, 1, 2, 0.0, next_number=3)
    assert loadable_of(master.encode()) is None
    master.pserver_up(0, 10, 0.0)
    master.pserver_up(1, 11, 0.0)
    assert published(master, 3).first == 3, "1 and 2 were aborted, or their master died before the pointer moved"
    assert published(master, 4).first == 3
    assert loadable_of(master.encode()) == range(3, 5)
    later = Checkpoints.restore(master.encode(), SETTINGS, 2, 2, 400.0)
    assert loadable_of(later.encode()) == range(3, 5)


def test_settings_are_checked():
    above_0 = ("interval_s", "patience_s", "give_up_s", "retry_floor_s")
    at_least_1 = ("keep", "keep_every", "interval_tasks")
    CheckpointSettings(**dict.fromkeys(above_0, 0.5), **dict.fromkeys(at_least_1, 1), retry_ceiling_s=0.5)
    CheckpointSettings(increments=0)
    with pytest.raises(UsageError):
        CheckpointSettings(increments=-1)
    for wrong in (*({name: 0} for name in (*above_0, *at_least_1)), {"retry_floor_s": 2, "retry_ceiling_s": 1}):
        with pytest.raises(UsageError):
            CheckpointSettings(**wrong)


def test_the_manifest_contains_the_reports():
    world = World(has_rounds=False)
    world.master.request("a test")
    world.tick()
    manifest = Manifest.decode(world.store["c-1/manifest.json"])
    assert [shard.index for shard in manifest.shards] == [0, 1]
    assert manifest.stored_evaluations is None
    assert manifest.stored_queue == b'{"queue":1}'


def fail_once(master: Checkpoints, now: float) -> None:
    """Send an order that pserver 0 fails to write."""
    order = ordered(master.tick(now, None))[0].snapshot.order
    master.progressed(0, 10, SnapshotReply(order, "failed", reason="no space"), now)


def test_a_last_checkpoint_is_awaited_until_the_store_has_failed_several_times():
    master = ready(interval_s=None, retry_floor_s=1, retry_ceiling_s=1)
    master.request("before")
    for now in (0.0, 1.0, 2.0, 3.0):
        fail_once(master, now)
    ticket = master.request_last("the end")
    assert not master.is_over(ticket), "it may succeed now"
    fail_once(master, 3.1)
    assert master.is_over(ticket)
    master.check()

    fresh = ready(retry_floor_s=1, retry_ceiling_s=1)
    ticket = fresh.request_last("the end")
    for now in (0.0, 1.0):
        fail_once(fresh, now)
    assert not fresh.is_over(ticket), "a store may fail briefly"
    published(fresh, 3)
    assert fresh.is_over(ticket)


def test_lost_and_late_pservers_do_not_end_the_wait_for_a_last_checkpoint():
    master = ready(give_up_s=5, retry_floor_s=1, retry_ceiling_s=1)
    ticket = master.request_last("the end")
    now = 0.0
    for generation in range(11, 20):
        assert ordered(master.tick(now, None))
        if generation % 2:
            master.pserver_down(1, now)
            assert "was lost" in master.trouble
            master.pserver_up(1, generation + 1, now)
        else:
            now += 6.0
            master.tick(now, None)
            assert "in time" in master.trouble
            master.pserver_up(1, generation + 1, now)
        now += 1.0
        assert not master.is_over(ticket)


def test_copies_that_are_never_written_count_as_failures_of_the_store():
    master = ready(interval_s=None, give_up_s=5, retry_floor_s=1, retry_ceiling_s=1)
    ticket = master.request_last("the end")
    for attempt in range(3):
        assert not master.is_over(ticket)
        for order in ordered(master.tick(10.0 * attempt, None)):
            master.progressed(order.index, order.generation, SnapshotReply(order.snapshot.order, "taken"), 0.0)
        master.tick(10.0 * attempt + 6.0, None)
    assert master.is_over(ticket)


def publishing(**settings) -> Checkpoints:
    """All files of checkpoint 1 are reported, and its manifest is due."""
    master = ready(interval_s=None, retry_ceiling_s=60, **settings)
    master.request("a test")
    for order in ordered(master.tick(0.0, None)):
        file = shard_file(order.index, order.generation, order.snapshot.name, b"abc")
        progress = SnapshotReply(order.snapshot.order, "written", 0, file)
        effects = master.progressed(order.index, order.generation, progress, 0.0)
    assert effects == (WriteManifest(1),)
    return master


def test_a_manifest_that_cannot_be_written_does_not_delay_the_last_checkpoint():
    master = publishing(retry_floor_s=60)
    master.manifest_failed(1, "no space", 0.0)
    assert master.tick(1.0, None) == ()
    ticket = master.request_last("the end")
    assert master.tick(1.0, None) == (WriteManifest(1),)
    master.manifest_failed(1, "no space", 1.0)
    master.tick(100.0, None)
    master.manifest_failed(1, "no space", 100.0)
    assert master.is_over(ticket)


def test_the_model_may_be_saved_as_soon_as_a_manifest_is_being_written():
    assert not ready().may_be_saved
    master = publishing()
    assert master.may_be_saved
    master.manifest_written(1, "x")
    master.pointer_moved(1, 1.0)
    assert master.may_be_saved


def test_a_manifest_is_retried_after_its_pause():
    master = publishing(retry_floor_s=60)
    master.manifest_failed(1, "no space", 0.0)
    assert master.tick(59.9, None) == ()
    assert master.tick(60.0, None) == (WriteManifest(1),)


def test_a_checkpoint_whose_files_stay_missing_is_given_up_for_the_next_one():
    master = publishing(retry_floor_s=60)
    for now in (0.0, 60.0):
        assert master.manifest_failed(1, "the store lacks a file", now, lacks_file=True) is not None
        assert master.may_be_saved
    (alarm,) = master.manifest_failed(1, "the store lacks a file", 200.0, lacks_file=True)
    assert "checkpoint 1 is given up" in alarm.text
    assert not master.may_be_saved, "a pserver that lacks its values need not wait for it"
    assert master.under_way is None
    master.tick(10_000.0, None)
    assert master.under_way == 2


def test_reports_of_other_checkpoints_than_the_published_one_change_nothing():
    master = publishing()
    assert master.manifest_written(2, "x") == ()
    assert master.manifest_failed(2, "no space", 1.0) == ()
    assert master.pointer_moved(1, 1.0) == (), "its manifest is not written"
    assert master.manifest_written(1, "x")
    assert master.manifest_written(1, "x") == (), "reported twice"
    assert master.manifest_failed(1, "no space", 1.0) == (), "it is written"
    assert master.pointer_moved(2, 1.0) == ()
    assert master.under_way == 1
    assert master.pointer_moved(1, 1.0) == (Sweep(),)
    assert (master.manifest_written(1, "x"), master.manifest_failed(1, "", 1.0), master.pointer_moved(1, 1.0)) == (
        (),
    ) * 3


def test_the_newest_complete_checkpoint_is_kept_while_the_next_one_is_made():
    master = ready(keep=1)
    files = ["c-1/manifest.json", "c-2/manifest.json"]
    assert [published(master, 1).number, published(master, 2).number] == [1, 2]
    master.request("a test")
    assert len(ordered(master.tick(300.0, None))) == 2
    assert master.under_way == 3
    assert master.deletable(files) == ("c-1/manifest.json",)


def test_unloadable_checkpoints_are_not_counted_by_retention():
    master = ready(keep=2)
    names = [published(master, number).number for number in (1, 2, 3, 4)]
    assert names == [1, 2, 3, 4]
    files = [f"c-{number}/manifest.json" for number in names]
    assert master.deletable(files) == ("c-1/manifest.json", "c-2/manifest.json")
    master.rejected([3])
    successor = Checkpoints.restore(master.encode(), CheckpointSettings(keep=2), 2, 2, 0.0)
    assert successor.deletable(files) == ("c-1/manifest.json",)
    successor.rejected([4])
    assert successor.deletable(files) == (), "the checkpoint of the pointer is unusable"
    successor.rejected(range(100, 300))
    assert len(successor.encode()) < 1000
