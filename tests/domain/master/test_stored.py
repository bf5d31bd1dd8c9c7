"""The keys of a master's state: what is written, and the meaning of an unknown outcome."""

from __future__ import annotations

import pytest

from flightedl.domain.master.stored import StoredKeys, Write, state_in
from flightedl.messages.base import encode
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.tasks import StopRecord


@pytest.fixture
def keys() -> StoredKeys:
    return StoredKeys({"queue": (b"q", 7), "membership": (b"m", 5)})


def test_only_changed_values_are_written_and_compared(keys):
    values = {"queue": b"q2", "membership": b"m", "stopped": b"s"}
    assert keys.next_write(values) == Write({"queue": b"q2", "stopped": b"s"}, {"queue": 7, "stopped": 0})


def test_unchanged_values_are_not_written(keys):
    assert keys.next_write({"queue": b"q", "membership": b"m"}) is None


def test_the_next_write_compares_with_the_previous_one(keys):
    write = keys.next_write({"queue": b"q2"})
    keys.committed(write, 9)
    assert keys.next_write({"queue": b"q2"}) is None
    assert keys.next_write({"queue": b"q3"}) == Write({"queue": b"q3"}, {"queue": 9})


def test_an_earlier_attempt_that_was_applied_is_adopted(keys):
    write = keys.next_write({"queue": b"q2", "stopped": b"s"})
    assert keys.adopt(write, {"queue": (b"q2", 9), "stopped": (b"s", 9)})
    assert keys.next_write({"queue": b"q3", "stopped": b"s"}) == Write({"queue": b"q3"}, {"queue": 9})


@pytest.mark.parametrize("found", [{}, {"queue": (b"q2", 9)}, {"queue": (b"q2", 9), "stopped": (b"other", 9)}])
def test_keys_written_by_another_process_are_not_adopted(keys, found):
    write = keys.next_write({"queue": b"q2", "stopped": b"s"})
    assert not keys.adopt(write, {"queue": None, "stopped": None} | found)
    assert keys.next_write({"queue": b"q2", "stopped": b"s"}) == write, "nothing has changed"


def test_a_queue_stored_together_with_the_declaration_is_resumed():
    declared = encode(JobDeclaration())
    assert state_in({"declaration": (declared, 4), "queue": (b"q", 4)}).is_resumed
    assert not state_in({"declaration": (declared, 4), "queue": (b"q", 5)}).is_resumed
    assert not state_in({"declaration": (declared, 4)}).is_resumed


def test_missing_keys_are_absent_from_the_state():
    assert state_in({}).queue is None
    assert state_in({}).stop is None
    assert state_in({"stopped": (encode(StopRecord(reason="r")), 1)}).stop.reason == "r"
