"""Ranges of growing topics: where they begin and end, when they are added, and what is lost."""

from __future__ import annotations

from flightedl.domain.topics import Ranges, url_of
from flightedl.formats.following import DirectoryFollower, Scan, TopicFollower, follower_of
from flightedl.ports import FileStat

TOPIC = "kafka://a:9092/clicks"
TASK = 100


def stat(topic: str = TOPIC, **ends: tuple[int, int]) -> FileStat:
    """Return the readable offsets of partitions ``p0``, ``p1``, ..."""
    ranges: Ranges = {int(name[1:]): range(*offsets) for name, offsets in ends.items()}
    return FileStat(url_of(topic, ranges), sum(map(len, ranges.values())), "offsets")


def begun(**ends: tuple[int, int]) -> TopicFollower:
    follower = TopicFollower((), TASK)
    follower.joined(follower.look([stat(**ends)], is_marked=False).stable)
    return follower


def added(scan: Scan) -> list[str]:
    return [each.url for each in scan.stable]


def test_the_first_ranges_begin_with_the_oldest_messages_and_name_every_partition() -> None:
    follower = TopicFollower((), TASK)
    assert added(follower.look([stat(p0=(3, 3), p1=(0, 0))], is_marked=False)) == []
    found = follower.look([stat(p0=(3, 3), p1=(5, 9))], is_marked=False)
    assert found.stable == (FileStat(f"{TOPIC}/0:3-3,1:5-9", 4, "offsets"),)
    assert not found.is_complete
    assert follower.look([stat(p0=(3, 3), p1=(5, 9))], is_marked=False).stable == found.stable


def test_new_messages_are_added_by_the_second_scan_that_finds_some() -> None:
    follower = begun(p0=(0, 10), p1=(0, 10))
    assert added(follower.look([stat(p0=(0, 10), p1=(0, 10))], is_marked=False)) == []
    assert added(follower.look([stat(p0=(0, 11), p1=(0, 10))], is_marked=False)) == []
    found = follower.look([stat(p0=(0, 12), p1=(0, 10))], is_marked=False)
    assert added(found) == [f"{TOPIC}/0:10-12"]
    follower.joined(found.stable)
    assert added(follower.look([stat(p0=(0, 13), p1=(0, 10))], is_marked=False)) == []
    assert follower.trouble == ""


def test_messages_that_fill_a_task_are_added_at_once() -> None:
    follower = begun(p0=(0, 10), p1=(0, 10))
    assert added(follower.look([stat(p0=(0, 60), p1=(0, 59))], is_marked=False)) == []
    follower = begun(p0=(0, 10), p1=(0, 10))
    assert added(follower.look([stat(p0=(0, 60), p1=(0, 60))], is_marked=False)) == [f"{TOPIC}/0:10-60,1:10-60"]


def test_the_end_adds_what_there_is() -> None:
    follower = begun(p0=(0, 10))
    found = follower.look([stat(p0=(0, 11))], is_marked=True)
    assert added(found) == [f"{TOPIC}/0:10-11"]
    assert found.is_complete


def test_a_new_partition_begins_at_its_first_message() -> None:
    follower = begun(p0=(0, 10))
    assert added(follower.look([stat(p0=(0, 10), p1=(0, 200))], is_marked=False)) == [f"{TOPIC}/1:0-200"]


def test_topics_are_followed_independently() -> None:
    other = "kafka://a:9092/other"
    follower = TopicFollower((), TASK)
    first = follower.look([stat(p0=(0, 5)), stat(other, p0=(0, 0))], is_marked=False)
    assert added(first) == [f"{TOPIC}/0:0-5"]
    follower.joined(first.stable)
    found = follower.look([stat(p0=(0, 5)), stat(other, p0=(0, 7))], is_marked=False)
    assert added(found) == [f"{other}/0:0-7"]


def test_a_successor_continues_where_the_ranges_end() -> None:
    taken = [stat(p0=(3, 10), p1=(0, 0)), stat(p0=(10, 12))]
    follower = TopicFollower(taken, TASK)
    assert added(follower.look([stat(p0=(3, 12), p1=(0, 0))], is_marked=True)) == []
    assert added(follower.look([stat(p0=(3, 13), p1=(0, 1))], is_marked=True)) == [f"{TOPIC}/0:12-13,1:0-1"]
    assert follower.left_out == ()


def test_messages_that_were_deleted_before_they_became_tasks_are_reported_until_the_end() -> None:
    follower = begun(p0=(0, 10), p1=(4, 4))
    found = follower.look([stat(p0=(15, 20), p1=(5, 6), p2=(2, 3))], is_marked=True)
    assert added(found) == [f"{TOPIC}/0:15-20,1:5-6,2:2-3"]
    follower.joined(found.stable)
    for each in (follower, TopicFollower([stat(p0=(0, 10), p1=(4, 4)), *found.stable], TASK)):
        lost = [sentence.partition("deleted offsets ")[2].partition(" ")[0] for sentence in each.left_out]
        assert lost == ["10-14", "4-4", "0-1"]
        assert each.left_out[0].startswith(f"partition 0 of {TOPIC}: the broker deleted offsets 10-14")
        assert each.trouble.endswith("(and 2 more)")


def test_a_partition_that_ends_too_early_is_trouble() -> None:
    follower = begun(p0=(0, 10), p1=(0, 10))
    assert added(follower.look([stat(p0=(0, 5))], is_marked=True)) == []
    assert follower.trouble == (
        f"partition 0 of {TOPIC} ends before offset 10, up to which it was taken into the dataset (and 1 more)"
    )
    assert added(follower.look([stat(p0=(0, 11), p1=(0, 10))], is_marked=True)) == [f"{TOPIC}/0:10-11"]
    assert follower.trouble == ""


def test_the_urls_decide_who_follows() -> None:
    assert isinstance(follower_of([TOPIC]), TopicFollower)
    assert type(follower_of(["/d/*.csv"])) is DirectoryFollower
