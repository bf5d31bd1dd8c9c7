"""The site of the documentation has every page, and its links lead to pages of the site."""

from __future__ import annotations

import html
import importlib.util
import posixpath
import re
import sys
from pathlib import Path

import pytest

from tools.generators.site.pages import CONTENTS, PAGES, adapted, name_of, with_reference, write_source
from tools.generators.site.reference import markdown

from .pages import PAGES as DOCS
from .pages import ROOT

PICTURES = ROOT / "docs" / "pictures"


def test_the_site_has_every_page_once() -> None:
    assert {str(page.relative_to(ROOT)) for page in DOCS} <= set(PAGES)
    names = [name_of(page) for page in PAGES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("docs/api.md", "[a](torch.md#b)", "[a](torch.md#b)"),
        ("docs/api.md", "[a](../deploy/README.md#b)", "[a](deploy.md#b)"),
        ("deploy/README.md", "[a](../docs/api.md)", "[a](api.md)"),
        ("docs/index.md", "[a](../flightedl)", '<a href="../flightedl/">a</a>'),
        ("docs/alerts/index.md", "[a](../../flightedl)", '<a href="../../flightedl/">a</a>'),
        ("docs/architecture.md", "[`tasks.py`](../flightedl/domain/queue/tasks.py)", "`tasks.py`"),
        ("docs/api.md", "[a](#b) [c](https://example.org)", "[a](#b) [c](https://example.org)"),
        ("docs/api.md", "```python job\nx\n```", "```python\nx\n```"),
    ],
)
def test_links_and_examples_are_adapted(page: str, text: str, expected: str) -> None:
    assert adapted(page, text) == expected


def test_the_source_of_the_site_has_all_pages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_source(source)
    assert {file.name for file in PICTURES.glob("*.[sp]*g")} == {file.name for file in (source / "pictures").iterdir()}
    files = {file.relative_to(source).as_posix(): file.read_text("utf-8") for file in source.rglob("*.md")}
    assert files.keys() == {name_of(page) for page in PAGES}
    listed = [
        (Path(name).parent / entry).as_posix()
        for name, text in files.items()
        for tree in re.findall(r"^```\{toctree\}\n(?::.*\n)*\n((?:.+\n)*)```$", text, re.MULTILINE)
        for entry in re.sub(r"^.* <(.*)>$", r"\1", tree, flags=re.MULTILINE).splitlines()
    ]
    assert sorted([*listed, "index"]) == sorted(name.removesuffix(".md") for name in files)


@pytest.mark.parametrize("name", ["gradient", "task", "row"])
def test_the_drawings_are_current(name: str) -> None:
    spec = importlib.util.spec_from_file_location("drawings", PICTURES / "drawings.py")
    assert spec is not None
    assert spec.loader is not None
    drawings = importlib.util.module_from_spec(spec)
    sys.modules["drawings"] = drawings
    spec.loader.exec_module(drawings)
    assert (PICTURES / f"{name}.svg").read_text("utf-8") == drawings.drawn(drawings.JOURNEYS[name]), "make pictures"
    assert (PICTURES / "architecture.svg").read_text("utf-8") == drawings.architecture(), "make pictures"


def test_a_drawing_becomes_part_of_the_page_and_a_picture_stays_a_file() -> None:
    assert '<svg class="drawing"' in adapted("docs/tables.md", "![A row](pictures/row.svg)\n")
    assert adapted("README.md", "![a](docs/pictures/kill.svg)\n") == "![a](pictures/kill.svg)\n"
    assert adapted("docs/alerts/index.md", "![a](../pictures/page.png)\n") == "![a](../pictures/page.png)\n"


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda picture: picture.stem)
def test_pictures_load_nothing_from_other_hosts(picture: Path) -> None:
    assert set(re.findall(r"""https?://[^"'<\s]+|url\((?!#)[^)]*""", picture.read_text("utf-8"))) - {
        "http://www.w3.org/2000/svg"
    } == set(re.findall(r"http://127.0.0.1:\d+/", picture.read_text("utf-8")))


def test_the_recorded_terminal_shows_three_kills_and_a_complete_job() -> None:
    shown = html.unescape(re.sub(r"<[^>]+>", "\n", (PICTURES / "kill.svg").read_text("utf-8"))).replace("\xa0", " ")
    assert re.findall(r"kill -9 \d+   # (\S+)", shown) == ["trainer-0", "pserver-1", "master"]
    assert "200 of 200 tasks of the last epoch done, 0 tasks failed" in shown


def test_the_index_has_the_order_of_the_site() -> None:
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    front, rest = text.split("\n## ", 1)
    targets = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", rest)
    listed = [posixpath.normpath(posixpath.join("docs", target)) for target in targets]
    assert "](start.md)" in front
    assert "](../README.md)" in front
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(CONTENTS)[1:]
    assert listed == [page for pages in list(CONTENTS.values())[1:] for page in pages]


def test_the_site_has_the_reference_under_its_headings() -> None:
    page = with_reference("docs/api.md", "# API\n\n### `job.log`, `data.epoch`\n\nText.\n")
    assert "job.log(**metrics: SupportsFloat)" in page
    assert "data.epoch: int" in page
    assert page.endswith("\n\nText.\n")
    assert "| `--follow` |" in with_reference("docs/commands.md", "## `flightedl events`\n")


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Do ``this`` with :class:`flightedl.x.Job`.", "Do `this` with `Job`."),
        ("Do.\n\n::\n\n    a ``b``\n\nMore ``c``.", "Do.\n\n```text\na ``b``\n```\n\nMore `c`."),
        (
            "Do.\n\nArgs:\n    a: One\n        and ``more``.\n    **b: Two:\n\n        c: Three.",
            "Do.\n\n**Arguments**\n\n* `a`: One and `more`.\n* `**b`: Two:\n  * `c`: Three.",
        ),
        ("Do.\n\nReturns:\n    It.\n\nRaises:\n    E: why.", "Do.\n\n**Returns**\n\nIt.\n\n**Raises**\n\n* `E`: why."),
    ],
)
def test_docstrings_become_markdown(docstring: str, expected: str) -> None:
    assert markdown(docstring) == expected
