"""The audit: which pservers are asked when, and which answers count."""

from __future__ import annotations

import pytest

from flightedl.domain.recovery.audit import ROUNDS_LIMIT, Audit
from flightedl.domain.recovery.replay import AppliedSummary

SIZE = 8


def size(_epoch: int) -> int:
    return SIZE


def having(*tasks: int, epochs: int = 1) -> AppliedSummary:
    bits = sum(1 << task for task in tasks).to_bytes(1, "little")
    return AppliedSummary(done=dict.fromkeys(range(epochs), bits))


ALL = having(*range(SIZE))


def ask(audit: Audit, index: int, generation: int = 1, summary: AppliedSummary = ALL) -> dict[int, list[object]]:
    serial = audit.wanted(index, generation)
    assert serial is not None
    found = audit.answered(index, generation, serial, summary, size)
    audit.found(sum(tasks.size for tasks in found.values()))
    return {epoch: list(tasks) for epoch, tasks in found.items()}


def test_pservers_are_not_asked_before_an_epoch_has_ended() -> None:
    audit = Audit(2)
    assert not audit.epochs_ended(0, 5, is_last=False)
    assert audit.wanted(0, 1) is None


def test_each_finished_epoch_is_audited_once() -> None:
    audit = Audit(1)
    assert audit.epochs_ended(1, 5, is_last=False)
    assert not audit.epochs_ended(1, 6, is_last=False), "batches of the next epoch do not matter"
    assert ask(audit, 0) == {}
    assert audit.wanted(0, 1) is None
    assert audit.epochs_ended(2, 9, is_last=False)
    assert ask(audit, 0, summary=having(*range(SIZE), epochs=2)) == {}


def test_only_missing_tasks_of_finished_epochs_are_reported() -> None:
    audit = Audit(1)
    audit.epochs_ended(1, 5, is_last=False)
    assert ask(audit, 0, summary=having(0, 1, 2, 3, 6, 7)) == {0: [(4, 6)]}
    assert audit.missing_count == 2


def test_an_audit_is_clean_when_all_have_answered_and_nothing_has_changed_since() -> None:
    audit = Audit(2)
    audit.epochs_ended(1, 5, is_last=True)
    present = {0: 1, 1: 1}
    assert not audit.is_clean(5, present)
    ask(audit, 0)
    assert not audit.is_clean(5, present), "one has not answered"
    ask(audit, 1)
    assert audit.is_clean(5, present)
    assert not audit.is_clean(6, present), "tasks were reopened"
    assert not audit.is_clean(5, {0: 1, 1: 2}), "the replacement of a process was not asked"


def test_the_end_of_an_inner_epoch_is_not_the_end_of_the_job() -> None:
    audit = Audit(1)
    audit.epochs_ended(1, 5, is_last=False)
    ask(audit, 0)
    assert not audit.is_clean(5, {0: 1})
    assert audit.epochs_ended(1, 5, is_last=True), "the job was cut short, so all is audited once more"


def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    audit = Audit(1)
    audit.epochs_ended(1, 5, is_last=False)
    serial = audit.wanted(0, 1)
    assert serial is not None
    audit.epochs_ended(2, 9, is_last=True)
    assert audit.answered(0, 1, serial, having(), size) == {}
    assert audit.wanted(0, 1) is not None
    assert not audit.is_clean(9, {0: 1})


def test_the_replacement_of_a_process_is_asked() -> None:
    audit = Audit(1)
    audit.epochs_ended(1, 5, is_last=False)
    ask(audit, 0, generation=1)
    assert audit.wanted(0, 2) is not None


def test_missing_tasks_are_repeated_and_audited_again() -> None:
    audit = Audit(1)
    audit.epochs_ended(1, 5, is_last=True)
    assert ask(audit, 0, summary=having(0)) == {0: [(1, SIZE)]}
    assert not audit.is_clean(5, {0: 1})
    # Reopened, then repeated.
    assert audit.epochs_ended(1, 7, is_last=True)
    assert ask(audit, 0) == {}
    assert audit.is_clean(7, {0: 1})
    assert not audit.has_failed


def test_tasks_that_remain_missing_fail_the_job() -> None:
    audit = Audit(1)
    for revision in range(ROUNDS_LIMIT + 1):
        assert not audit.has_failed
        audit.epochs_ended(1, revision, is_last=True)
        ask(audit, 0, summary=having(0))
    assert audit.has_failed


def test_tasks_reopened_for_another_reason_do_not_fail_the_job() -> None:
    audit = Audit(1)
    for revision in range(2 * ROUNDS_LIMIT):
        audit.epochs_ended(1, revision, is_last=True)
        ask(audit, 0)
    assert not audit.has_failed


@pytest.mark.parametrize("reopened", [0, 3])
def test_only_done_tasks_count_as_missing(reopened: int) -> None:
    """A pserver also lacks failed batches, which the queue does not reopen."""
    audit = Audit(1)
    audit.epochs_ended(1, 5, is_last=True)
    serial = audit.wanted(0, 1)
    assert serial is not None
    audit.answered(0, 1, serial, having(0), size)
    audit.found(reopened)
    assert audit.is_clean(5, {0: 1}) == (reopened == 0)
