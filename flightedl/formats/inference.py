"""Types of the columns in text files, inferred from all values.

While a file is indexed, each part of it yields a *guess* for each column: a field whose type can represent the values
seen so far, and whose metadata lists all *forms* that every one of them has. A form is the name of a type, followed by
a spelling if values of different spellings must not share a column (``true`` and ``TRUE``; with and without a zone).
Two guesses are joined by keeping the forms that both have, so the result does not depend on the order of chunks or
files. A column without a common form is text, which represents every value as it is written.

* Whole numbers are int64, otherwise uint64, if each is written canonically: no leading zero or ``+``, no ``-0``.
* Ordinary decimals and ``inf`` are double. A column is not double if a value overflows or vanishes, is a whole number
  beyond 2**53, has a leading ``+``, is padded with zeros, or is written like ``1E5``: it is probably an identifier.
* Booleans, dates and times are inferred if all values have one spelling.
* Features of TFRecord have types. A form of one that always has one value is the list of such values, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from flightedl.formats.chunks import named_type

FORMS = b"forms"
_LIST = "list<"
_SEPARATOR = "|"
INT64, UINT64, DOUBLE = "int64", "uint64", "double"
#: Doubles represent every whole number up to this one exactly.
EXACT = 2**53
_BOOLEANS = (("true", "false"), ("True", "False"), ("TRUE", "FALSE"))
#: Patterns of texts in which each digit is replaced by 1, apart from a zero with which a number begins.
_DIGITS = str.maketrans("023456789", "1" * 9)
_SHAPES = bytes.maketrans(b"023456789", b"1" * 9)
_ZERO, _MINUS = b"0-"
_BLANKS = " \t"
_NUMBERS_BEGIN = tuple("-.0123456789iI")
#: The groups are separator, time, fraction and zone.
_STAMP = re.compile(r"[01]111-11-11(?:([T ])(11(?::11)?|11:11:11(\.1{1,9})?)(Z|[+-]11:?(?:11)?)?)?")
#: The group is a canonical whole number. Numbers with an exponent have a point, or their exponent has a sign.
_NUMBER = re.compile(
    r"(0|-?1+)|-?(?:(?:0|1+)(?:\.1*(?:e[+-]?1+)?|e[+-]1+|)|\.1+(?:e[+-]?1+)?|inf(?:inity)?)", re.IGNORECASE
)
_TIME = re.compile(r"([01]\d|2[0-3])(:[0-5]\d){1,2}")


class MixedTypesError(ValueError):
    """A feature of TFRecord has values of two types, which do not become text as in text files."""


def guessed(name: str, forms: Iterable[str]) -> pa.Field:
    """Return the guess for a column with values that all have these forms, the preferred form first."""
    names = list(forms)
    return pa.field(name, _type_of(names[0]) if names else pa.string(), metadata={FORMS: "\n".join(names).encode()})


def forms(field: pa.Field) -> list[str]:
    """Return the forms that all values of the column have; none if it is text."""
    metadata: dict[bytes, bytes] = field.metadata or {}
    return metadata.get(FORMS, b"").decode().splitlines()


def is_guess(field: pa.Field) -> bool:
    """True if the column's type is inferred, so that it may also become text."""
    return FORMS in (field.metadata or {})


def candidates(field: pa.Field) -> list[pa.DataType]:
    """Return the types that can represent the column of a guess, the preferred type first."""
    return [*map(_type_of, forms(field)), pa.string()]


def _type_of(form: str) -> pa.DataType:
    return named_type(form.partition(_SEPARATOR)[0])


def joined_guesses(first: pa.Field, other: pa.Field) -> pa.Field:
    """Return the guess for the values of both columns. Raises MixedTypesError if TFRecord files have no common form."""
    one, two = first.type, other.type
    if pa.types.is_null(two) or (one == two and first.metadata == other.metadata and not pa.types.is_nested(one)):
        return first
    if pa.types.is_null(one):
        return other
    ours, theirs = forms(first), forms(other)
    common = [form for form in ours if form in theirs]
    if not common and any(form.startswith(_LIST) for form in (*ours, *theirs)):
        raise MixedTypesError(f"feature {first.name!r} is {two}, but {one} in earlier records")
    if common:
        return guessed(first.name, common)
    if pa.types.is_struct(one) and pa.types.is_struct(two):
        inner = joined_schemas(pa.schema(list(one)), pa.schema(list(two)))
        kind: pa.DataType = pa.struct(list(inner))
        parts = [
            (one.field(name), two.field(name), inner.field(name))
            for name in {f.name for f in one} & {f.name for f in two}
        ]
    elif pa.types.is_list(one) and pa.types.is_list(two):
        item = joined_guesses(one.value_field, two.value_field)
        kind = pa.list_(item)
        parts = [(one.value_field, two.value_field, item)]
    else:
        return guessed(first.name, ())
    # A column whose inner values differ in type is text as a whole, as it is when they differ within a chunk.
    is_mixed = any(_is_mixed(*part) for part in parts)
    return pa.field(first.name, pa.string() if is_mixed else kind, metadata={FORMS: b""})


