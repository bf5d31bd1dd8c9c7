"""The directory of servers: its contents, its subscriptions, and outages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord, TrainerRecord
from flightedl.ports import Delete
from tests.support.contracts.coordinator import eventually, put
from tests.support.etcd_server import EtcdServer
from tests.support.memory import MemoryCoordinator
from tests.support.proxy import TcpProxy

from .process_clock import ProcessClock


def server(address: str, generation: int = 0) -> bytes:
    return msgspec.json.encode(ServerRecord(address=address, generation=generation, name="x", pid=1))


@pytest.fixture
def directory(coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock) -> Iterator[Directory]:
    with Directory(coordinator.another(), keys, clock) as directory:
        yield directory


def test_an_empty_job_has_no_servers(directory: Directory) -> None:
    assert directory.wait_until(lambda d: d.revision or None, 5) is not None
    assert directory.master() is None
    assert directory.pservers() == {}
    assert directory.trainers() == {}
    assert directory.ps_desired() is None


def test_earlier_and_later_servers_are_both_known(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    put(coordinator, keys.ps_desired, b"2")
    first = put(coordinator, keys.pserver(0), server("h:1"))
    with Directory(coordinator.another(), keys, clock) as directory:
        assert directory.wait_until(lambda d: d.pservers().get(0), 5) is not None
        second = put(coordinator, keys.pserver(1), server("h:2"))
        put(coordinator, keys.master_address, server("h:3", 77))
        put(coordinator, keys.trainer("t"), msgspec.json.encode(TrainerRecord(id="t", host="h", pid=5)))
        assert directory.wait_until(lambda d: d.trainers().get("t"), 5) is not None
        assert directory.ps_desired() == 2
        assert {i: (r.address, r.generation) for i, r in directory.pservers().items()} == {
            0: ("h:1", first),
            1: ("h:2", second),
        }
        master = directory.master()
        assert master is not None
        assert (master.address, master.generation) == ("h:3", 77)
        trainer = directory.trainers()["t"]
        entry = directory.entry(keys.trainer("t"))
        assert entry is not None
        assert trainer == TrainerRecord(id="t", generation=entry.create_revision, host="h", pid=5)


def test_a_replaced_server_has_a_new_generation(
    directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys
) -> None:
    first = put(coordinator, keys.pserver(0), server("h:1"))
    coordinator.transact([], [Delete(keys.pserver(0))])
    second = put(coordinator, keys.pserver(0), server("h:1"))
    assert directory.wait_until(lambda d: d.revision >= second or None, 5)
    assert directory.pservers()[0].generation == second > first


def test_a_server_that_leaves_is_removed(directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys) -> None:
    put(coordinator, keys.pserver(0), server("h:1"))
    assert directory.wait_until(lambda d: d.pservers() or None, 5)
    coordinator.transact([], [Delete(keys.pserver(0))])
    assert directory.wait_until(lambda d: True if not d.pservers() else None, 5)


def test_values_that_are_not_records_are_ignored(
    directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys
) -> None:
    put(coordinator, keys.pserver(0), b"{not json")
    put(coordinator, keys.pserver(1), b'{"address": 5}')
    put(coordinator, keys.ps_desired, b"two")
    last = put(coordinator, keys.pserver(2), b'{"address": "h:1", "of a newer version": 1}')
    assert directory.wait_until(lambda d: d.revision >= last or None, 5)
    assert list(directory.pservers()) == [2]
    assert directory.ps_desired() is None


def test_the_state_of_the_master_and_other_jobs_are_ignored(
    directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys
) -> None:
    calls: list[int] = []
    assert directory.wait_until(lambda d: d.revision or None, 5)
    directory.subscribe(lambda: calls.append(directory.revision))
    put(coordinator, JobKeys("demo2").pserver(0), server("h:1"))
    put(coordinator, keys.membership, b"x")
    put(coordinator, keys.task_queues, b"x")
    last = put(coordinator, keys.ps_desired, b"2")
    eventually(lambda: calls)
    assert directory.entry(keys.task_queues) is None
    assert directory.entry(keys.membership) is None
    assert directory.pservers() == {}
    assert calls == [last]


def test_subscribers_are_called_after_the_change_even_if_another_one_raises(
    directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, int]] = []
    changed = threading.Event()

    def note() -> None:
        seen.append((threading.current_thread().name, len(directory.pservers())))
        if seen[-1][1]:
            changed.set()

    directory.subscribe(lambda: 1 // 0)
    directory.subscribe(note)
    put(coordinator, keys.pserver(0), server("h:1"))
    assert changed.wait(5)
    assert seen[-1] == ("flightedl-directory", 1)
    assert "a subscriber of the directory failed" in caplog.text


def test_an_error_of_a_subscriber_is_reported(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    errors: list[Exception] = []
    with Directory(coordinator, keys, clock, errors.append) as directory:
        directory.subscribe(lambda: 1 // 0)
        put(coordinator, keys.pserver(0), server("h:1"))
        eventually(lambda: errors)
    assert isinstance(errors[0], ZeroDivisionError)


def test_a_wait_ends_at_its_timeout_and_at_close(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    directory = Directory(coordinator, keys, clock).start()
    start = clock.now()
    assert directory.wait_until(lambda d: d.master(), 0.1) is None
    assert 0.1 <= clock.now() - start < 2
    closer = threading.Timer(0.1, directory.close)
    closer.start()
    assert directory.wait_until(lambda d: d.master(), 30) is None
    closer.join()
    assert clock.now() - start < 5


def test_an_outage_keeps_known_servers_and_reports_the_cause(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    connection = coordinator.another()
    connection.disconnect()
    with Directory(connection, keys, clock) as directory:
        eventually(lambda: "cannot be reached" in directory.trouble)
        connection.reconnect()
        put(coordinator, keys.pserver(0), server("h:1"))
        assert directory.wait_until(lambda d: d.pservers() or None, 5)
        assert directory.trouble == ""
        connection.disconnect()
        put(coordinator, keys.pserver(1), server("h:2"))
        assert list(directory.pservers()) == [0]
        connection.reconnect()
        assert directory.wait_until(lambda d: d.pservers().get(1), 5)


def test_compaction_makes_the_directory_list_again(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    connection = coordinator.another()
    put(coordinator, keys.pserver(0), server("h:1"))
    with Directory(connection, keys, clock) as directory:
        assert directory.wait_until(lambda d: d.pservers() or None, 5)
        connection.disconnect()
        coordinator.transact([], [Delete(keys.pserver(0))])
        put(coordinator, keys.pserver(1), server("h:2"))
        coordinator.compact()
        connection.reconnect()
        assert directory.wait_until(lambda d: d.pservers().get(1), 5)
        assert list(directory.pservers()) == [1]


@pytest.mark.etcd
@pytest.mark.faults
def test_the_directory_survives_a_restart_and_a_compaction_of_etcd(
    own_etcd: EtcdServer, keys: JobKeys, machine_clock: SystemClock
) -> None:
    writer = EtcdCoordinator(own_etcd.address, clock=machine_clock)
    follower = EtcdCoordinator(own_etcd.address, clock=machine_clock)
    with Directory(follower, keys, machine_clock) as directory:
        put(writer, keys.pserver(0), server("h:1"))
        assert directory.wait_until(lambda d: d.pservers() or None, 5)
        own_etcd.restart()
        writer.close()
        writer = EtcdCoordinator(own_etcd.address, clock=machine_clock)
        put(writer, keys.pserver(1), server("h:2"))
        put(writer, keys.pserver(1), server("h:3"))
        own_etcd.compact()
        assert directory.wait_until(lambda d: len(d.pservers()) == 2 or None, 10)
        assert directory.pservers()[1].address == "h:3"
    writer.close()
    follower.close()


@pytest.mark.etcd
@pytest.mark.faults
def test_changes_compacted_while_the_watch_is_cut_are_listed_again(
    own_etcd: EtcdServer, keys: JobKeys, machine_clock: SystemClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    direct = EtcdCoordinator(own_etcd.address, clock=machine_clock)
    put(direct, keys.pserver(0), server("h:1"))
    put(direct, keys.pserver(1), server("h:2"))
    with TcpProxy(own_etcd.address) as proxy:
        coordinator = EtcdCoordinator(proxy.address, clock=machine_clock)
        with Directory(coordinator, keys, machine_clock) as directory:
            assert directory.wait_until(lambda d: d.pservers().get(1), 10) is not None
            proxy.refuse()
            put(direct, keys.pserver(0), server("h:3"))
            direct.transact([], [Delete(keys.pserver(1))])
            put(direct, keys.pserver(2), server("h:4"))
            direct.compact()
            assert not directory.wait_until(lambda d: d.pservers().get(2), 0.5)
            proxy.heal()
            assert directory.wait_until(lambda d: d.pservers().get(2), 10) is not None
            assert {index: found.address for index, found in directory.pservers().items()} == {0: "h:3", 2: "h:4"}
            assert "listed again" in caplog.text
            put(direct, keys.pserver(3), server("h:5"))
            assert directory.wait_until(lambda d: d.pservers().get(3), 10) is not None
            assert caplog.text.count("listed again") == 1
        coordinator.close()
    direct.close()


def test_a_change_during_the_evaluation_of_a_predicate_is_not_missed(
    directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys
) -> None:
    """The directory must not wait for the next change if one came while the predicate was evaluated."""
    assert directory.wait_until(lambda d: d.revision or None, 5) is not None
    seen: list[str] = []

    def predicate(known: Directory) -> str | None:
        if not seen:
            assert known.ps_desired() is None
            seen.append("evaluated")
            put(coordinator, keys.ps_desired, b"2")
            eventually(lambda: known.ps_desired() == 2)
            return None
        return seen[0]

    began = time.monotonic()
    assert directory.wait_until(predicate, 20) == "evaluated"
    assert time.monotonic() - began < 10


def test_an_old_entry_is_not_enough_to_catch_up(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    put(coordinator, keys.ps_desired, b"1")
    with Directory(coordinator.another(), keys, clock) as directory:
        assert directory.catch_up(keys.ps_desired, 5)
    # A closed directory no longer follows, and waits for nothing.
    assert directory.catch_up(keys.ps_desired, 5)
    put(coordinator, keys.ps_desired, b"2")
    assert not directory.catch_up(keys.ps_desired, 5)
    assert directory.ps_desired() == 1


def test_a_removal_advances_the_revision(directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys) -> None:
    put(coordinator, keys.ps_desired, b"2")
    removed = coordinator.transact([], [Delete(keys.ps_desired)]).revision
    assert directory.wait_until(lambda d: d.revision >= removed or None, 5)
    assert directory.ps_desired() is None


def test_a_process_notices_at_once_that_its_key_was_deleted(
    directory: Directory, coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    lost: list[str] = []
    # The lease is renewed no earlier than after ten seconds.
    held = HeldKey.claim(coordinator.another(), clock, keys.trainer("t"), b"{}", 30.0, lost.append)
    assert held is not None
    directory.watch_over(lambda: held)
    put(coordinator, keys.trainer("other"), b"{}")
    assert directory.wait_until(lambda d: d.entry(keys.trainer("other")), 5) is not None
    assert held.is_held
    coordinator.transact([], [Delete(keys.trainer("t"))])
    eventually(lambda: lost, 5)
    assert not held.is_held
    assert "deleted by another process" in lost[0]
    held.release()


def test_a_directory_older_than_a_key_does_not_end_it(
    coordinator: MemoryCoordinator, keys: JobKeys, clock: ProcessClock
) -> None:
    held = HeldKey.claim(coordinator, clock, keys.trainer("t"), b"{}", 30.0)
    assert held is not None
    held.seen(None, held.generation - 1)
    assert held.is_held
    held.seen(None, held.generation)
    assert not held.is_held
    held.release()
