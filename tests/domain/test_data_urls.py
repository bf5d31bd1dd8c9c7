"""URLs and patterns of data files."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.data_urls import (
    as_declared,
    cache_and_target,
    escaped,
    fixed_parts,
    has_wildcard,
    literal,
    matcher,
    moved,
    normalized,
    path_of,
    without_query,
)


@pytest.mark.parametrize(
    ("url", "plain", "path"),
    [
        ("https://h/a.csv?sig=x/y.parquet", "https://h/a.csv", "https://h/a.csv"),
        ("http://h/*.csv?", "http://h/*.csv", "http://h/*.csv"),
        ("filecache::https://h/a.csv?s=1", "filecache::https://h/a.csv", "https://h/a.csv"),
        ("zip://in/a.csv::https://h/b.zip?s=1", "zip://in/a.csv::https://h/b.zip", "zip://in/a.csv"),
        ("s3://b/part-?.csv", "s3://b/part-?.csv", "s3://b/part-?.csv"),
        ("/d/a?.csv", "/d/a?.csv", "/d/a?.csv"),
        ("/d/https://x?y", "/d/https://x?y", "/d/https://x?y"),
    ],
)
def test_the_query_is_no_part_of_the_name(url: str, plain: str, path: str) -> None:
    assert without_query(url) == plain
    assert path_of(url) == path


def test_caches_precede_the_target() -> None:
    assert cache_and_target("blockcache::simplecache::s3://b/a") == ("blockcache::simplecache::", "s3://b/a")
    assert cache_and_target("zip://a::s3://b/a") == ("", "zip://a::s3://b/a")


@pytest.mark.parametrize(
    ("pattern", "found", "missed"),
    [
        ("/d/*.csv", ["/d/a.csv"], ["/d/_a.csv", "/d/.csv", "/d/a/b.csv", "/d/a.csv2"]),
        ("/d/**/a", ["/d/a", "/d/x/a", "/d/x/y/a"], ["/d/.x/a", "/d/x/_y/a", "/da"]),
        ("/d/**", ["/d/a", "/d/x/a"], ["/d/.a", "/d/_x/a", "/d"]),
        ("/d/_*/[ab]?", ["/d/_x/a1"], ["/d/_x/c1", "/d/x/a1"]),
        ("/d/[!a]/x", ["/d/b/x"], ["/d/a/x", "/d/_/x"]),
        ("/d/a[*].csv", ["/d/a*.csv"], ["/d/ab.csv"]),
        ("/d/_temporary/x", ["/d/_temporary/x"], []),
    ],
)
def test_patterns_match_components(pattern: str, found: list[str], missed: list[str]) -> None:
    assert [path for path in found + missed if matcher(pattern).fullmatch(path)] == found


@given(st.text("a*?[]!^\\b", max_size=6).filter(lambda text: text != "**"), st.text("ab]^!\\", max_size=4))
def test_a_component_matches_as_in_the_shell(pattern: str, name: str) -> None:
    matches = matcher(pattern, is_hidden_matched=True).fullmatch(name) is not None
    assert matches == fnmatch.fnmatchcase(name, pattern)


@given(st.text(max_size=10))
def test_an_escaped_name_matches_only_itself(name: str) -> None:
    assert not has_wildcard(escaped(name))
    assert literal(escaped(name)) == name


def test_the_fixed_part_ends_before_the_first_wildcard() -> None:
    assert fixed_parts("/d/x/*.csv") == ["", "d", "x"]
    assert fixed_parts("/d/run[[]1]/*/a.csv") == ["", "d", "run[1]"]
    assert fixed_parts("/d/a.csv") == ["", "d"]
    assert fixed_parts("*.csv") == []


def test_urls_are_normalized() -> None:
    assert normalized("s3://b//x/./y/../a") == normalized("s3://b/x/a") == "s3://b/x/a"


def test_moved_files_keep_the_url_of_their_declaration() -> None:
    folders = {"/old": "s3://b/new"}
    assert moved("/old/*.csv", folders) == moved("file:///old/*.csv", folders) == "s3://b/new/*.csv"
    assert moved("/older/a", folders) == "/older/a"
    assert as_declared("s3://b/new/a?.csv", folders) == "/old/a?.csv"
    assert as_declared("https://h/a?secret", folders) == "https://h/a"
