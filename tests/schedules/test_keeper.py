"""Every order in which a lease is renewed, used, moved and released, with slow and lost replies."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.adapters import memory
from flightedl.adapters.memory import MemoryLease
from flightedl.coordination import keeper
from flightedl.coordination.keeper import HeldKey
from flightedl.domain.tenure import RENEWALS_PER_TTL
from flightedl.ports import Absent, Delete, ModifiedAt, Put
from tests.support.memory import MemoryCoordinator
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Run, VirtualClock, explore, finds, running

KEY, TTL_S = "lock", 6.0
OTHER = "other"
KEEP, MOVE, RELEASE = (f"coordination.keeper:HeldKey.{name}" for name in ("_keep", "_move", "release"))


class Holder:
    """A held key, and the store that knows who really holds it."""

    def __init__(self) -> None:
        clock: Any = VirtualClock()
        self.coordinator = MemoryCoordinator(clock)
        self.losses: list[str] = []
        held = HeldKey.claim(self.coordinator, clock, KEY, b"me", TTL_S, self.losses.append)
        assert held is not None
        self.held = held

    def require_sound(self) -> None:
        """Fail if the holder trusts its key although the store has given it up."""
        store = self.coordinator._store
        with store.condition:
            store.expire()
        assert not self.held.is_held or KEY in store.entries, "a key is trusted after its lease has ended"


@pytest.fixture
def slow_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay every reply to a renewal by more than half of the time for which it is trusted."""
    renew = MemoryLease.renew

    def slowly(self: MemoryLease) -> None:
        renew(self)
        running().sleep(2.5)

    monkeypatch.setattr(MemoryLease, "renew", slowly)


def losing(run: Run) -> None:
    """A holder that can no longer reach etcd stops before its lease ends."""
    holder = Holder()

    def disconnect() -> None:
        run.sleep(1.5)
        holder.coordinator.disconnect()

    def look() -> None:
        for _ in range(24):
            run.sleep(0.5)
            holder.require_sound()

    run.threads(disconnect, look)
    assert not holder.held.is_held
    assert len(holder.losses) == 1


def releasing(run: Run) -> None:
    """A released key is free when the call returns, and its holder is not told that it lost it."""
    holder = Holder()

    def wait() -> None:
        run.sleep(1.0)

    def release() -> None:
        run.sleep(1.0)
        holder.held.release()
        assert run.now == 1.0, "a release waits for the next renewal"
        assert KEY not in holder.coordinator._store.entries, "a released key is still held"
        assert not holder.held.is_held

    run.threads(wait, release)
    run.sleep(10.0)
    assert holder.losses == []
    assert not holder.coordinator._store.leases


def moving(run: Run) -> None:
    """A key moves to a lease with another time to live, and no other lease is left."""
    holder = Holder()

    def shorten() -> None:
        holder.held.hold_for(3.0)

    def look() -> None:
        for _ in range(8):
            run.sleep(0.5)
            holder.require_sound()

    run.threads(shorten, look)
    assert holder.held.is_held
    assert holder.held.ttl_s == 3.0
    assert list(holder.coordinator._store.leases) == [holder.held.lease_id]


def half_moved(run: Run) -> None:
    """If it is unknown on which lease a key is, the shorter of both times to live applies."""
    holder = Holder()
    coordinator: Any = holder.coordinator
    transact = coordinator.transact

    def lose_reply(*args: object) -> object:
        coordinator.fail_next("lost_reply")
        try:
            return transact(*args)
        finally:
            coordinator.disconnect()

    def shorten() -> None:
        holder.held.hold_for(3.0)

    def look() -> None:
        for _ in range(12):
            run.sleep(0.5)
            holder.require_sound()

    coordinator.transact = lose_reply
    run.threads(shorten, look)
    assert not holder.held.is_held


def replaced(run: Run) -> None:
    """A holder that moves its key never overwrites the key of its successor."""
    holder = Holder()
    rival = holder.coordinator.another()

    def shorten() -> None:
        holder.held.hold_for(3.0)
        run.sleep(2.0)

    def replace() -> None:
        run.sleep(1.0)
        rival.transact([], [Delete(KEY)])
        lease = rival.grant(60.0)
        rival.transact([Absent(KEY)], [Put(KEY, b"rival", lease.id)])

    run.threads(shorten, replace)
    found = rival.get(KEY)
    assert found is not None
    assert found.value == b"rival", "the key of a successor was overwritten"


