"""Exhaustive exploration of a pserver with a standby: all orders of events in small configurations, planted bugs."""

import pytest

from flightedl.domain.moving.standby import (
    UNCLAIMED_S,
    Claim,
    CopyId,
    CopySource,
    StandbyCopy,
    claims,
    has_unclaimed,
    index_to_follow,
    keeps_following,
)
from tests.domain.moving.standby_world import Limits, first_world, is_end, steps, wrong
from tests.exploration import Explored, ViolationError, explore
from tests.support.planting import Edit, answers, bug, planted, swaps

_CORE = "domain.moving.standby:"

SMALL = {
    "a crash and two copies": Limits(),
    "a stream breaks, and three copies": Limits(batches=1, copies=3, breaks=1, crashes=1),
    "a lease ends early": Limits(batches=1, copies=2, breaks=0, crashes=0, freezes=1),
    "the model is initialized again": Limits(copies=1, breaks=0, crashes=1, elections=1),
    "two crashes": Limits(copies=1, breaks=0, crashes=2),
}

#: Name of the bug -> configuration that shows it, and the edit that plants it.
BUGS: dict[str, tuple[str, Edit]] = {
    "changes replace the content part by part": (
        "a crash and two copies",
        answers(f"{_CORE}StandbyCopy.is_kept_back", "False"),
    ),
    "changes follow a copy that did not arrive": (
        "a stream breaks, and three copies",
        swaps(f"{_CORE}CopySource.begin", "self.newest == Sent(standby, has) if has is not None else False", "has"),
    ),
    "an incomplete copy of everything is served": (
        "a stream breaks, and three copies",
        swaps(f"{_CORE}StandbyCopy.begin", "self.has = None", "pass"),
    ),
    "a copy of an earlier election is served": (
        "the model is initialized again",
        swaps(f"{_CORE}StandbyCopy.is_usable", " and self.has.election == election", ""),
    ),
    "a standby does not name itself in its claim": (
        "a crash and two copies",
        swaps(f"{_CORE}claims", "0 if own is None else own[1]", "0"),
    ),
}


def explored(name: str) -> Explored:
    return explore(first_world(SMALL[name]), steps, wrong, is_end)


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_events_keeps_done_batches(name: str) -> None:
    found = explored(name)
    assert found.events.keys() >= {"push", "report", "claim", "announce", "complete"}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    where, edit = BUGS[name]
    with planted([bug(name, edit)]), pytest.raises(ViolationError):
        explored(where)


def test_a_copy_contains_only_changes_if_the_standby_has_the_newest_copy() -> None:
    source, standby = CopySource(generation=5), StandbyCopy()
    first = source.begin(9, standby.has, election=2, knows_changes=True)
    assert first == CopyId(source=5, election=2, number=1, after=0)
    assert standby.begin(first)
    assert standby.end([1], [1])
    second = source.begin(9, standby.has, election=2, knows_changes=True)
    assert second.after == 1
    assert standby.begin(second)
    standby.fail()
    assert standby.is_usable(2, None), "the failed copy has changed nothing"
    assert source.begin(9, standby.has, election=2, knows_changes=True).after == 0


def test_changes_are_kept_back_while_the_former_content_is_usable() -> None:
    standby = StandbyCopy(has=CopyId(source=5, election=2, number=1))
    assert standby.begin(CopyId(5, 2, 2, after=1))
    assert standby.is_kept_back
    assert standby.is_usable(2, None)
    standby.overwrite()
    assert not standby.is_usable(2, None)


def test_a_copy_of_everything_overwrites_the_former_content() -> None:
    standby = StandbyCopy(has=CopyId(source=5, election=2, number=1))
    assert standby.begin(CopyId(6, 2, 1))
    assert not standby.is_kept_back
    assert not standby.is_usable(2, None)
    standby.fail()
    assert not standby.is_usable(2, None), "half of the content may be that of the new copy"


def test_a_copy_contains_everything_if_changes_are_unknown() -> None:
    source = CopySource(generation=5)
    first = source.begin(9, None, election=2, knows_changes=True)
    assert source.begin(9, first, election=2, knows_changes=False).after == 0


