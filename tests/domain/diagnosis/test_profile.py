"""Where the time of trainers goes, in words."""

from __future__ import annotations

from flightedl.domain.diagnosis.profile import advice, in_words, shares


def test_the_parts_are_told_and_the_worst_gets_advice() -> None:
    profile = {"data": 62.0, "script": 30.0, "servers": 8.0}
    assert in_words(profile) == "62% waits for data, 30% in the script, 8% with the parameter servers"
    assert advice(profile).startswith("62% waits for data: read fewer columns")
    assert advice({"data": 1.0, "script": 1.0, "servers": 6.0}).startswith("75% with the parameter servers: larger")


def test_a_script_that_works_most_of_the_time_needs_no_advice() -> None:
    assert advice({"script": 90.0, "data": 5.0, "servers": 5.0}) == ""


def test_too_little_tells_nothing() -> None:
    assert shares({"data": 1.0}) == {}
    assert in_words({}) == advice({}) == ""
