"""The pservers whose values are the result."""

from __future__ import annotations

import pytest

from flightedl.domain.trainer.ending import JobEnd
from flightedl.errors import BegunAnewError, NotReadyError
from flightedl.messages.tasks import TasksReply


def done(*pservers: int) -> TasksReply:
    return TasksReply(assignments=[], outcome="epochs_done", pservers=list(pservers))


ENDING = TasksReply(assignments=[], outcome="none_now", is_ending=True)
REOPENED = TasksReply(assignments=[], outcome="none_now")


def test_the_present_processes_are_read_while_a_job_trains() -> None:
    end = JobEnd()
    end.replied(ENDING)
    assert end.may_read(0, 1)


def test_the_complete_processes_are_read_after_the_end() -> None:
    end = JobEnd()
    end.replied(done(3, 4))
    assert end.may_read(0, 3)
    assert not end.may_read(1, 5)
    assert not end.may_read(1, 3), "a process that has ended"
    end.require(done(3, 4), 1, 4)
    assert end.may_read(2, 9), "the master did not name this one"


def test_a_replacement_is_read_once_the_master_names_it() -> None:
    end = JobEnd()
    end.replied(done(3, 4))
    with pytest.raises(NotReadyError):
        end.require(ENDING, 1, 7)
    end.replied(done(3, 7))
    end.require(done(3, 7), 1, 7)


def test_lost_work_requires_a_restart_of_the_trainer() -> None:
    end = JobEnd()
    end.replied(done(3, 4))
    with pytest.raises(BegunAnewError, match="restart this trainer"):
        end.require(REOPENED, 1, 7)
