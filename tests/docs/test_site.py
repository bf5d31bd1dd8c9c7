"""The site of the documentation has every page, and its links lead to pages of the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from flightedl_tools.site import PAGES, adapted, contents, name_of, write_source

from .pages import PAGES as DOCS
from .pages import ROOT


def test_the_site_has_every_page_once() -> None:
    assert {str(page.relative_to(ROOT)) for page in DOCS} <= set(PAGES)
    names = [name_of(page) for page in PAGES]
    assert len(set(names)) == len(names)
    assert all(f"\n{name.removesuffix('.md')}\n" in contents() for name in names if name != "index.md")


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("docs/api.md", "[a](torch.md#b)", "[a](torch.md#b)"),
        ("docs/api.md", "[a](../deploy/README.md#b)", "[a](deploy.md#b)"),
        ("deploy/README.md", "[a](../docs/api.md)", "[a](api.md)"),
        ("docs/architecture.md", "[`tasks.py`](../flightedl/domain/queue/tasks.py)", "`tasks.py`"),
        ("docs/api.md", "[a](#b) [c](https://example.org)", "[a](#b) [c](https://example.org)"),
        ("docs/api.md", "```python job\nx\n```", "```python\nx\n```"),
    ],
)
def test_links_and_examples_are_adapted(page: str, text: str, expected: str) -> None:
    assert adapted(page, text) == expected


def test_the_source_of_the_site_has_all_pages(tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    assert {file.name for file in (tmp_path / "source").iterdir()} == {name_of(page) for page in PAGES}
