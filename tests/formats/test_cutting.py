from __future__ import annotations

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flightedl.formats.cutting import csv_records_end, ends_quoted, first_csv_record_end, line_end, pieces


def plain_ends(text: bytes) -> tuple[list[int], bool]:
    """Ends of the records by a machine that looks at one byte after the other, and whether the end is quoted."""
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
def test_record_ends_are_those_of_a_plain_machine(text: bytes) -> None:
    ends, inside = plain_ends(text)
    assert csv_records_end(text) == (ends[-1] if ends else 0)
    assert first_csv_record_end(text) == (ends[0] if ends else 0)
    if not text.endswith(b'"'):
        assert ends_quoted(text) == inside


@given(csv_like, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_pieces_are_the_text_and_end_at_records(text: bytes, size: int) -> None:
    found = list(pieces(io.BytesIO(text), size, csv_records_end))
    assert b"".join(found) == text
    ends, _ = plain_ends(text)
    position = 0
    for piece in found[:-1]:
        position += len(piece)
        assert position in ends


@pytest.mark.parametrize(("text", "expected"), [(b"", []), (b"abc", [b"abc"]), (b"a\nb\nc\nd", [b"a\nb\n", b"c\nd"])])
def test_pieces_of_lines(text: bytes, expected: list[bytes]) -> None:
    assert list(pieces(io.BytesIO(text), 4, line_end)) == expected
