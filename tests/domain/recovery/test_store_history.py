"""A store that has gone back is detected, and later values count as newer."""

from __future__ import annotations

import pytest

from flightedl.domain.recovery.store_history import (
    LIFE_REVISIONS,
    BeginLife,
    GoOn,
    Refuse,
    Sighting,
    Witness,
    judge,
    life_after,
    life_of,
    needs_new_life,
    older_than,
)

A, B = "a" * 16, "b" * 16


def witness(*seen: Sighting) -> Witness:
    made = Witness()
    for sighting in seen:
        assert not made.saw(made.seen, sighting)
    return made


def test_the_first_sighting_is_accepted() -> None:
    assert witness(Sighting(A, 1)).seen == Sighting(A, 1)


def test_a_store_with_a_rising_revision_is_the_same() -> None:
    seen = witness(Sighting(A, 5), Sighting(A, 5), Sighting(A, 9))
    assert seen.seen == Sighting(A, 9)


@pytest.mark.parametrize(("now", "word"), [(Sighting(A, 8), "revision 8"), (Sighting(B, 100), f"cluster id {B}")])
def test_a_rolled_back_store_is_refused_permanently(now: Sighting, word: str) -> None:
    seen = witness(Sighting(A, 9))
    assert word in seen.saw(seen.seen, now)
    # Even if its revision has caught up.
    assert word in seen.saw(seen.seen, Sighting(A, 10))
    assert seen.seen == Sighting(A, 9)


def test_an_answer_is_compared_with_the_sighting_at_its_request() -> None:
    seen = witness(Sighting(A, 5))
    first, second = seen.seen, seen.seen
    assert not seen.saw(second, Sighting(A, 9))
    assert not seen.saw(first, Sighting(A, 7))
    assert seen.seen == Sighting(A, 9)


def test_an_answer_that_may_be_old_proves_only_another_cluster() -> None:
    seen = witness(Sighting(A, 5))
    assert not seen.saw(seen.seen, Sighting(A, 3), is_current=False)
    assert seen.saw(seen.seen, Sighting(B, 9), is_current=False)


@pytest.mark.parametrize(
    ("present", "begun_on", "next_number", "newest_number", "newest", "word"),
    [
        (Sighting(A, 50), A, 4, 3, Sighting(A, 49), ""),
        (Sighting(A, 50), "", 1, 0, None, ""),
        (Sighting(A, 50), A, 3, 3, Sighting(A, 49), "checkpoint 3 is already complete"),
        (Sighting(A, 50), A, 1, 1, None, "checkpoint 1 is already complete"),
        (Sighting(A, 50), A, 4, 3, Sighting(A, 50), ""),
        (Sighting(A, 50), A, 4, 3, Sighting(A, 51), "was at 51"),
        (Sighting(B, 50), A, 4, 3, Sighting(A, 49), f"state belongs to cluster {A}"),
        # Resumed on another etcd, without a checkpoint on it yet.
        (Sighting(B, LIFE_REVISIONS + 5), B, 4, 3, Sighting(A, 700), ""),
    ],
)
def test_a_state_older_than_the_newest_checkpoint_is_detected(
    present: Sighting, begun_on: str, next_number: int, newest_number: int, newest: Sighting | None, word: str
) -> None:
    reason = older_than(present, begun_on, next_number, newest_number, newest)
    assert word in reason
    assert bool(reason) == bool(word)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (Sighting(A, 701), False),
        (Sighting(A, 699), True),
        (Sighting(B, 5000), True),
        (Sighting(A, LIFE_REVISIONS + 1), False),
        (Sighting(B, LIFE_REVISIONS + 1), False),
    ],
)
def test_a_job_resumed_from_a_state_older_than_its_checkpoint_begins_a_new_life(
    present: Sighting, *, expected: bool
) -> None:
    assert needs_new_life(present, Sighting(A, 700)) is expected


def test_generations_of_a_new_life_are_newer_than_all_earlier_ones() -> None:
    newest = Sighting(A, LIFE_REVISIONS + 1_000_000)
    for stored in (0, 1, 2):
        life = life_after(stored, newest)
        assert life > stored
        assert life * LIFE_REVISIONS + 1 > newest.revision
        assert life_of(life * LIFE_REVISIONS + 1) == life
    assert life_after(0, None) == 1


@pytest.mark.parametrize(
    ("begun_on", "next_number", "newest", "resume", "verdict"),
    [
        ("", None, None, False, GoOn()),
        (A, 4, Sighting(A, 20), False, GoOn()),
        (A, 3, Sighting(A, 20), False, Refuse),
        (A, 3, Sighting(A, 20), True, BeginLife),
        (A, 4, Sighting(A, 31), True, BeginLife),
        (B, 4, None, True, BeginLife),
        (B, None, None, False, BeginLife(1, "")),
        (A, None, Sighting(B, 20), False, GoOn()),
        (A, None, Sighting(B, 20), True, BeginLife(1, "")),
        (A, None, Sighting(A, 20), True, GoOn()),
        (A, None, Sighting(A, 2 * LIFE_REVISIONS + 1), True, BeginLife(3, "")),
    ],
)
def test_a_master_decides_by_the_stored_state(
    begun_on: str, next_number: int | None, newest: Sighting | None, resume: bool, verdict: object
) -> None:
    found = judge(Sighting(A, 30), 0, begun_on, next_number, 3, newest, resume=resume)
    assert found == verdict or (isinstance(verdict, type) and isinstance(found, verdict))


def test_without_a_checkpoint_a_rolled_back_state_is_refused() -> None:
    assert isinstance(judge(Sighting(A, 30), 0, B, 1, 0, None, resume=True), Refuse)