def written(run: Run) -> None:
    """A value that is written while the key moves is kept, and the key moves nevertheless."""
    holder = Holder()
    others = holder.coordinator.another()

    def shorten() -> None:
        holder.held.hold_for(3.0)
        run.sleep(4.0)

    def write() -> None:
        # At this moment, the key moves.
        run.sleep(TTL_S / RENEWALS_PER_TTL)
        is_written = False
        while not is_written:
            found = others.get(KEY)
            assert found is not None
            changed = Put(KEY, b"written", found.lease_id)
            is_written = others.transact([ModifiedAt(KEY, found.mod_revision)], [changed]).committed

    run.threads(shorten, write)
    found = others.get(KEY)
    assert found is not None
    assert found.value == b"written", "a value that was written while the key moved was lost"
    assert (found.create_revision, found.lease_id) == (holder.held.generation, holder.held.lease_id)
    assert holder.held.ttl_s == 3.0


def accompanied(run: Run) -> None:
    """A key on the lease of a held key exists until the held key is released, even if the held key moves."""
    holder = Holder()
    held, store = holder.held, holder.coordinator._store

    def lengthen() -> None:
        held.hold_for(60.0)

    def write() -> None:
        # At this moment, the key moves.
        run.sleep(TTL_S / RENEWALS_PER_TTL)
        holder.coordinator.transact([], [held.attached(OTHER, b"")])

    run.threads(lengthen, write)
    run.sleep(20.0)
    assert held.ttl_s == 60.0
    assert holder.coordinator.get(OTHER) is not None, "a key was lost because another key had moved"
    held.release()
    assert not store.leases
    assert not store.entries


@pytest.mark.usefixtures("slow_renewals")
def test_a_lease_is_trusted_from_the_moment_of_the_request() -> None:
    assert explore(losing, [keeper], deviations=1).is_complete


@pytest.mark.parametrize("program", [releasing, moving, half_moved, replaced, written, accompanied])
def test_a_key_is_released_and_moved_completely(program: Any) -> None:
    assert explore(program, [keeper], deviations=1).is_complete


@pytest.mark.usefixtures("slow_renewals")
def test_a_lease_that_is_trusted_from_the_reply_is_found() -> None:
    flaw = bug("trusted from the reply", swaps(KEEP, "_note_renewed(sent_at)", "_note_renewed(self._clock.now())"))
    finds(flaw, losing, [keeper], deviations=0)


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (releasing, bug("the loss is reported, too", drops(RELEASE, "self._is_released = True"))),
        (
            releasing,
            bug("the renewal thread goes on", drops("coordination.keeper:HeldKey._lose", "self._is_over.set()")),
        ),
        (
            half_moved,
            bug(
                "the longer time to live applies while a key moves",
                rewrites(MOVE, "self._tenure.ttl_s = min(self.ttl_s, lease.ttl_s)", "pass"),
            ),
        ),
        (
            written,
            bug(
                "only the holder is compared",
                swaps(
                    MOVE,
                    "ModifiedAt(self.key, found.mod_revision)",
                    "CreatedAt(self.key, self.generation)",
                ),
            ),
        ),
        (replaced, bug("whoever holds it", swaps(MOVE, "transact([unchanged], ", "transact([], "))),
        (moving, bug("former leases stay", drops(MOVE, "each.revoke()"))),
        (accompanied, bug("former leases end", drops(MOVE, "unused.remove(self._lease)"))),
        (accompanied, bug("former leases expire", drops(KEEP, "self._renew_former()"))),
        (
            accompanied,
            bug(
                "former leases are renewed too rarely",
                swaps(
                    "coordination.keeper:HeldKey._pause_s",
                    "min(self._tenure.pause_s(now, is_troubled=is_troubled), *limits_s, math.inf)",
                    "self._tenure.pause_s(now, is_troubled=is_troubled)",
                ),
            ),
        ),
        (
            accompanied,
            bug(
                "former leases outlive the key",
                swaps(RELEASE, "(self._lease, *self._former, *self._tried.values())", "(self._lease,)"),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_key_that_is_kept_too_long_is_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, [keeper, memory], deviations=1)
