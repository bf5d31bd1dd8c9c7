"""Hostile messages of a feed: a follower applies them completely or not at all, and then applies correct ones."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flightedl.client.following.copy import FollowedModel
from flightedl.domain.feed.follower import Use
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import MessageError
from flightedl.messages.base import decode, encode
from flightedl.messages.feed import ChangesHeader, Position
from flightedl.wire.changes import Change, decode_changes, encode_changes

EVICT = Evict(unused_versions=5, unused_epochs=2)
TABLES = [
    TableSpec("users", 2, SGD(lr=1.0), evict=EVICT, unknown="zero"),
    TableSpec("short", 3, SGD(lr=1.0), dtype="bfloat16"),
]
IDS = np.arange(5, dtype=np.uint64)
#: Generations of hostile and of correct pservers.
HOSTILE, CORRECT = 5, 1 << 40


def position(number: int, generation: int = HOSTILE) -> Position:
    return Position(life=1, generation=generation, placement=0, number=number)


def correct_base() -> tuple[ChangesHeader, list[Change]]:
    header = ChangesHeader(position=position(7, CORRECT), since=None, blocks=[(0, 2)], buckets=[(0, BUCKETS)])
    ages = np.ones(5, np.uint32), np.zeros(5, np.uint32)
    return header, [
        Change("values", "w", 0, 0, 6, 1, values=np.arange(6, dtype=np.float32)),
        Change("values", "b", 1, 0, 3, 1, values=np.arange(3, dtype=np.uint16)),
        Change("clear", start=0, stop=BUCKETS),
        Change("rows", "users", 0, 0, 0, 0, 0, IDS, *ages, np.full((5, 2), 3, np.float32)),
        Change("expiry", "users", stop=BUCKETS, versions=np.zeros(BUCKETS, np.int64)),
    ]


def send(model: FollowedModel, header: ChangesHeader, changes: list[Change]) -> Use:
    received = model.begin(decode(encode(header), ChangesHeader), 1.0)
    for each in [*changes, Change("end", block=len(changes))]:
        received.add(decode_changes(encode_changes([each])))
    return model.apply(0, received)


def model_of() -> FollowedModel:
    specs = [ParameterSpec("w", (6,)), ParameterSpec("b", (3,), "bfloat16")]
    return FollowedModel(plan_shards(specs, 1, tables=TABLES))


def state_of(model: FollowedModel) -> dict[str, Any]:
    arrays = {name: array.tobytes() for name, array in model.arrays().items()}
    rows = {name: [part.tobytes() for part in model.rows(name)] for name in ("users", "short")}
    return {**arrays, **rows, "positions": model.positions(), "is_complete": model.is_complete}


INTEGERS = st.one_of(st.integers(-2, BUCKETS + 2), st.integers(-(1 << 63), (1 << 63) - 1))
ITEMS = {"ids": 8, "versions": 4, "epochs": 4, "values": 8}
CONTENT = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([IDS.tobytes(), bytes(20), b"\xff" * 20, b"\xff" * 40, bytes(8 * BUCKETS)]),
)
CHANGES = st.builds(
    Change,
    kind=st.sampled_from(["values", "clear", "removed", "rows", "expiry", "unknown", ""]),
    name=st.sampled_from(["w", "b", "users", "short", "x", ""]),
    block=INTEGERS,
    start=INTEGERS,
    stop=INTEGERS,
    version=INTEGERS,
    epoch=INTEGERS,
    **dict.fromkeys(ITEMS, CONTENT),
)
RANGES = st.lists(
    st.one_of(st.just((0, BUCKETS)), st.tuples(INTEGERS, INTEGERS), st.sampled_from([(0, 2), (0, 1), (1, 2)])),
    max_size=3,
)
HEADERS = st.builds(
    ChangesHeader,
    position=st.builds(position, st.integers(0, 9)),
    since=st.one_of(st.none(), st.integers(-2, 9), INTEGERS),
    blocks=RANGES,
    buckets=RANGES,
    wire=st.sampled_from(["", "bfloat16", "float16", "int8"]),
    checkpoint=st.one_of(st.none(), INTEGERS),
    leaving=RANGES,
)


#: A change of an empty range of buckets.
EMPTY = Change(kind="clear", name="w", block=0, start=0, stop=0, version=0, epoch=0, **dict.fromkeys(ITEMS, b""))


@settings(deadline=None, max_examples=150)
@example([(ChangesHeader(position=position(6), since=0, blocks=[], buckets=[], wire="float16"), [EMPTY])])
@given(messages=st.lists(st.tuples(HEADERS, st.lists(CHANGES, max_size=4)), max_size=4))
def test_a_hostile_message_is_applied_completely_or_not_at_all(
    messages: list[tuple[ChangesHeader, list[Change]]],
) -> None:
    model = model_of()
    header, changes = correct_base()
    send(model, msgspec.structs.replace(header, position=position(1)), changes)
    for hostile in messages:
        before = state_of(model)
        try:
            use = send(model, *hostile)
        except MessageError:
            use = Use.IGNORE
        if use is not Use.APPLY:
            assert state_of(model) == before
    assert send(model, header, changes) is Use.APPLY
    expected = model_of()
    send(expected, header, changes)
    assert state_of(model) == state_of(expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blocks", [(0, 3)]),
        ("blocks", [(-1, 1)]),
        ("blocks", [(1, 0)]),
        ("blocks", [(0, 2)] * 2),
        ("blocks", [(0, 1 << 62)]),
        ("buckets", [(0, BUCKETS + 1)]),
        ("buckets", [(0, BUCKETS)] * 1000),
        ("leaving", [(0, 1 << 62)]),
        ("wire", "int8"),
    ],
    ids=str,
)
def test_headers_that_do_not_fit_the_model_are_rejected(field: str, value: Any) -> None:
    header = msgspec.structs.replace(correct_base()[0], **{field: value})
    with pytest.raises(MessageError, match="a message of the feed"):
        model_of().begin(header, 1.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("clear", start=0, stop=BUCKETS + 1), "no buckets 0 to 1025"),
        (Change("clear", start=0, stop=1 << 62), "no buckets"),
        (Change("clear", start=5, stop=4), "no buckets 5 to 4"),
        (Change("expiry", "users", start=-1, stop=1, versions=bytes(16)), "no buckets -1 to 1"),
        (Change("expiry", "users", stop=3, versions=bytes(16)), "not those of its buckets"),
        (Change("expiry", "x", stop=2, versions=bytes(16)), "no table 'x'"),
        (Change("removed", "users", ids=bytes(7)), "in the middle of a number"),
        (Change("rows", "users", ids=bytes(8), versions=bytes(4), epochs=bytes(4), values=bytes(9)), "in the middle"),
        (Change("values", "w", stop=6, values=bytes(23)), "in the middle of a number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("since", [None, 0], ids=["base", "increment"])
def test_changes_that_do_not_fit_the_model_are_rejected(change: Change, text: str, since: int | None) -> None:
    header = msgspec.structs.replace(correct_base()[0], since=since)
    with pytest.raises(MessageError, match=text):
        send(model_of(), header, [change])


@pytest.mark.parametrize("values", [b"", bytes(1), bytes(11), bytes(12)], ids=len)
def test_rounded_values_of_another_size_are_rejected(values: bytes) -> None:
    header = msgspec.structs.replace(correct_base()[0], wire="bfloat16")
    change = Change("values", "w", 0, 0, 6, 1, values=values)
    model = model_of()
    if len(values) == 12:
        assert send(model, header, [change]) is Use.APPLY
        return
    with pytest.raises(MessageError):
        send(model, header, [change])
