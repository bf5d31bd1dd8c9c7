from __future__ import annotations

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flightedl.formats.chunks import IndexOptions
from flightedl.formats.cutting import csv_records_end, ends_quoted, first_csv_record_end, line_end, pieces
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.text import chunk_bytes
from tests.support.memory import MemoryFiles


def plain_ends(text: bytes) -> tuple[list[int], bool]:
    """Return the ends of records as found byte by byte, and whether the text ends within quotes."""
    ends, inside, position, starts = [], False, 0, True
    while position < len(text):
        byte = text[position : position + 1]
        if inside:
            if byte == b'"':
                if text[position + 1 : position + 2] == b'"':
                    position += 1
                else:
                    inside = False
            starts = False
        elif byte == b'"' and starts:
            inside, starts = True, False
        else:
            starts = byte in b",\n\r"
            if byte == b"\n":
                ends.append(position + 1)
        position += 1
    return ends, inside


csv_like = st.lists(st.sampled_from([b'"', b'""', b",", b"\n", b"\r\n", b"a", b"bc"]), max_size=30).map(b"".join)


@given(csv_like)
@example(b'5",x\n"a\nb"\n')
@example(b'"a"b"\n"\n')
@example(b'"""\n""",1\n')
@example(b'"",\n"",')
@settings(max_examples=200, deadline=None)
def test_record_ends_equal_those_of_a_simple_state_machine(text: bytes) -> None:
    ends, inside = plain_ends(text)
    assert csv_records_end(text) == (ends[-1] if ends else 0)
    assert first_csv_record_end(text) == (ends[0] if ends else 0)
    if not text.endswith(b'"'):
        assert ends_quoted(text) == inside


@given(csv_like, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_pieces_cover_the_text_and_end_at_records(text: bytes, size: int) -> None:
    found = list(pieces(io.BytesIO(text), size, csv_records_end))
    assert b"".join(found) == text
    ends, _ = plain_ends(text)
    position = 0
    for piece in found[:-1]:
        position += len(piece)
        assert position in ends


@pytest.mark.parametrize(("text", "expected"), [(b"", []), (b"abc", [b"abc"]), (b"a\nb\nc\nd", [b"a\nb\n", b"c\nd"])])
def test_pieces_of_text_end_at_lines(text: bytes, expected: list[bytes]) -> None:
    assert list(pieces(io.BytesIO(text), 4, line_end)) == expected


@pytest.mark.parametrize(
    ("name", "line"), [("a.csv", b"%d,some text to make it longer\n"), ("a.jsonl", b'{"k": %d, "text": "some more"}\n')]
)
def test_one_file_is_divided_into_tasks_for_many_trainers(name: str, line: bytes) -> None:
    head = b"k,text\n" if name == "a.csv" else b""
    data = head + b"".join(line % number for number in range(100_000))
    index = build_index(MemoryFiles({name: data}), DatasetSpec((name,)))
    assert 30 <= len(index) <= 34
    assert index.records.sum() == 100_000


def test_a_small_file_is_divided() -> None:
    data = b"".join(b'{"k": %d}\n' % number for number in range(10_000))
    index = build_index(MemoryFiles({"a.jsonl": data}), DatasetSpec(("a.jsonl",)))
    assert 7 <= len(index) <= len(data) // (16 << 10) + 1
    assert index.records.sum() == 10_000


def test_chunks_are_neither_tiny_nor_longer_than_requested() -> None:
    options = IndexOptions()
    assert chunk_bytes(1000, options) == 16 << 10
    assert chunk_bytes(32 << 20, options) == 1 << 20
    assert chunk_bytes(1 << 40, options) == options.text_chunk_bytes
    assert chunk_bytes(32 << 20, IndexOptions(text_chunk_bytes=4)) == 4
