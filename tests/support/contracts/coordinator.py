"""Contract suites for ``ports.Coordinator``.

To verify an implementation, inherit :class:`CoordinatorContract`, :class:`CoordinatorOutageContract` and
:class:`CoordinatorHistoryContract`, and provide a fixture ``world`` that returns its :class:`World`. The outage suite
stops and starts the world. The history suite requires a :class:`RestorableWorld`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import pytest

from flightedl.errors import OutcomeUnknownError, RolledBackError, UnavailableError, UsageError
from flightedl.ports import (
    Absent,
    CompactedError,
    Coordinator,
    CreatedAt,
    Delete,
    LeaseLostError,
    ModifiedAt,
    Put,
    Removed,
    Watch,
    WatchEvent,
    Written,
)

Result = TypeVar("Result")

_PATIENCE_S = 10.0
_TTL_S = 1.0


class World(Protocol):
    """One implementation of the port, with methods that create the situations described in the contract."""

    #: Prefix of keys that only this test uses. Ends with a slash.
    prefix: str

    def connect(self) -> Coordinator:
        """Return a new connection, which the world closes."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Let the store's clock advance. May return before the clock has advanced."""
        ...

    def compact(self) -> None:
        """Discard all events up to now."""
        ...

    def stop(self) -> None:
        """Make the store unreachable."""
        ...

    def start(self) -> None:
        """Make the store reachable again. Its data is intact."""
        ...

    def lose_reply(self, coordinator: Coordinator) -> None:
        """Let the store carry out the next request of this connection, but drop the reply."""
        ...


class RestorableWorld(World, Protocol):
    """A world whose store can be restored from a backup."""

    def backup(self) -> Callable[[], None]:
        """Copy the store. Return a function that restores the copy."""
        ...

    def begin_again(self) -> None:
        """Replace the store with an empty one that has a different cluster id."""
        ...


