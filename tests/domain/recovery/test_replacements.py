"""Reports that count although blocks have moved, and reports that do not because a process was replaced."""

from flightedl.domain.recovery.replacements import Replacements
from flightedl.domain.recovery.replay import AppliedSummary, PserverRecovery

FIRST = Replacements().seen(0, 2, 1).seen(1, 3, 1)


def test_first_processes_replace_nothing():
    assert FIRST.accepts([2, 3], 1)
    assert FIRST.accepts([2, 3], 0), "a trainer may know an older placement"


def test_reports_of_a_replaced_process_do_not_count():
    known = FIRST.seen(1, 5, 0)
    assert not known.accepts([2, 3], 9)
    assert known.accepts([2, 5], 1)
    assert known.accepts([2], 1), "it names no process of pserver 1"


def test_reports_of_an_older_placement_do_not_count_after_a_replacement():
    known = FIRST.seen(1, 5, 3)
    assert not known.accepts([2], 2), "a block may have moved from pserver 0 to 1, where it was lost"
    assert known.accepts([2], 3)
    assert known.confirmed(2).accepts([2], 2), "placement 3 was never stored"
    assert not known.seen(1, 7, 0).accepts([2], 2)


def test_older_processes_are_ignored():
    assert FIRST.seen(1, 2, 9) == FIRST


def test_replacements_are_stored_with_the_settled_processes():
    recovery = PserverRecovery(2)
    for index, generation in ((0, 2), (1, 3), (1, 5)):
        recovery.announced(index, generation, AppliedSummary(), 0, lambda _: 0, placement=4)
    again = PserverRecovery.restore(recovery.encode(), 2)
    assert not again.accepts([2, 5], 3)
    assert again.accepts([2, 5], 4)
    again.placement_read(3)
    assert again.accepts([2, 5], 3)
