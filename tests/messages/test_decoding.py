"""Threads that decode a type for the first time at once: one of them creates the decoder while the others wait."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from flightedl.messages import decoding
from flightedl.messages.decoding import from_json, from_msgpack

IS_RESOLVING, MAY_GO_ON = threading.Event(), threading.Event()


def resolved_slowly() -> Any:
    """Resolve an annotation slowly, so that another thread runs in between, as it may with any annotation."""
    IS_RESOLVING.set()
    assert MAY_GO_ON.wait(20.0)
    return int


class Inner(msgspec.Struct):
    number: "resolved_slowly()"  # type: ignore[valid-type]  # noqa: UP037


class Outer(msgspec.Struct):
    inner: Inner
    name: str


class Other(msgspec.Struct):
    outer: Outer


@pytest.mark.parametrize(("read", "write"), [(from_json, msgspec.json.encode), (from_msgpack, msgspec.msgpack.encode)])
def test_no_thread_sees_a_decoder_before_it_is_complete(read: Any, write: Any) -> None:
    kinds = (Outer, Outer, Other)
    found: list[object] = []
    data = {"name": "x", "inner": {"number": 3}, "outer": {"name": "x", "inner": {"number": 3}}}
    threads = [threading.Thread(target=lambda kind=kind: found.append(read(write(data), kind))) for kind in kinds]
    if read is from_json:
        # msgspec caches its analysis of a type for both formats, so only the first one is slow.
        threads[0].start()
        assert IS_RESOLVING.wait(20.0)
        for thread in threads[1:]:
            thread.start()
            thread.join(0.05)
        assert found == []
        MAY_GO_ON.set()
    else:
        # The test of the other format may run in another process.
        MAY_GO_ON.set()
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(20.0)
    expected = Outer(Inner(3), "x")
    assert sorted(found, key=repr) == sorted([expected, expected, Other(expected)], key=repr)


def test_a_decoder_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_of_json", {})
    assert from_json(b"[1]", list[int]) == from_json("[1]", list[int]) == [1]
    assert len(decoding._of_json) == 1
    with pytest.raises(msgspec.ValidationError):
        from_json(b'["1"]', list[int])
