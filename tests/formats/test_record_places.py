from __future__ import annotations

from flightedl.formats.chunks import Chunk
from flightedl.formats.record_places import described, record_ranges


def chunk(url: str, number: int, first_record: int, records: int) -> Chunk:
    return Chunk(
        url=url,
        version="",
        format="",
        number=number,
        first_record=first_record,
        records=records,
        offset=0,
        size_bytes=0,
    )


CHUNKS = (chunk("a.csv", 3, 30, 10), chunk("b.csv", 0, 0, 10))


def test_a_batch_in_stored_order_is_contiguous_in_each_file() -> None:
    ranges = record_ranges(CHUNKS, 8, 12, None, 0, 0)
    assert [(each.url, each.chunk, each.first_record, each.records) for each in ranges] == [
        ("a.csv", 3, 38, 2),
        ("b.csv", 0, 0, 2),
    ]
    assert described(ranges) == "a.csv, records 38-39; b.csv, records 0-1"
    assert described(record_ranges(CHUNKS, 19, 29, None, 0, 0)) == "b.csv, records 9"


def test_shuffled_batches_are_scattered_and_disjoint() -> None:
    found: list[tuple[str, int]] = []
    for first in range(0, 20, 5):
        for each in record_ranges(CHUNKS, first, first + 5, 7, 1, 2):
            found += [(each.url, each.first_record + n) for n in range(each.records)]
    assert len(found) == len(set(found)) == 20
    many = (chunk("a.csv", 0, 0, 1_000),)
    assert described(record_ranges(many, 0, 100, 7, 1, 2)).endswith(" more")


def test_neighbors_are_reported_as_one_range() -> None:
    chunks = tuple(chunk("a.csv", number, 2 * number, 2) for number in range(3))
    assert described(record_ranges(chunks, 1, 5, None, 0, 0)) == "a.csv, records 1-4"
