"""Divide text into pieces that end at record boundaries.

A record ends with a newline; in CSV, with a newline outside quotes, or a carriage return if there are no newlines.
A quote opens a quoted field only at the beginning
of the field. In a quoted field, two quotes stand for one quote, and a single quote closes the field. Every piece begins
at the beginning of a record, so pieces do not depend on each other. Text without newlines is a single piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

_QUOTE, _NEWLINE, _RETURN = 0x22, 0x0A, 0x0D
_LINE_END = re.compile(rb"\r\n?|\n")

#: Returns the length of the complete records in a text that begins with a record; 0 if none is complete.
RecordsEnd = Callable[[bytes], int]


class Readable(Protocol):
    """Source of text."""

    def read(self, size: int, /) -> bytes: ...


def pieces(source: Readable, size_bytes: int, records_end: RecordsEnd) -> Iterator[bytes]:
    """Yield pieces of complete records (about ``size_bytes`` long, or a longer single record), and then the rest."""
    rest = b""
    wanted = size_bytes
    while True:
        text = rest + filled(source, wanted - len(rest))
        if len(text) < wanted:
            if text:
                yield text
            return
        end = records_end(text)
        if end:
            yield text[:end]
            rest, wanted = text[end:], size_bytes
            wanted = max(wanted, len(rest) + 1)
        else:
            rest, wanted = text, 2 * len(text)


def line_end(text: bytes) -> int:
    """Return the length of the complete lines at the beginning of ``text``."""
    return text.rfind(b"\n") + 1


def csv_records_end(text: bytes, delimiter: bytes = b",") -> int:
    """Return the length of the complete CSV records in ``text``, which begins with a record."""
    end = b"\n"
    if end not in text:
        # The newline that belongs to a carriage return at the end may follow.
        end, text = b"\r", text[:-1]
    if b'"' not in text:
        return text.rfind(end) + 1
    values = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(values == end[0])
    outside = ends[~_is_quoted(values, ends, delimiter[0])]
    return int(outside[-1]) + 1 if len(outside) else 0


def first_csv_record_end(text: bytes, delimiter: bytes = b",") -> int:
    """Return the length of the first CSV record in ``text``, with its newline; 0 if it is incomplete.

    A carriage return at the end of ``text`` ends the record only if no newline follows, so the record is incomplete.
    """
    found = _LINE_END.search(text)
    if found is not None and ends_quoted(text[: found.start()], delimiter):
        values = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero((values == _NEWLINE) | (values == _RETURN))
        outside = ends[~_is_quoted(values, ends, delimiter[0])]
        found = _LINE_END.match(text, int(outside[0])) if len(outside) else None
    if found is None or (found[0] == b"\r" and found.end() == len(text)):
        return 0
    return found.end()


def ends_quoted(text: bytes, delimiter: bytes = b",") -> bool:
    """True if the text ends inside quotes."""
    if b'"' not in text:
        return False
    values = np.frombuffer(text, np.uint8)
    return bool(_is_quoted(values, np.array([len(text)]), delimiter[0])[0])


def record_ends(text: bytes, delimiter: bytes | None) -> npt.NDArray[np.int64]:
    """Return the ends of all records: lines that are not empty, or with a delimiter, records of CSV."""
    values = np.frombuffer(text, np.uint8)
    is_end = (values == _NEWLINE) | (values == _RETURN)
    ends = np.flatnonzero(is_end)
    if delimiter is not None and b'"' in text:
        ends = ends[~_is_quoted(values, ends, delimiter[0])]
    ends = np.append(ends + 1, len(values))
    filled = np.append(0, np.cumsum(~is_end if delimiter is not None else values > ord(" ")))
    found: npt.NDArray[np.int64] = ends[filled[ends] > filled[np.append(0, ends[:-1])]]
    return found


def _is_quoted(values: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], delimiter: int) -> npt.NDArray[np.bool_]:
    """Return an array (len(places),), True for each place that is inside quotes.

    Normally, each quote with an even number (counting from 0) begins a field or directly follows another quote. In this
    case, a place is inside quotes if it is preceded by an odd number of quotes. If an unquoted field contains a stray
    quote, a slower loop is necessary.
    """
    quotes = np.flatnonzero(values == _QUOTE)
    before = values[quotes - 1]
    starts = (before == delimiter) | (before == _NEWLINE) | (before == _RETURN) | (quotes == 0)
    follows = np.zeros(len(quotes), np.bool_)
    follows[1:] = np.diff(quotes) == 1
    if not (starts | follows)[::2].all():
        quotes = quotes[_toggles(starts.tolist(), follows.tolist())]
    return (np.searchsorted(quotes, places) % 2).astype(np.bool_)


def _toggles(starts: list[bool], follows: list[bool]) -> npt.NDArray[np.bool_]:
    """Mark the quotes that open or close a field. The arguments mark those that begin one or follow a quote."""
    toggles = np.zeros(len(starts), np.bool_)
    is_inside = was_closed = False
    for number, (starts_field, follows_quote) in enumerate(zip(starts, follows, strict=True)):
        if is_inside:
            toggles[number] = was_closed = True
            is_inside = False
        elif was_closed and follows_quote:
            # The previous quote did not close the field, because the two quotes together stand for one.
            toggles[number] = is_inside = True
            was_closed = False
        else:
            was_closed = False
            if starts_field:
                toggles[number] = is_inside = True
    return toggles


def filled(source: Readable, size_bytes: int) -> bytes:
    """Return the next ``size_bytes`` bytes of the source, or fewer if it ends before that."""
    parts: list[bytes] = []
    missing = size_bytes
    while missing > 0 and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
