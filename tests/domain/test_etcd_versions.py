"""Versions of etcd that keep acknowledged writes, and warnings about others."""

from __future__ import annotations

import pytest

from flightedl.domain.etcd_versions import is_sound, version_of, warning_about


@pytest.mark.parametrize(
    ("text", "version"), [("3.5.28", (3, 5, 28)), ("3.6.0-rc.1", (3, 6, 0)), ("", ()), ("3.5", ()), ("latest", ())]
)
def test_versions_are_parsed(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize(
    ("version", "of_one", "of_three"),
    [
        ((3, 3, 27), False, False),
        ((3, 4, 22), False, False),
        ((3, 4, 23), True, False),
        ((3, 4, 41), True, False),
        ((3, 4, 42), True, True),
        ((3, 5, 2), False, False),
        ((3, 5, 3), True, False),
        ((3, 5, 27), True, False),
        ((3, 5, 28), True, True),
        ((3, 6, 8), True, False),
        ((3, 6, 9), True, True),
        ((3, 7, 0), True, True),
        ((4, 0, 0), True, True),
    ],
)
def test_clusters_need_newer_versions_than_single_members(
    version: tuple[int, ...], of_one: bool, of_three: bool
) -> None:
    assert (is_sound(version), is_sound(version, 3)) == (of_one, of_three)
    assert bool(warning_about(version, 1, "10.0.0.1:2379")) is not of_one
    assert bool(warning_about(version, 3, "10.0.0.1:2379")) is not of_three


@pytest.mark.parametrize("address", ["127.0.0.1:2379", "localhost:2379", "[::1]:2379"])
def test_the_etcd_of_one_machine_is_left_to_the_launcher(address: str) -> None:
    assert not warning_about((3, 5, 1), 1, address)
    assert warning_about((3, 5, 1), 3, address)


def test_a_warning_names_what_may_be_lost() -> None:
    warning = warning_about((3, 5, 16), 3, "10.0.0.1:2379")
    assert warning.startswith("etcd 3.5.16 at 10.0.0.1:2379, one of 3 members, may lose acknowledged writes")
    assert "batches then count twice or not at all. Update all members to 3.4.42, 3.5.28" in warning


def test_an_unknown_version_is_not_judged() -> None:
    assert not warning_about((), 3, "10.0.0.1:2379")
