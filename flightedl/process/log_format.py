"""Log formats of a server: lines for humans, or one JSON object per line for programs.

Messages end in ``key=value`` pairs. In JSON, each value is a separate field, so programs need not parse the message.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
from typing import Any

#: A placeholder in a message, and the name that precedes it, if any.
_PLACE = re.compile(r"(?:(\w+)=)?%(?:[-+ #0]*\d*(?:\.\d+)?)([a-zA-Z%])")
_PLAIN = (bool, int, float, str, type(None))


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object: time, level, logger, message, the message's values, and any error."""

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        written: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if values := _named_values(record):
            written["values"] = values
        if record.exc_info:
            written["error"] = self.formatException(record.exc_info)
        return json.dumps(written, ensure_ascii=False)


def _named_values(record: logging.LogRecord) -> dict[str, Any]:
    given = record.args if isinstance(record.args, tuple) else ()
    places = [name for name, kind in _PLACE.findall(str(record.msg)) if kind != "%"]
    if len(places) != len(given):
        return {}
    return {
        name: value if isinstance(value, _PLAIN) else str(value)
        for name, value in zip(places, given, strict=True)
        if name
    }


def set_up(level: str, log_format: str) -> None:
    """Make this process log to standard error, in the format "text" or "json"."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
