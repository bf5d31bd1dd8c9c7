"""How trainers spend their time, in words."""

from __future__ import annotations

from flightedl.domain.diagnosis.profile import advice, in_words, shares


def test_the_parts_are_listed_and_the_largest_gets_advice() -> None:
    profile = {"data": 62.0, "script": 30.0, "push": 2.0, "wait": 5.9, "pull": 0.1}
    assert (
        in_words(profile)
        == "62% waiting for data, 30% in the script, 2% sending gradients, 6% waiting for others in the round"
    )
    assert advice(profile).startswith("62% waiting for data. Read fewer columns")
    traffic = advice({"data": 1.0, "script": 4.0, "push": 3.0, "pull": 2.0})
    assert traffic.startswith("30% sending gradients and 20% receiving values. Use larger")
    waits = advice({"script": 4.0, "push": 1.0, "wait": 4.0, "pull": 1.0})
    assert waits.startswith("40% waiting for others in the round. `flightedl doctor` shows the slowest trainer")


def test_a_script_that_works_most_of_the_time_needs_no_advice() -> None:
    assert advice({"script": 90.0, "data": 5.0, "push": 5.0}) == ""


def test_a_short_profile_has_no_findings() -> None:
    assert shares({"data": 1.0}) == {}
    assert in_words({}) == advice({}) == ""
