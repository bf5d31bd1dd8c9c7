"""A server's log in JSON, for programs."""

from __future__ import annotations

import json
import logging
import sys

from flightedl.process.log_format import JsonFormatter


def written(text: str, *values: object, **more: object) -> dict[str, object]:
    record = logging.LogRecord("flightedl.master", logging.INFO, "", 1, text, values, **{"exc_info": None, **more})  # type: ignore[arg-type]
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    return found


def test_named_values_of_a_message_become_typed_fields() -> None:
    found = written("epoch is done epoch=%d seconds=%.3f trainer=%s", 3, 1.5, "t")
    assert found["message"] == "epoch is done epoch=3 seconds=1.500 trainer=t"
    assert found["values"] == {"epoch": 3, "seconds": 1.5, "trainer": "t"}
    assert (found["level"], found["logger"]) == ("INFO", "flightedl.master")


def test_unnamed_values_appear_only_in_the_message() -> None:
    assert "values" not in written("waiting for %s", "the lock")
    assert written("%d%% of %s are done epoch=%d", 5, "all", 2)["values"] == {"epoch": 2}
    assert written("loop=%s", ("a", "b"))["values"] == {"loop": "('a', 'b')"}


def test_an_error_is_part_of_the_object() -> None:
    try:
        int("no\nway")
    except ValueError:
        assert "ValueError" in str(written("it failed", exc_info=sys.exc_info())["error"])