def eventually(look: Callable[[], Result | None], timeout_s: float = _PATIENCE_S) -> Result:
    """Call ``look`` until it returns a true value, and return this value."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = look()
        if result:
            return result
        assert time.monotonic() < deadline, f"the condition was not met within {timeout_s:g} s"
        time.sleep(0.01)


def collect(watch: Watch, count: int, timeout_s: float = _PATIENCE_S) -> list[WatchEvent]:
    """Return at least ``count`` events, including all events delivered together with the last one."""
    events: list[WatchEvent] = []
    deadline = time.monotonic() + timeout_s
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {len(events)} of {count} events arrived"
        events.extend(watch.next(0.5))
    return events


def put(coordinator: Coordinator, key: str, value: bytes = b"", lease_id: int = 0) -> int:
    """Write unconditionally. Return the revision."""
    result = coordinator.transact([], [Put(key, value, lease_id)])
    assert result.committed
    return result.revision


def persistently(act: Callable[[], Result]) -> Result:
    """Retry until the store is reachable."""

    def attempt() -> tuple[Result] | None:
        try:
            return (act(),)
        except UnavailableError:
            return None

    return eventually(attempt)[0]


class CoordinatorContract:
    """Behavior of a healthy store: values, transactions, leases and watches."""

    @pytest.fixture
    def coordinator(self, world: World) -> Coordinator:
        return world.connect()

    def test_an_absent_key_is_none(self, coordinator: Coordinator, world: World) -> None:
        assert coordinator.get(world.prefix + "a") is None

    def test_every_connection_reads_a_written_key(self, coordinator: Coordinator, world: World) -> None:
        revision = put(coordinator, world.prefix + "a", b"\x00\xff")
        entry = world.connect().get(world.prefix + "a")
        assert entry is not None
        assert (entry.value, entry.create_revision, entry.mod_revision, entry.lease_id) == (
            b"\x00\xff",
            revision,
            revision,
            0,
        )

    def test_overwriting_keeps_the_create_revision(self, coordinator: Coordinator, world: World) -> None:
        created = put(coordinator, world.prefix + "a", b"1")
        modified = put(coordinator, world.prefix + "a", b"2")
        entry = coordinator.get(world.prefix + "a")
        assert entry is not None
        assert created < modified
        assert (entry.create_revision, entry.mod_revision) == (created, modified)

    def test_recreating_a_key_changes_its_create_revision(self, coordinator: Coordinator, world: World) -> None:
        created = put(coordinator, world.prefix + "a")
        coordinator.transact([], [Delete(world.prefix + "a")])
        assert put(coordinator, world.prefix + "a") > created

    def test_a_listing_is_sorted_and_contains_only_the_prefix(self, coordinator: Coordinator, world: World) -> None:
        for name in ("ps/1", "ps/0", "ps_desired", "q", "ps/10"):
            last = put(coordinator, world.prefix + name)
        listing = coordinator.list(world.prefix + "ps/")
        assert [entry.key for entry in listing.entries] == [world.prefix + f"ps/{i}" for i in ("0", "1", "10")]
        assert listing.revision >= last
        assert coordinator.list(world.prefix + "none/").entries == ()

    def test_a_transaction_is_all_or_nothing(self, coordinator: Coordinator, world: World) -> None:
        a, b = world.prefix + "a", world.prefix + "b"
        revision = put(coordinator, a, b"1")
        refused = coordinator.transact([Absent(b), Absent(a)], [Put(b, b"2"), Delete(a)])
        assert not refused.committed
        assert refused.entries == {a: coordinator.get(a), b: None}
        done = coordinator.transact([Absent(b), CreatedAt(a, revision)], [Put(b, b"2"), Delete(a)])
        assert done.committed
        found = coordinator.get(b)
        assert found is not None
        assert found.mod_revision == done.revision
        assert coordinator.get(a) is None

    def test_conditions_compare_create_and_mod_revisions(self, coordinator: Coordinator, world: World) -> None:
        key = world.prefix + "a"
        created = put(coordinator, key)
        modified = put(coordinator, key)
        for condition, holds in (
            (CreatedAt(key, created), True),
            (CreatedAt(key, modified), False),
            (ModifiedAt(key, modified), True),
            (ModifiedAt(key, created), False),
            (ModifiedAt(key, 0), False),
            (ModifiedAt(world.prefix + "none", 0), True),
            (CreatedAt(world.prefix + "none", created), False),
            (Absent(key), False),
            (Absent(world.prefix + "none"), True),
        ):
            assert coordinator.transact([condition], []).committed is holds, condition

    def test_deleting_an_absent_key_is_fine(self, coordinator: Coordinator, world: World) -> None:
        assert coordinator.transact([], [Delete(world.prefix + "none")]).committed

    def test_only_one_of_many_clients_creates_a_key(self, world: World) -> None:
        connections = [world.connect() for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            results = pool.map(
                lambda one: one.transact([Absent(world.prefix + "a")], [Put(world.prefix + "a", b"")]), connections
            )
            assert sum(result.committed for result in results) == 1

    def test_compare_and_swap_from_many_threads_loses_no_increment(
        self, coordinator: Coordinator, world: World
    ) -> None:
        key = world.prefix + "count"
        put(coordinator, key, b"0")

        def add() -> None:
            while True:
                entry = coordinator.get(key)
                assert entry is not None
                then = [Put(key, b"%d" % (int(entry.value) + 1))]
                if coordinator.transact([ModifiedAt(key, entry.mod_revision)], then).committed:
                    return

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(add) for _ in range(20)]:
                future.result()
        entry = coordinator.get(key)
        assert entry is not None
        assert entry.value == b"20"

    def test_a_transaction_with_too_many_operations_is_rejected(self, coordinator: Coordinator, world: World) -> None:
        keys = [f"{world.prefix}{i}" for i in range(129)]
        most = keys[:128]
        assert coordinator.transact([Absent(key) for key in most], [Put(key, b"") for key in most]).committed
        with pytest.raises(UsageError, match="128"):
            coordinator.transact([], [Put(key, b"") for key in keys])
        with pytest.raises(UsageError):
            coordinator.transact([], [Put(keys[0], b"1"), Put(keys[0], b"2")])

    # --- leases ---

    def test_a_lease_has_an_id_and_at_least_the_requested_ttl(self, coordinator: Coordinator) -> None:
        lease = coordinator.grant(_TTL_S)
        assert lease.id != 0
        assert lease.ttl_s >= _TTL_S

    def test_every_connection_can_read_the_ttl_of_a_lease(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(60)
        other = world.connect()
        assert other.lease_ttl_s(lease.id) == lease.ttl_s
        lease.revoke()
        assert other.lease_ttl_s(lease.id) is None

    def test_revoking_a_lease_deletes_its_keys(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(60)
        put(coordinator, world.prefix + "a", lease_id=lease.id)
        entry = coordinator.get(world.prefix + "a")
        assert entry is not None
        assert entry.lease_id == lease.id
        lease.revoke()
        assert coordinator.get(world.prefix + "a") is None
        lease.revoke()
        with pytest.raises(LeaseLostError):
            lease.renew()
        with pytest.raises(LeaseLostError):
            coordinator.transact([], [Put(world.prefix + "b", b""), Put(world.prefix + "a", b"", lease.id)])
        assert coordinator.list(world.prefix).entries == ()

    def test_keys_are_deleted_when_their_lease_expires(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(_TTL_S)
        put(coordinator, world.prefix + "leased", lease_id=lease.id)
        put(coordinator, world.prefix + "lasting")
        world.pass_time(lease.ttl_s * 1.1)
        eventually(lambda: coordinator.get(world.prefix + "leased") is None)
        assert coordinator.get(world.prefix + "lasting") is not None
        with pytest.raises(LeaseLostError):
            lease.renew()

    def test_a_renewed_lease_does_not_expire(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(_TTL_S)
        put(coordinator, world.prefix + "a", lease_id=lease.id)
        for _ in range(6):
            world.pass_time(lease.ttl_s * 0.4)
            lease.renew()
        assert coordinator.get(world.prefix + "a") is not None

    def test_overwriting_a_key_without_its_lease_detaches_it(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(60)
        put(coordinator, world.prefix + "a", lease_id=lease.id)
        put(coordinator, world.prefix + "a")
        lease.revoke()
        assert coordinator.get(world.prefix + "a") is not None

    # --- watches ---

    def test_a_watch_delivers_each_event_once_and_in_order(self, coordinator: Coordinator, world: World) -> None:
        start = coordinator.list(world.prefix).revision
        watch = coordinator.watch(world.prefix, start)
        expected: list[WatchEvent] = []
        for i in range(30):
            key = f"{world.prefix}{i % 3}"
            if i % 5 == 4:
                expected.append(Removed(key, coordinator.transact([], [Delete(key)]).revision))
                assert coordinator.transact([], [Put(key, b"again")]).committed
            else:
                put(coordinator, key, b"%d" % i)
            entry = coordinator.get(key)
            assert entry is not None
            expected.append(Written(entry))
        put(coordinator, world.prefix[:-1] + "-other/a")
        assert collect(watch, len(expected)) == expected
        assert watch.next(0.1) == ()

    def test_a_watch_may_start_at_a_past_revision(self, coordinator: Coordinator, world: World) -> None:
        first = put(coordinator, world.prefix + "a", b"1")
        put(coordinator, world.prefix + "a", b"2")
        put(coordinator, world.prefix + "a", b"3")
        events = collect(coordinator.watch(world.prefix, first), 2)
        assert [event.entry.value for event in events if isinstance(event, Written)] == [b"2", b"3"]

    def test_a_transaction_makes_one_revision(self, coordinator: Coordinator, world: World) -> None:
        watch = coordinator.watch(world.prefix, coordinator.list(world.prefix).revision)
        result = coordinator.transact([], [Put(world.prefix + "a", b""), Put(world.prefix + "b", b"")])
        events = collect(watch, 2)
        assert {event.entry.mod_revision for event in events if isinstance(event, Written)} == {result.revision}

    def test_a_watch_reports_keys_of_an_expired_lease(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(_TTL_S)
        revision = put(coordinator, world.prefix + "a", lease_id=lease.id)
        watch = coordinator.watch(world.prefix, revision)
        world.pass_time(lease.ttl_s * 1.1)
        (event,) = collect(watch, 1)
        assert isinstance(event, Removed)
        assert event.key == world.prefix + "a"
        assert event.revision > revision

    def test_an_idle_watch_returns_nothing_after_the_timeout(self, coordinator: Coordinator, world: World) -> None:
        watch = coordinator.watch(world.prefix, coordinator.list(world.prefix).revision)
        start = time.monotonic()
        assert watch.next(0.2) == ()
        assert 0.15 < time.monotonic() - start < 5

    def test_closing_a_watch_ends_a_blocked_next(self, coordinator: Coordinator, world: World) -> None:
        watch = coordinator.watch(world.prefix, coordinator.list(world.prefix).revision)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(watch.next, 30)
            watch.close()
            assert waiting.result(_PATIENCE_S) == ()
        assert watch.next(30) == ()

    def test_a_watch_from_a_compacted_revision_raises(self, coordinator: Coordinator, world: World) -> None:
        first = put(coordinator, world.prefix + "a")
        for _ in range(3):
            put(coordinator, world.prefix + "a")
        world.compact()
        with pytest.raises(CompactedError):
            collect(coordinator.watch(world.prefix, first), 1)
        listing = coordinator.list(world.prefix)
        watch = coordinator.watch(world.prefix, listing.revision)
        revision = put(coordinator, world.prefix + "b")
        (event,) = collect(watch, 1)
        assert isinstance(event, Written)
        assert event.entry.mod_revision == revision

    def test_a_removal_at_the_compacted_revision_is_seen_or_raises(
        self, coordinator: Coordinator, world: World
    ) -> None:
        """Events that etcd before 3.4.34 and 3.5.15 silently drops from a watch that starts at the events' revision."""
        last_seen = put(coordinator, world.prefix + "a")
        removed = coordinator.transact([], [Delete(world.prefix + "a")]).revision
        assert removed == last_seen + 1
        world.compact()
        put(coordinator, world.prefix + "b")
        watch = coordinator.watch(world.prefix, last_seen)
        with contextlib.suppress(CompactedError):
            assert collect(watch, 2)[0] == Removed(world.prefix + "a", removed)

    def test_a_watch_that_is_up_to_date_survives_compaction(self, coordinator: Coordinator, world: World) -> None:
        watch = coordinator.watch(world.prefix, put(coordinator, world.prefix + "a"))
        put(coordinator, world.prefix + "a")
        collect(watch, 1)
        world.compact()
        put(coordinator, world.prefix + "a")
        assert len(collect(watch, 1)) == 1

    def test_a_closed_coordinator_is_unavailable(self, coordinator: Coordinator, world: World) -> None:
        coordinator.close()
        with pytest.raises(UnavailableError):
            coordinator.get(world.prefix)


