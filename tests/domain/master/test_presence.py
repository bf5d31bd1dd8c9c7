"""Processes are presumed dead when all of their streams have broken, and not before."""

import math

from flightedl.domain.master.presence import GRACE_S, Presences, Process

A, B, C = (Process(name, 1) for name in "abc")


def is_present(_process: Process) -> bool:
    return True


def opened(*processes: Process) -> Presences:
    """Return streams 1 and 2 of each process, all open."""
    made = Presences()
    for process in processes:
        for stream in (1, 2):
            made.opened(process, stream, 2)
    return made


def test_a_process_without_streams_is_presumed_dead_after_a_moment() -> None:
    presences = opened(A, B)
    presences.ended(A, 1, 5.0, is_broken=True)
    presences.ended(A, 2, 5.1, is_broken=True)
    assert presences.presumed_dead(5.1, is_present) == []
    assert presences.next_at() == 5.1 + GRACE_S
    assert presences.presumed_dead(5.1 + GRACE_S, is_present) == [A]
    assert presences.presumed_dead(9.0, is_present) == [A], "until the caller has ended its registration"
    presences.forget(A)
    assert presences.presumed_dead(9.0, is_present) == []
    assert math.isinf(presences.next_at())


def test_one_broken_stream_proves_nothing() -> None:
    presences = opened(A, B)
    presences.ended(A, 1, 5.0, is_broken=True)
    assert presences.presumed_dead(60.0, is_present) == []
    assert math.isinf(presences.next_at())


def test_a_stream_that_is_opened_again_proves_life() -> None:
    presences = opened(A, B)
    for stream in (1, 2):
        presences.ended(A, stream, 5.0, is_broken=True)
    presences.opened(A, 3, 2)
    assert presences.presumed_dead(60.0, is_present) == []
    presences.ended(A, 1, 7.0, is_broken=True)
    assert presences.presumed_dead(60.0, is_present) == [], "the same end is reported twice"
    presences.ended(A, 3, 8.0, is_broken=True)
    assert presences.presumed_dead(8.0 + GRACE_S, is_present) == [A]


def test_a_process_is_not_judged_before_all_its_streams_were_open() -> None:
    presences = opened(B)
    presences.opened(A, 1, 2)
    presences.ended(A, 1, 5.0, is_broken=True)
    assert presences.presumed_dead(60.0, is_present) == []


def test_a_deadline_is_not_the_end_of_a_process() -> None:
    presences = opened(A, B)
    presences.ended(A, 1, 5.0, is_broken=False)
    presences.ended(A, 2, 5.1, is_broken=True)
    assert presences.presumed_dead(60.0, is_present) == []
    presences.opened(A, 3, 2)
    presences.opened(A, 4, 2)
    for stream in (3, 4):
        presences.ended(A, stream, 70.0, is_broken=True)
    assert presences.presumed_dead(80.0, is_present) == [A]


def test_other_generations_are_other_processes() -> None:
    again = A._replace(generation=2)
    presences = opened(A, again, B)
    for stream in (1, 2):
        presences.ended(A, stream, 5.0, is_broken=True)
    assert presences.presumed_dead(6.0, is_present) == [A]


def test_if_most_processes_lose_their_streams_the_masters_connection_is_to_blame() -> None:
    presences = opened(A, B, C)
    for process in (A, B):
        for stream in (1, 2):
            presences.ended(process, stream, 5.0, is_broken=True)
    assert presences.presumed_dead(60.0, is_present) == []
    # B was only slow to connect again.
    presences.opened(B, 3, 2)
    assert presences.presumed_dead(60.0, is_present) == [A]


def test_both_of_two_processes_may_die_one_after_the_other() -> None:
    presences = opened(A, B)
    for stream in (1, 2):
        presences.ended(A, stream, 5.0, is_broken=True)
    assert presences.presumed_dead(6.0, is_present) == [A]
    presences.forget(A)
    for stream in (1, 2):
        presences.ended(B, stream, 7.0, is_broken=True)
    assert presences.presumed_dead(8.0, is_present) == [B]


def test_processes_whose_keys_are_gone_do_not_keep_others_from_being_judged() -> None:
    presences = opened(A, B, C)
    for process in (A, B):
        for stream in (1, 2):
            presences.ended(process, stream, 5.0, is_broken=True)
    assert presences.presumed_dead(6.0, is_present) == []
    # Their leases have ended, and nobody has taken their places.
    assert presences.presumed_dead(11.0, lambda process: process == C) == []
    assert math.isinf(presences.next_at())
    for stream in (1, 2):
        presences.ended(C, stream, 12.0, is_broken=True)
    assert presences.presumed_dead(13.0, is_present) == [C]
