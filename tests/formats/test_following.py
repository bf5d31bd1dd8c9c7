"""Files of a growing dataset: when they are accepted, and when the dataset is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flightedl.domain.retries import PATIENT
from flightedl.errors import DataError, UnavailableError
from flightedl.formats import following
from flightedl.formats.following import DirectoryFollower, marker_urls
from flightedl.ports import FileStat


def stat(name: str, version: str = "1") -> FileStat:
    return FileStat(f"/d/{name}", 10, version)


def names(stats: tuple[FileStat, ...]) -> list[str]:
    return [each.url.removeprefix("/d/") for each in stats]


@pytest.mark.parametrize(
    ("patterns", "markers"),
    [
        (["/d/*.csv"], ("/d/_END",)),
        (["s3://b/x/part-*.parquet", "s3://b/x/other-*.parquet"], ("s3://b/x/_END",)),
        (["/d/day-*/a.csv", "/e/*"], ("/d/_END", "/e/_END")),
        (["/d/a.csv"], ("/d/_END",)),
        (["/*.csv"], ("/_END",)),
        (["*.csv"], ("_END",)),
    ],
)
def test_the_marker_is_in_the_deepest_directory_without_a_wildcard(
    patterns: list[str], markers: tuple[str, ...]
) -> None:
    assert marker_urls(patterns) == markers


def test_a_file_is_accepted_after_two_equal_listings() -> None:
    known = DirectoryFollower()
    assert known.look([stat("a", "half")], is_marked=False).stable == ()
    assert known.look([stat("a", "whole")], is_marked=False).stable == ()
    assert known.look([], is_marked=False).stable == ()
    assert known.look([stat("a", "whole")], is_marked=False).stable == ()
    found = known.look([stat("a", "whole"), stat("b")], is_marked=False)
    assert names(found.stable) == ["a"]
    assert not found.is_complete
    known.joined(found.stable)
    assert names(known.look([stat("a", "whole"), stat("b")], is_marked=False).stable) == ["b"]


def test_a_stable_file_remains_stable_until_it_is_accepted() -> None:
    known = DirectoryFollower()
    known.look([stat("b"), stat("a")], is_marked=False)
    for _ in range(2):
        assert names(known.look([stat("b"), stat("a")], is_marked=False).stable) == ["a", "b"]


def test_names_with_a_leading_underscore_or_dot_are_ignored() -> None:
    found = DirectoryFollower().look([stat("_END"), stat(".part"), stat("a_.b")], is_marked=True)
    assert names(found.stable) == ["a_.b"]
    assert found.is_complete


def test_the_marker_makes_all_files_stable_and_the_dataset_complete() -> None:
    known = DirectoryFollower([stat("a")])
    assert not known.look([stat("a")], is_marked=False).is_complete
    found = known.look([stat("a"), stat("b")], is_marked=True)
    assert names(found.stable) == ["b"]
    assert found.is_complete
    assert DirectoryFollower([stat("a")]).look([stat("a")], is_marked=True).is_complete


def test_a_limited_number_of_files_is_accepted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "JOINED_LIMIT", 2)
    stats = [stat(name) for name in "abcde"]
    known = DirectoryFollower()
    accepted: list[list[str]] = []
    while True:
        found = known.look(stats, is_marked=True)
        known.joined(found.stable)
        accepted.append(names(found.stable))
        assert found.has_more != found.is_complete
        if found.is_complete:
            break
    assert accepted == [["a", "b"], ["c", "d"], ["e"]]


def test_long_names_count_by_their_size_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "JOINED_LIMIT_BYTES", 1000)
    found = DirectoryFollower().look([stat("x" * 600 + name) for name in "abc"], is_marked=True)
    assert len(found.stable) == 1
    assert found.has_more


def test_an_accepted_file_that_is_missing_or_changed_is_reported_while_it_lasts() -> None:
    known = DirectoryFollower([stat("a"), stat("b")])
    assert known.look([replace(stat("a", "2"), size_bytes=11)], is_marked=False).stable == ()
    assert known.trouble == "/d/a has changed since it was taken into the dataset (and 1 more)"
    known.look([stat("a")], is_marked=False)
    assert known.trouble == "/d/b is gone since it was taken into the dataset"
    # A file that was only touched, or copied again, is the same file.
    known.look([stat("a", "2"), stat("b")], is_marked=False)
    assert known.trouble == ""


def test_a_rejected_file_is_read_again_when_it_changes() -> None:
    known = DirectoryFollower()
    known.look([stat("a")], is_marked=False)
    (stable,) = known.look([stat("a")], is_marked=False).stable
    known.failed(stable, DataError("/d/a is corrupt"), 0.0)
    assert known.trouble == "/d/a is corrupt: it is left out until it changes"
    found = known.look([stat("a")], is_marked=True)
    assert (found.stable, found.is_complete) == ((), True)
    assert known.look([stat("a", "2")], is_marked=False).stable == ()
    found = known.look([stat("a", "2")], is_marked=False)
    assert names(found.stable) == ["a"]
    known.failed(found.stable[0], DataError("/d/a is corrupt again"), 0.0)
    known.look([], is_marked=False)
    assert known.trouble == ""
    known.look([stat("a", "3")], is_marked=False)
    known.joined(known.look([stat("a", "3")], is_marked=False).stable)
    assert known.trouble == ""


def test_an_unreadable_file_is_retried_at_every_listing() -> None:
    known = DirectoryFollower()
    known.look([stat("a"), stat("b")], is_marked=False)
    for now in (0.0, 10 * PATIENT.limit_s):
        stable, _ = known.look([stat("a"), stat("b")], is_marked=False).stable
        known.failed(stable, UnavailableError("/d/a cannot be read at the moment"), now)
        assert known.has_unreadable
        assert known.trouble == "/d/a cannot be read at the moment: it is left out until it can be read"
    known.joined(known.look([stat("a"), stat("b")], is_marked=False).stable)
    assert (known.has_unreadable, known.trouble, known.left_out) == (False, "", ())


def test_an_unreadable_file_is_rejected_at_the_end_of_the_dataset() -> None:
    known = DirectoryFollower()
    for now in (0.0, PATIENT.limit_s - 0.1):
        (stable,) = known.look([stat("a")], is_marked=True).stable
        known.failed(stable, ConnectionResetError(), now)
        assert known.has_unreadable
    known.failed(stable, ConnectionResetError(), PATIENT.limit_s)
    assert not known.has_unreadable
    assert known.left_out == ("/d/a: ConnectionResetError",)
    found = known.look([stat("a")], is_marked=True)
    assert (found.stable, found.is_complete) == ((), True)


def test_an_unreadable_file_that_is_removed_is_forgotten() -> None:
    known = DirectoryFollower()
    (stable,) = known.look([stat("a")], is_marked=True).stable
    known.failed(stable, TimeoutError(), 0.0)
    known.look([], is_marked=True)
    assert not known.has_unreadable
