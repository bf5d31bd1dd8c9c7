"""Pages of ``docs/`` and their examples: fenced blocks of ``python`` in groups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A fenced block of Python."""

    page: Path
    #: Examples of a group run in order in one namespace; "" is the group that needs no server.
    group: str
    #: Number of its first line; the first line of the page is 1.
    line: int
    text: str

    def run(self, namespace: dict[str, object]) -> None:
        """Run the example; tracebacks name the page and the line."""
        code = compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")
        exec(code, namespace)


def examples(page: Path, group: str | None = None) -> list[Example]:
    """Return the examples of a page in order: those of one group, or all."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, _, own_group = match["info"].partition(" ")
        if language == "python" and group in (None, own_group):
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Example(page, own_group, line, match["text"]))
    return found


def sessions(page: Path) -> list[str]:
    """Return the fenced blocks of a page without a language: commands and output."""
    return sessions_in(page.read_text())


def sessions_in(text: str) -> list[str]:
    """Return the fenced blocks without a language in a text."""
    return [match["text"] for match in _FENCE.finditer(text) if match["info"] in {"", "text"}]


def without_fences(page: Path) -> str:
    """Return the prose of a page."""
    return _FENCE.sub("", page.read_text())


def sections(page: Path) -> dict[str, str]:
    """Return the text of each heading's section, up to the next heading of any level."""
    text = page.read_text()
    fences = [match.span() for match in _FENCE.finditer(text)]
    headings = [
        match for match in _HEADING.finditer(text) if not any(start <= match.start() < end for start, end in fences)
    ]
    ends = [match.start() for match in headings[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(headings, ends, strict=True)}
