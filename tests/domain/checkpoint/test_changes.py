"""Changes that belong in an increment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.checkpoint.changes import ChangesSince, increment_on


def changes() -> ChangesSince[frozenset[int]]:
    return ChangesSince(frozenset.__or__)


def these(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_changes_of_a_lost_cut_are_in_the_next_one():
    known = changes()
    assert known.cut("a", "", these(1)) is None
    assert known.cut("b", "a", these(2)) == {2}
    assert known.cut("c", "a", these(3)) == {2, 3}
    assert known.cut("d", "a", these()) == {2, 3}
    assert known.cut("e", "d", these(4)) == {4}
    assert known.cut("f", "d", these(5)) == {4, 5}


def test_a_lost_base_loses_no_changes():
    """The caller writes everything, and the next file may still be an increment on the previous one."""
    known = changes()
    known.cut("a", "", these())
    assert known.cut("base", "a", these(1)) == {1}
    assert known.cut("b", "a", these(2)) == {1, 2}


def test_unknown_changes_are_reported():
    known = changes()
    assert not known.knows("")
    assert known.cut("a", "of another process", these(1)) is None
    assert known.knows("a")
    known.cut("b", "a", these(2))
    known.cut("c", "b", these(3))
    assert not known.knows("a"), "a checkpoint contains b, so no increment is based on earlier files"
    assert known.cut("d", "a", these(4)) is None
    assert not known.knows("b")
    assert not known.knows("c")
    assert known.cut("e", "d", these(5)) == {5}


@given(
    st.lists(st.tuples(st.frozensets(st.integers(0, 20)), st.booleans(), st.booleans()), max_size=20),
)
def test_a_chain_has_every_change(steps: list[tuple[frozenset[int], bool, bool]]):
    """Whichever files are lost, the base and its increments contain the latest of every change."""
    known, newest = changes(), ""
    last: dict[int, int] = {}
    stored: dict[int, int] = {}
    for number, (changed, is_base, counts) in enumerate(steps):
        last |= dict.fromkeys(changed, number)
        after = increment_on(newest, known.knows, is_base=is_base)
        found = known.cut(str(number), newest, changed)
        if counts:
            stored = dict(last) if not after else stored | {each: last[each] for each in found or ()}
            newest = str(number)
            assert stored == last


def test_an_increment_is_written_only_if_it_is_wanted_and_possible():
    assert increment_on("a", lambda _: True, is_base=False) == "a"
    assert increment_on("a", lambda _: True, is_base=True) == ""
    assert increment_on("a", lambda _: False, is_base=False) == ""
    assert increment_on("", lambda _: True, is_base=False) == ""
