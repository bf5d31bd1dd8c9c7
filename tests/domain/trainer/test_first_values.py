"""The trainer that initializes the model."""

from __future__ import annotations

import pytest

from flightedl.domain.trainer.first_values import (
    Candidate,
    Confirm,
    CreateKey,
    Elected,
    ElectionOfFirstValues,
    FollowedElection,
    Pause,
    ReadKey,
    Upload,
    WaitFor,
)
from flightedl.errors import BegunAnewError, FencedError, NotReadyError, OutcomeUnknownError


def standing(pservers: int = 2) -> ElectionOfFirstValues:
    """Return an election that this trainer has won, as election 5."""
    election = ElectionOfFirstValues("me", pservers)
    assert election.next_step() == ReadKey()
    election.key_read(None)
    assert election.next_step() == CreateKey()
    election.creation_attempted()
    assert election.next_step() == ReadKey()
    election.key_read(Candidate("me", False, 5, 5))
    return election


def test_the_winner_sends_its_values_to_all_and_reports_it() -> None:
    election = standing()
    assert election.next_step() == Upload(0, 5)
    election.uploaded(11, 3, 3)
    assert election.next_step() == Upload(1, 5)
    election.uploaded(12, 2, 2)
    assert election.next_step() == Confirm(5, (11, 12))
    election.confirmed(30)
    assert election.next_step() == Elected(5, 30)


def test_a_loser_waits_for_the_winner() -> None:
    election, other = ElectionOfFirstValues("me", 1), Candidate("other", False, 4, 4)
    election.key_read(other)
    assert election.next_step() == WaitFor(other)
    assert election.next_step() == ReadKey()
    election.key_read(Candidate("other", True, 4, 9))
    assert election.next_step() == Elected(4, 9)


def test_others_may_be_elected_after_a_winner_has_died() -> None:
    election = ElectionOfFirstValues("me", 1)
    election.key_read(None)
    election.creation_attempted()
    election.key_read(None)
    assert isinstance(election.next_step(), Pause)
    assert election.next_step() == ReadKey()
    election.key_read(None)
    assert election.next_step() == CreateKey()


def test_an_upload_ends_when_a_newer_election_is_known() -> None:
    election = standing()
    assert election.next_step(newest=5) == Upload(0, 5)
    assert election.next_step(newest=6) == Pause("another trainer provides the initial values")
    assert election.next_step(newest=6) == ReadKey()


def test_an_upload_ends_when_a_pserver_has_newer_values() -> None:
    election = standing()
    election.next_step()
    election.uploaded(11, 2, 3)
    assert isinstance(election.next_step(), Pause)
    assert election.next_step() == ReadKey()


def test_values_are_sent_again_to_a_pserver_that_does_not_answer() -> None:
    election = standing()
    election.uploaded(11, 3, 3)
    election.failed(OutcomeUnknownError("cut"))
    assert election.next_step() == Pause("cut")
    assert election.next_step() == Upload(1, 5)


def test_permanent_errors_are_raised() -> None:
    with pytest.raises(FencedError):
        standing().failed(FencedError("another plan"))


def test_all_values_are_sent_again_when_a_pserver_was_replaced() -> None:
    election = standing(1)
    election.uploaded(11, 3, 3)
    assert election.next_step() == Confirm(5, (11,))
    election.confirmed(None)
    assert isinstance(election.next_step(), Pause)
    assert election.next_step() == ReadKey()
    election.key_read(Candidate("me", False, 5, 5))
    assert election.next_step() == Upload(0, 5)
    election.uploaded(15, 3, 3)
    assert election.next_step() == Confirm(5, (15,))


def test_an_unanswered_write_is_looked_up() -> None:
    election = standing(1)
    election.uploaded(11, 3, 3)
    election.failed(NotReadyError("etcd is away"))
    assert election.next_step() == Pause("etcd is away")
    assert election.next_step() == ReadKey()


class TestTheModelOfATrainer:
    followed = FollowedElection(Elected(5, 30))

    def test_is_that_of_its_election(self) -> None:
        self.followed.require_same(5, 40)

    def test_may_be_unknown_yet(self) -> None:
        self.followed.require_same(None, 29)
        self.followed.require_same(4, 20)

    @pytest.mark.parametrize(("election", "revision"), [(6, 40), (None, 30)])
    def test_may_be_over(self, election: int | None, revision: int) -> None:
        with pytest.raises(BegunAnewError):
            self.followed.require_same(election, revision)
