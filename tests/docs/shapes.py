"""Shapes of printed lines: the lines without numbers, names of machines and processes, and paths.

A line that a page shows must have the shape of a line that a command has printed.
"""

from __future__ import annotations

import re
import socket

#: Commands whose output in the page of the commands is compared by ``test_start``.
COMPARED = ("run", "data", "status", "events", "plot", "checkpoint", "dataset", "mode")
_RULES = (
    # The parts of a mode, and of the profile of trainers' time, depend on the run.
    (re.compile(r"^(mode +)?(Sync|Async|Bounded)\(.*?\)"), r"\1MODE"),
    (re.compile(r"^time .*"), "time"),
    # Depends on which pserver registered first.
    (re.compile(r" \(process pserver-\d+\)"), ""),
    (re.compile(r", \d+ copies assigned|(?<=accepted), now at version \d+"), ""),
    # The batches of a round.
    (re.compile(r"\d+/\d+/\d+(, \d+/\d+/\d+)*"), "BATCHES"),
    (re.compile(r" --no-page| --record \S+"), ""),
    (re.compile(r"\d+ x (kill|freeze) \w+(, \d+ x (kill|freeze) \w+)*"), "STRIKES"),
    (re.compile(r"\w+-\d+-[0-9a-f]{6,}"), "TRAINER"),
    (re.compile(r"(?<!\S)\S*/\S+"), "PATH"),
    (re.compile(r"-?\d[\d,]*(\.\d*)?(e-?\d+)?"), "N"),
    # A curve.
    (re.compile(r"[\u2800-\u28ff][\u2800-\u28ff\s]*"), "CURVE"),
    (re.compile(r"\s+(?=\])|^loss +train\S*(?=: )"), ""),
    (re.compile(r"\s+"), " "),
)


def shape(line: str) -> str:
    """Return the shape of a line."""
    line = line.strip().replace(f" {socket.gethostname()} pid ", " vm pid ")
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line