class CoordinatorOutageContract:
    """Behavior while the store is stopped, and after it has been restarted."""

    @pytest.fixture
    def coordinator(self, world: World) -> Coordinator:
        return world.connect()

    def test_a_stopped_store_is_unavailable_at_once(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(60)
        world.stop()
        for act in (
            lambda: coordinator.get(world.prefix),
            lambda: coordinator.list(world.prefix),
            lambda: coordinator.transact([], [Put(world.prefix + "a", b"")]),
            lambda: coordinator.grant(5),
            lambda: coordinator.lease_ttl_s(lease.id),
            lease.renew,
            lease.revoke,
        ):
            start = time.monotonic()
            with pytest.raises(UnavailableError, match="FLIGHTEDL_ETCD"):
                act()
            assert time.monotonic() - start < 3

    def test_everything_works_again_after_a_restart(self, coordinator: Coordinator, world: World) -> None:
        lease = coordinator.grant(60)
        revision = put(coordinator, world.prefix + "a", b"1", lease.id)
        world.stop()
        with pytest.raises(UnavailableError):
            coordinator.get(world.prefix + "a")
        world.start()
        entry = persistently(lambda: coordinator.get(world.prefix + "a"))
        assert entry is not None
        assert (entry.value, entry.create_revision, entry.lease_id) == (b"1", revision, lease.id)
        persistently(lease.renew)

    def test_a_watch_survives_restarts(self, coordinator: Coordinator, world: World) -> None:
        writer = world.connect()
        watch = coordinator.watch(world.prefix, put(writer, world.prefix + "a"))
        seen: list[WatchEvent] = []
        revisions: list[int] = []
        for _ in range(3):
            revisions += [persistently(lambda: put(writer, world.prefix + "a")) for _ in range(3)]
            # The watch delivers some of the events before the outage and the rest after it.
            seen += collect(watch, 1)
            world.stop()
            seen += watch.next(0.1)
            world.start()
        seen += collect(watch, len(revisions) - len(seen)) if len(seen) < len(revisions) else []
        assert [event.entry.mod_revision for event in seen if isinstance(event, Written)] == revisions
        assert watch.next(0.3) == ()

    def test_events_compacted_during_an_outage_raise(self, coordinator: Coordinator, world: World) -> None:
        watch = coordinator.watch(world.prefix, put(coordinator, world.prefix + "a"))
        put(coordinator, world.prefix + "a")
        collect(watch, 1)
        world.stop()
        assert watch.next(0.1) == ()
        world.start()
        # A watch resumes only when it is read.
        other = world.connect()
        for _ in range(3):
            persistently(lambda: put(other, world.prefix + "a"))
        world.compact()
        with pytest.raises(CompactedError):
            collect(watch, 1)

    def test_a_lost_reply_raises_outcome_unknown(self, coordinator: Coordinator, world: World) -> None:
        put(coordinator, world.prefix + "a")
        world.lose_reply(coordinator)
        with pytest.raises(OutcomeUnknownError):
            coordinator.transact([], [Put(world.prefix + "b", b"1")])
        entry = eventually(lambda: persistently(lambda: coordinator.get(world.prefix + "b")))
        assert entry.value == b"1"


class CoordinatorHistoryContract:
    """Behavior when the store is rolled back: a connection that has seen a later revision refuses all requests."""

    @pytest.fixture
    def coordinator(self, world: RestorableWorld) -> Coordinator:
        return world.connect()

    def test_a_restart_is_not_a_rollback(self, coordinator: Coordinator, world: RestorableWorld) -> None:
        revision = put(coordinator, world.prefix + "a")
        seen = coordinator.sighting()
        assert seen is not None
        assert seen.revision == revision
        world.stop()
        world.start()
        assert persistently(lambda: coordinator.get(world.prefix + "a")) is not None
        again = coordinator.sighting()
        assert again is not None
        assert again.cluster == seen.cluster
        assert again.revision >= revision

    def test_a_client_that_saw_a_later_revision_rejects_a_rolled_back_store(
        self, coordinator: Coordinator, world: RestorableWorld
    ) -> None:
        put(coordinator, world.prefix + "a", b"old")
        restore = world.backup()
        lease = persistently(lambda: coordinator.grant(60))
        for _ in range(5):
            put(coordinator, world.prefix + "a", b"new")
        restore()
        with pytest.raises(RolledBackError, match="before: it was restored"):
            persistently(lambda: coordinator.get(world.prefix + "a"))
        # Let another client write until the store has reached the revision that the connection has seen.
        other = world.connect()
        for _ in range(9):
            persistently(lambda: put(other, world.prefix + "b"))
        for act in (
            lambda: coordinator.get(world.prefix + "a"),
            lambda: coordinator.list(world.prefix),
            lambda: coordinator.transact([], [Put(world.prefix + "a", b"late")]),
            lambda: coordinator.grant(5),
            lease.renew,
            lease.revoke,
        ):
            with pytest.raises(RolledBackError):
                act()
        entry = other.get(world.prefix + "a")
        assert entry is not None
        assert entry.value == b"old"

    def test_a_watch_detects_a_rollback_or_asks_its_reader_to_list_again(
        self, coordinator: Coordinator, world: RestorableWorld
    ) -> None:
        put(coordinator, world.prefix + "a")
        restore = world.backup()
        watch = coordinator.watch(world.prefix, persistently(lambda: put(coordinator, world.prefix + "a")))
        put(coordinator, world.prefix + "a")
        collect(watch, 1)
        restore()
        with pytest.raises((CompactedError, RolledBackError)):
            collect(watch, 1)
        with pytest.raises(RolledBackError):
            persistently(lambda: coordinator.list(world.prefix))
        with pytest.raises(RolledBackError):
            watch.next(0.5)

    def test_another_cluster_is_rejected_even_at_a_later_revision(
        self, coordinator: Coordinator, world: RestorableWorld
    ) -> None:
        seen = put(coordinator, world.prefix + "a")
        world.begin_again()
        other = world.connect()
        while persistently(lambda: put(other, world.prefix + "a")) <= seen:
            pass
        with pytest.raises(RolledBackError, match="cluster"):
            persistently(lambda: coordinator.get(world.prefix + "a"))