def test_changes_that_follow_another_copy_are_refused() -> None:
    standby = StandbyCopy(has=CopyId(source=5, election=2, number=1))
    for copy in (CopyId(5, 2, 3, after=2), CopyId(6, 2, 2, after=1), CopyId(5, 4, 2, after=1)):
        assert not standby.begin(copy)
    assert standby.begin(CopyId(5, 2, 2, after=1))


def test_another_standby_gets_everything() -> None:
    source = CopySource(generation=5)
    first = source.begin(9, None, election=2, knows_changes=True)
    assert source.begin(10, first, election=2, knows_changes=True).after == 0


def test_only_its_standby_claims_an_index() -> None:
    assert list(claims(3, {1}, {0: 8}, None)) == [Claim(2)]
    assert list(claims(3, {1}, {0: 8}, (0, 8))) == [Claim(0, 8)]
    assert list(claims(3, {0, 1}, {0: 8}, (0, 8))) == []


def test_a_standby_follows_the_first_pserver_without_one() -> None:
    assert index_to_follow(3, {0, 1, 2}, {0: 8}) == 1
    assert index_to_follow(3, {0, 1, 2}, {1: 8}) == 0
    assert index_to_follow(2, {0, 1, 2}, {0, 1}) is None


def test_a_copy_of_other_blocks_is_unusable() -> None:
    standby = StandbyCopy()
    assert standby.follow("blocks 1 and 2")
    assert standby.begin(CopyId(source=5, election=2, number=1))
    assert standby.end([1, 2], [1, 2])
    assert standby.is_usable(2, "blocks 1 and 2")
    assert not standby.is_usable(2, "block 1"), "a block has moved away"
    assert not standby.follow("blocks 1 and 2")
    assert standby.has is not None
    assert standby.follow("block 1")
    assert standby.has is None
    assert standby.begin(CopyId(5, 2, 2))
    assert not standby.end([1], [1, 2]), "the source knows an older placement"
    assert not standby.is_usable(2, "block 1")


def test_a_standby_starts_over_when_no_blocks_are_moving_anymore() -> None:
    standby = StandbyCopy()
    assert standby.waits("first", "plan 1", is_moving=True)
    assert not standby.waits("first", "plan 1", is_moving=False)
    standby.follow("first")
    assert not standby.waits("first", "plan 2", is_moving=True), "other blocks are moving"
    assert standby.waits("second", "plan 3", is_moving=False), "the next move may follow"
    assert standby.waits("second", "plan 3", is_moving=True)
    assert not standby.waits("second", "plan 3", is_moving=False)


@pytest.mark.parametrize(
    ("revision", "standbys", "keeps"),
    [(7, {}, True), (8, {1: 8}, True), (8, {}, False), (20, {1: 9}, False)],
    ids=["the state is too old", "its key exists", "it was dismissed", "another process is the standby"],
)
def test_a_standby_that_was_dismissed_drops_its_copy(revision: int, standbys: dict[int, int], keeps: bool) -> None:
    assert keeps_following((1, 8), 2, revision, standbys, 0.0) == keeps
    assert not keeps_following((1, 8), 1, revision, standbys, 0.0), "the job needs fewer pservers"


def test_the_newest_standby_gives_up_its_copy_if_an_index_stays_free() -> None:
    standbys = {0: 8, 1: 9}
    for own, keeps in (((0, 8), True), ((1, 9), False)):
        assert keeps_following(own, 3, 20, standbys, UNCLAIMED_S) == keeps
        assert keeps_following(own, 3, 20, standbys, UNCLAIMED_S - 1), "there may be a spare"
    assert has_unclaimed(3, [0, 1], standbys)
    assert not has_unclaimed(3, [0, 1, 2], standbys), "no index is free"
    assert not has_unclaimed(3, [1, 2], standbys), "its standby claims it"
    assert index_to_follow(4, {0, 1, 2}, {0: 8}) is None, "a free index is claimed instead"
    assert index_to_follow(3, {1, 2}, {0: 8}) == 1