def joined_schemas(first: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the guesses for the records of both schemas. Either schema may lack columns of the other."""
    found = {field.name: field for field in first}
    for field in other:
        known = found.get(field.name)
        found[field.name] = field if known is None else joined_guesses(known, field)
    return pa.schema(list(found.values()))


def _is_mixed(one: pa.Field, two: pa.Field, joined: pa.Field) -> bool:
    texts = (pa.types.is_string, pa.types.is_timestamp, pa.types.is_null)
    return pa.types.is_string(joined.type) and not all(any(test(f.type) for test in texts) for f in (one, two))


def guess_of_texts(name: str, values: pa.ChunkedArray) -> pa.Field:
    """Return the guess for a column of CSV, given its values as strings or nulls."""
    texts = values.drop_null().combine_chunks()
    if not len(texts):
        return pa.field(name, pa.null())
    first = texts[0].as_py()
    for spelling in _BOOLEANS:
        if first in spelling:
            return guessed(name, [f"bool|{spelling[0]}"] if {*texts.unique().to_pylist()} <= {*spelling} else ())
    if _TIME.fullmatch(first):
        distinct = texts.unique().to_pylist()
        is_time = all(len(text) == len(first) and _TIME.fullmatch(text) for text in distinct)
        return guessed(name, [f"time32[s]|{len(first)}"] if is_time else ())
    found = forms_of_dates(texts) or _forms_of_numbers(texts)
    if not found and first.strip(_BLANKS)[:1] in _NUMBERS_BEGIN:
        # The parser ignores blanks around numbers.
        found = _forms_of_numbers(compute().ascii_trim(texts, _BLANKS))
    return guessed(name, found)


def forms_of_dates(texts: pa.StringArray, *, has_dates: bool = True) -> list[str]:
    """Return the forms of these texts as dates and timestamps. Without ``has_dates``, dates are timestamps, as in JSON.

    All texts must have the same separator, precision (apart from fractions of a second), and kind of zone.
    """
    found = _matched(texts, _STAMP)
    kinds = {(match[1], (match[2] or "")[:8], bool(match[4])) for match in found}
    if len(kinds) != 1:
        return []
    separator, clock, has_zone = kinds.pop()
    if separator is None:
        wanted = {"date32[day]": ""} if has_dates else {"timestamp[s]": "date"}
    else:
        units = ["ns"] if any(match[3] for match in found) else ["s", "ns"]
        form = f"{separator}{len(clock) > 2:d}{len(clock) > 5:d}"
        zone = ", tz=UTC" if has_zone else ""
        wanted = {f"timestamp[{unit}{zone}]": form for unit in units if has_dates or unit == "s"}
    names, parsed = [], texts
    for name, form in wanted.items():
        parsed = None if parsed is None else _cast(parsed, named_type(name))
        if parsed is not None:
            names.append(name + _SEPARATOR + form)
    return names


def _forms_of_numbers(texts: pa.StringArray) -> list[str]:
    found = _matched(texts, _NUMBER)
    if not found:
        return []
    for kind in (pa.int64(), pa.uint64()) if all(match[1] for match in found) else ():
        numbers = _cast(texts, kind)
        if numbers is not None:
            return forms_of_whole(numbers)
    return [DOUBLE] if _are_decimals(texts, texts.cast(pa.float64())) else []


def forms_of_whole(numbers: pa.Array) -> list[str]:
    """Return the forms of canonical whole numbers."""
    least, most = compute().min_max(numbers).as_py().values()
    return [
        *([INT64] if most < 2**63 else []),
        *([UINT64] if least >= 0 else []),
        *([DOUBLE] if least >= -EXACT and most <= EXACT else []),
    ]


def _are_decimals(texts: pa.StringArray, parsed: pa.DoubleArray) -> bool:
    """True if no value overflows or vanishes, or is a whole number beyond ``EXACT``."""
    # With buffers, because the conversions between NumPy and Arrow import pandas, if it is installed.
    values = np.frombuffer(parsed.buffers()[1], np.float64, len(parsed))
    suspects = (
        (np.isinf(values), r".*\d"),
        (values == 0, r"[^eE]*[1-9]"),
        (np.abs(values) >= EXACT, r"-?(?!9007199254740992\.?0*$)\d+\.?0*$"),
    )
    for rows, pattern in suspects:
        bits = pa.py_buffer(np.packbits(rows, bitorder="little"))
        chosen = pa.Array.from_buffers(pa.bool_(), len(rows), [None, bits])
        if rows.any() and any(re.match(pattern, text) for text in texts.filter(chosen).unique().to_pylist()):
            return False
    return True


def _matched(texts: pa.StringArray, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Match the distinct shapes of the texts. Return an empty list if the pattern does not match one of them."""
    if not pattern.fullmatch(texts[0].as_py().translate(_DIGITS)):  # Most columns of text fail here.
        return []
    _, places, buffer = texts.buffers()
    data, shape = np.frombuffer(buffer, np.uint8), bytearray(buffer).translate(_SHAPES)
    marked = np.frombuffer(shape, np.uint8)
    first = np.frombuffer(places, np.int32)[texts.offset : texts.offset + len(texts)]
    for _ in range(2):  # Before and after a minus.
        first = first[first < len(data)]
        lead = data[first]
        marked[first[lead == _ZERO]] = _ZERO
        first = first[lead == _MINUS] + 1
    distinct = pa.StringArray.from_buffers(len(texts), places, pa.py_buffer(shape), offset=texts.offset).unique()
    found = [match for match in map(pattern.fullmatch, distinct.to_pylist()) if match is not None]
    return found if len(found) == len(distinct) else []


def _cast(values: pa.Array, kind: pa.DataType) -> Any:
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return None


def compute() -> Any:
    """Return ``pyarrow.compute``."""
    # Imported lazily: the import creates 300 functions, and only indexing needs them.
    import pyarrow.compute as pc

    return pc
