"""Held keys: one holder, fenced writes, and losses that are detected in time and are final."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.keeper import HeldKey, OnLost
from flightedl.domain.tenure import TRUSTED_PART
from flightedl.errors import FencedError, OutcomeUnknownError, UnavailableError
from flightedl.ports import Absent, Delete, Lease, Put
from tests.support.clock import FakeClock
from tests.support.contracts.coordinator import eventually
from tests.support.etcd_server import EtcdServer
from tests.support.memory import MemoryCoordinator

from .process_clock import ProcessClock

KEY = "/flightedl/demo/master/lock"
OTHER = "/flightedl-state/demo/task_queues"
TTL_S = 0.6


def claim(coordinator: MemoryCoordinator, clock: ProcessClock, ttl_s: float = TTL_S) -> HeldKey:
    held = HeldKey.claim(coordinator, clock, KEY, b"me", ttl_s)
    assert held is not None
    return held


@pytest.fixture
def losses() -> list[str]:
    return []


@pytest.fixture
def held(coordinator: MemoryCoordinator, clock: ProcessClock, losses: list[str]) -> Iterator[HeldKey]:
    held = HeldKey.claim(coordinator, clock, KEY, b"me", TTL_S, losses.append)
    assert held is not None
    yield held
    coordinator.reconnect()
    held.release()


def test_the_generation_is_the_keys_create_revision(held: HeldKey, coordinator: MemoryCoordinator) -> None:
    entry = coordinator.get(KEY)
    assert entry is not None
    assert (entry.value, entry.create_revision, entry.lease_id) == (b"me", held.generation, held.lease_id)
    assert held.is_held


def test_a_second_claim_fails_and_leaves_no_lease(
    held: HeldKey, coordinator: MemoryCoordinator, clock: ProcessClock
) -> None:
    assert HeldKey.claim(coordinator.another(), clock, KEY, b"you", TTL_S) is None
    assert len(coordinator._store.leases) == 1


@pytest.mark.parametrize(("on_lost", "level"), [(None, logging.INFO), (lambda _: None, logging.WARNING)])
def test_a_loss_is_a_warning_only_with_a_callback(
    coordinator: MemoryCoordinator,
    clock: ProcessClock,
    caplog: pytest.LogCaptureFixture,
    on_lost: OnLost | None,
    level: int,
) -> None:
    caplog.set_level(logging.INFO)
    held = HeldKey.claim(coordinator, clock, KEY, b"", TTL_S, on_lost)
    assert held is not None
    coordinator.disconnect()
    eventually(lambda: caplog.records)
    held.release()
    assert [record.levelno for record in caplog.records] == [level]


def test_only_one_of_many_claims_succeeds(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: HeldKey.claim(coordinator, clock, KEY, b"", 5), range(8)))
    (winner,) = (held for held in claims if held is not None)
    winner.release()


def test_a_claim_checks_additional_conditions(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    coordinator.transact([], [Put("busy", b"")])
    assert HeldKey.claim(coordinator, clock, KEY, b"", 5, also_when=[Absent("busy")]) is None
    assert coordinator.get(KEY) is None
    coordinator.transact([], [Delete("busy")])
    held = HeldKey.claim(coordinator, clock, KEY, b"", 5, also_when=[Absent("busy")])
    assert held is not None
    held.release()


def test_renewal_keeps_the_key_beyond_its_ttl(
    held: HeldKey, coordinator: MemoryCoordinator, clock: ProcessClock
) -> None:
    clock.pass_time(TTL_S * 2)
    assert held.is_held
    assert coordinator.get(KEY) is not None
    assert held.write([Put(OTHER, b"1")]).committed


def test_release_deletes_the_key_at_once_and_is_not_a_loss(
    held: HeldKey, coordinator: MemoryCoordinator, losses: list[str]
) -> None:
    held.release()
    assert coordinator.get(KEY) is None
    assert not held.is_held
    held.release()
    with pytest.raises(FencedError, match="released"):
        held.write([Put(OTHER, b"1")])
    assert losses == []


def test_an_expired_lease_is_reported_once(held: HeldKey, coordinator: MemoryCoordinator, losses: list[str]) -> None:
    coordinator.end_lease(held.lease_id)
    eventually(lambda: losses)
    held._thread.join()
    assert not held.is_held
    assert len(losses) == 1
    assert "has ended" in losses[0]


def test_the_key_counts_as_lost_after_two_thirds_of_its_ttl_without_etcd(
    held: HeldKey, coordinator: MemoryCoordinator, clock: ProcessClock, losses: list[str]
) -> None:
    coordinator.disconnect()
    renewed_at = held._tenure.renewed_at
    eventually(lambda: losses)
    assert TTL_S * 2 / 3 <= clock.now() - renewed_at < TTL_S
    assert "not renewed for" in losses[0]
    assert "cannot be reached" in losses[0]
    coordinator.reconnect()
    held._thread.join()
    assert not held.is_held
    assert len(losses) == 1


def test_an_outage_of_four_tenths_of_the_ttl_never_loses_the_key(
    coordinator: MemoryCoordinator, clock: ProcessClock, losses: list[str]
) -> None:
    ttl_s = 3.0
    held = HeldKey.claim(coordinator, clock, KEY, b"me", ttl_s, losses.append)
    assert held is not None
    # Worst case: the outage begins just before a renewal is sent.
    eventually(lambda: clock.now() - held._tenure.renewed_at > ttl_s / 6 - 0.05)
    coordinator.disconnect()
    clock.pass_time(0.4 * ttl_s)
    coordinator.reconnect()
    eventually(lambda: clock.now() - held._tenure.renewed_at < 0.3)
    assert held.is_held
    assert losses == []
    held.release()


def test_one_failed_renewal_is_not_a_loss(
    held: HeldKey, coordinator: MemoryCoordinator, clock: ProcessClock, losses: list[str]
) -> None:
    for kind in ("unavailable", "lost_request", "lost_reply"):
        coordinator.fail_next(kind)
    clock.pass_time(TTL_S * 1.5)
    assert held.is_held
    assert losses == []


def test_a_process_that_slept_past_its_lease_knows_the_loss_without_etcd(coordinator: MemoryCoordinator) -> None:
    fake = FakeClock()
    held = claim(coordinator, fake, ttl_s=60)  # type: ignore[arg-type]
    fake.advance(39)
    assert held.is_held
    fake.advance(2)
    with pytest.raises(FencedError, match=r"not renewed for 41\.0 s"):
        held.write([Put(OTHER, b"1")])
    assert coordinator.get(OTHER) is None
    # A loss is final even if a renewal is answered later.
    held._tenure.renewed_at = fake.now()
    assert not held.is_held
    held.release()


def test_a_write_of_a_deposed_holder_is_rejected(
    held: HeldKey, coordinator: MemoryCoordinator, losses: list[str]
) -> None:
    coordinator.transact([], [Delete(KEY)])
    coordinator.transact([], [Put(KEY, b"another")])
    with pytest.raises(FencedError, match=f"no longer held by generation {held.generation}: generation"):
        held.write([Put(OTHER, b"1")])
    assert coordinator.get(OTHER) is None
    assert not held.is_held
    eventually(lambda: losses)
    coordinator.transact([], [Delete(KEY)])


def test_a_check_reports_whether_the_key_is_still_held(held: HeldKey, coordinator: MemoryCoordinator) -> None:
    for kind in ("unavailable", "lost_reply"):
        coordinator.fail_next(kind)
    held.require()
    coordinator.transact([], [Delete(KEY)])
    with pytest.raises(FencedError, match="nobody holds it"):
        held.require()


def test_a_failed_condition_of_the_caller_is_a_result(held: HeldKey, coordinator: MemoryCoordinator) -> None:
    result = held.write([Put(OTHER, b"1")], [Absent(KEY)])
    assert not result.committed
    assert held.is_held


def test_an_unknown_outcome_reaches_the_caller(held: HeldKey, coordinator: MemoryCoordinator) -> None:
    for _ in range(2):  # a renewal may consume one of the two faults
        coordinator.fail_next("lost_reply")
    with pytest.raises(OutcomeUnknownError):
        held.write([Put(OTHER, b"1")])


def test_a_claim_whose_reply_was_lost_is_recognized_as_held(
    coordinator: MemoryCoordinator, clock: ProcessClock
) -> None:
    fail_second_request(coordinator, "lost_reply")
    held = claim(coordinator, clock)
    assert held.write([Put(OTHER, b"1")]).committed
    held.release()


def test_a_claim_whose_request_was_lost_raises_unavailable(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    fail_second_request(coordinator, "lost_request")
    with pytest.raises(UnavailableError, match="could not be claimed"):
        claim(coordinator, clock)
    assert coordinator._store.leases == {}
    claim(coordinator, clock).release()


def fail_second_request(coordinator: MemoryCoordinator, kind: str) -> None:
    """Let the grant succeed and the transaction fail."""
    grant = coordinator.grant

    def grant_then_fail(ttl_s: float) -> object:
        lease = grant(ttl_s)
        coordinator.grant = grant  # type: ignore[method-assign]
        coordinator.fail_next(kind)  # type: ignore[arg-type]
        return lease

    coordinator.grant = grant_then_fail  # type: ignore[method-assign,assignment]


def test_a_standby_takes_over_when_the_holder_dies(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    first = claim(coordinator, clock, ttl_s=20)
    standby = coordinator.another()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(HeldKey.claim_when_free, standby, clock, KEY, b"standby", 20, stop=threading.Event())
        assert not threading.Event().wait(0.3)
        assert not waiting.done()
        standby.disconnect()
        coordinator.end_lease(first.lease_id)
        standby.reconnect()
        second = waiting.result(10)
    assert second is not None
    assert second.generation > first.generation
    with pytest.raises(FencedError):
        first.write([Put(OTHER, b"zombie")])
    assert second.write([Put(OTHER, b"1")]).committed
    first.release()
    assert second.is_held
    second.release()


def test_a_standby_can_be_stopped(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    first = claim(coordinator, clock)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(HeldKey.claim_when_free, coordinator, clock, KEY, b"", TTL_S, stop=stop)
        stop.set()
        assert waiting.result(10) is None
    first.release()


@pytest.mark.etcd
@pytest.mark.faults
def test_a_key_survives_a_restart_of_etcd_and_is_lost_by_a_freeze(
    own_etcd: EtcdServer, machine_clock: SystemClock, losses: list[str]
) -> None:
    coordinator = EtcdCoordinator(own_etcd.address, clock=machine_clock)
    held = HeldKey.claim(coordinator, machine_clock, KEY, b"me", 3.0, losses.append)
    assert held is not None
    own_etcd.restart()
    renewed_at = held._tenure.renewed_at
    eventually(lambda: held._tenure.renewed_at > renewed_at)
    assert held.write([Put(OTHER, b"1")]).committed
    renewed_at = held._tenure.renewed_at
    own_etcd.freeze()
    eventually(lambda: losses)
    assert 2.0 <= machine_clock.now() - max(renewed_at, held._tenure.renewed_at) < 3.0
    assert not held.is_held
    own_etcd.thaw()
    held.release()
    coordinator.close()


LONG_S = 1.8


def test_a_key_moves_to_a_lease_with_another_ttl_and_keeps_its_generation(
    coordinator: MemoryCoordinator, clock: ProcessClock
) -> None:
    held = claim(coordinator, clock, LONG_S)
    held.hold_for(TTL_S)
    eventually(lambda: held.ttl_s == TTL_S)
    entry = coordinator.get(KEY)
    assert entry is not None
    assert (entry.value, entry.create_revision, entry.lease_id) == (b"me", held.generation, held.lease_id)
    assert [ttl_s for ttl_s, _ in coordinator._store.leases.values()] == [TTL_S], "the first lease is gone"
    clock.pass_time(2 * TTL_S)
    assert held.is_held
    held.release()
    assert coordinator.get(KEY) is None
    assert not coordinator._store.leases


@pytest.mark.etcd
def test_a_moved_key_in_etcd_outlives_its_first_lease(machine_clock: SystemClock) -> None:
    with EtcdServer() as server:
        coordinator = EtcdCoordinator(server.address, clock=machine_clock)
        held = HeldKey.claim(coordinator, machine_clock, KEY, b"me", 3.0)
        assert held is not None
        first = held.lease_id
        held.hold_for(2.0)
        eventually(lambda: held.lease_id != first)
        machine_clock.sleep(4.0)
        entry = coordinator.get(KEY)
        assert entry is not None
        assert (entry.create_revision, entry.lease_id) == (held.generation, held.lease_id)
        assert held.is_held
        held.release()
        assert coordinator.get(KEY) is None
        coordinator.close()


def test_a_moved_key_counts_as_lost_after_its_new_ttl(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    losses: list[str] = []
    held = HeldKey.claim(coordinator, clock, KEY, b"me", LONG_S, losses.append)
    assert held is not None
    held.hold_for(TTL_S)
    eventually(lambda: held.ttl_s == TTL_S)
    coordinator.disconnect()
    clock.pass_time(TTL_S)
    assert not held.is_held
    eventually(lambda: bool(losses))
    coordinator.reconnect()
    held.release()


@pytest.mark.parametrize("was_done", [True, False])
def test_a_move_with_unknown_outcome_is_retried(
    coordinator: MemoryCoordinator, clock: ProcessClock, monkeypatch: pytest.MonkeyPatch, was_done: bool
) -> None:
    held = claim(coordinator, clock, LONG_S)
    transact, tries = coordinator.transact, []

    def break_off_once(*arguments: object) -> object:
        result = transact(*arguments) if was_done or tries else None
        tries.append(arguments)
        if len(tries) == 1:
            raise OutcomeUnknownError("broken off")
        return result

    monkeypatch.setattr(coordinator, "transact", break_off_once)
    held.hold_for(TTL_S)
    eventually(lambda: len(tries) == (1 if was_done else 2))
    eventually(lambda: len(coordinator._store.leases) == 1)
    entry = coordinator.get(KEY)
    assert entry is not None
    assert entry.lease_id == held.lease_id in coordinator._store.leases
    clock.pass_time(2 * TTL_S)
    assert held.is_held
    held.release()


def test_a_move_keeps_a_concurrent_write(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    held = claim(coordinator, clock, LONG_S)
    coordinator.transact([], [Put(KEY, b"another address", held.lease_id)])
    held.hold_for(TTL_S)
    eventually(lambda: held.ttl_s == TTL_S)
    entry = coordinator.get(KEY)
    assert entry is not None
    assert (entry.value, entry.create_revision) == (b"another address", held.generation)
    assert held.is_held
    held.release()


def test_a_move_of_a_deleted_key_is_a_loss(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    held = claim(coordinator, clock, LONG_S)
    coordinator.transact([], [Delete(KEY)])
    held.hold_for(TTL_S)
    eventually(lambda: not held.is_held)
    assert coordinator.get(KEY) is None
    held.release()


def test_a_move_leaves_the_key_of_a_successor_alone(coordinator: MemoryCoordinator, clock: ProcessClock) -> None:
    held = claim(coordinator, clock, LONG_S)
    coordinator.transact([], [Delete(KEY)])
    coordinator.transact([], [Put(KEY, b"you")])
    successor = coordinator.get(KEY)
    held.hold_for(TTL_S)
    eventually(lambda: not held.is_held)
    held.release()
    assert coordinator.get(KEY) == successor


class SlowCoordinator(MemoryCoordinator):
    """A coordinator whose replies about leases arrive a while after they were sent. Some renewals succeed."""

    def __init__(self, clock: FakeClock, reply_s: float, renewals: int) -> None:
        super().__init__(clock)
        self.clock = clock
        self.reply_s = reply_s
        self.renewals = renewals

    def grant(self, ttl_s: float) -> Lease:
        lease = super().grant(ttl_s)
        self.clock.advance(self.reply_s)
        renew = lease.renew

        def renew_once() -> None:
            if not self.renewals:
                raise UnavailableError("no reply")
            renew()
            self.clock.advance(self.reply_s)
            self.renewals -= 1

        lease.renew = renew_once  # type: ignore[method-assign]
        return lease


@pytest.mark.parametrize("renewals", [0, 1])
def test_a_lease_is_trusted_from_the_time_of_the_request(renewals: int) -> None:
    """The lease in etcd may be as old as the request, however late its reply arrives."""
    clock = FakeClock()
    coordinator = SlowCoordinator(clock, reply_s=0.1, renewals=renewals)
    held = HeldKey.claim(coordinator, clock, KEY, b"me", TTL_S)
    assert held is not None
    # The first renewal is due at once.
    eventually(lambda: not coordinator.renewals and held.slack_s > 0.25)
    assert held.slack_s == pytest.approx(TTL_S * TRUSTED_PART - 0.1)
    held.release()


def test_the_shorter_lease_is_trusted_while_a_move_is_uncertain(
    coordinator: MemoryCoordinator, clock: ProcessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claim(coordinator, clock, 2 * LONG_S)
    tries: list[object] = []

    def fail(*arguments: object) -> object:
        tries.append(arguments)
        raise OutcomeUnknownError("broken off")

    monkeypatch.setattr(coordinator, "transact", fail)
    held.hold_for(TTL_S)
    eventually(lambda: bool(tries))
    assert held.slack_s <= TTL_S * TRUSTED_PART
    monkeypatch.undo()
    held.release()


def test_a_claim_of_unknown_outcome_never_takes_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    coordinator = MemoryCoordinator(clock)
    rival = coordinator.another()

    def lose(*_: object) -> None:
        rival.transact([Absent(KEY)], [Put(KEY, b"you", rival.grant(60.0).id)])
        raise OutcomeUnknownError("the reply was lost")

    monkeypatch.setattr(coordinator, "transact", lose)
    with pytest.raises(UnavailableError, match="could not be claimed"):
        HeldKey.claim(coordinator, clock, KEY, b"me", TTL_S)
    found = rival.get(KEY)
    assert found is not None
    assert found.value == b"you"
    assert list(coordinator._store.leases) == [found.lease_id], "the lease of the failed claim is left"


def test_a_lease_to_which_a_key_has_moved_is_trusted_from_the_time_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    coordinator = MemoryCoordinator(clock)
    held = HeldKey.claim(coordinator, clock, KEY, b"me", 600.0)
    assert held is not None
    transact = coordinator.transact

    def slowly(*arguments: Any) -> object:
        result = transact(*arguments)
        clock.advance(1.0)
        return result

    monkeypatch.setattr(coordinator, "transact", slowly)
    held._move(900.0)
    monkeypatch.undo()
    assert held.slack_s == pytest.approx(900.0 * TRUSTED_PART - 1.0)
    held.release()


def lose_replies(coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the reply to every transaction after the transaction was executed."""
    transact = coordinator.transact

    def lose_the_reply(*arguments: Any) -> None:
        transact(*arguments)
        raise OutcomeUnknownError("the reply was lost")

    monkeypatch.setattr(coordinator, "transact", lose_the_reply)


def test_a_released_key_is_free_although_the_outcome_of_its_move_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    coordinator = MemoryCoordinator(clock)
    held = HeldKey.claim(coordinator, clock, KEY, b"me", 600.0)
    assert held is not None
    lose_replies(coordinator, monkeypatch)
    with pytest.raises(OutcomeUnknownError):
        held._move(900.0)
    held.release()
    assert coordinator.get(KEY) is None


def test_a_lease_to_which_a_key_had_moved_unnoticed_is_renewed_before_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    coordinator = MemoryCoordinator(clock)
    held = HeldKey.claim(coordinator, clock, KEY, b"me", 900.0)
    assert held is not None
    lose_replies(coordinator, monkeypatch)
    with pytest.raises(OutcomeUnknownError):
        held._move(600.0)
    clock.advance(300.0)
    held._move(600.0)
    clock.advance(held.slack_s - 1.0)
    assert held.is_held
    assert coordinator.get(KEY) is not None
    held.release()


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_key_that_becomes_free_before_it_is_watched_is_claimed(
    monkeypatch: pytest.MonkeyPatch, is_compacted: bool
) -> None:
    clock = FakeClock()
    coordinator = MemoryCoordinator(clock)
    coordinator.transact([], [Put(KEY, b"you")])
    watch = coordinator.watch

    def watch_later(key: str, after_revision: int) -> object:
        coordinator.transact([], [Delete(KEY)])
        if is_compacted:
            coordinator.compact()
        return watch(key, after_revision)

    monkeypatch.setattr(coordinator, "watch", watch_later)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        claimed = executor.submit(HeldKey.claim_when_free, coordinator, clock, KEY, b"me", 600.0, stop=stop)
        try:
            held = claimed.result(10.0)
        finally:
            stop.set()
    assert held is not None
    held.release()
