"""Documentation site: ``make docs`` runs this module, which builds ``site/``.

Sphinx is used because MyST reads Markdown in the same way as GitHub, and because the theme furo has a dark and a light
mode and loads no resources from other hosts. The site consists of copies of the pages in docs/ and of a few other
pages. In a copy, a link to another page leads to that page of the site, and a link to a source file becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Heading in the table of contents -> paths of the pages from the root.
CONTENTS: dict[str, tuple[str, ...]] = {
    "Start here": ("docs/start.md", "README.md"),
    "Guides": (
        "docs/torch.md",
        "docs/data-only.md",
        "docs/tables.md",
        "docs/data.md",
        "docs/frameworks.md",
        "deploy/README.md",
    ),
    "Concepts": (
        "docs/exactly-once.md",
        "docs/performance.md",
        "docs/scale.md",
        "docs/architecture.md",
        "docs/glossary.md",
    ),
    "Reference": ("docs/api.md", "docs/commands.md", "docs/settings.md", "schemas/README.md"),
    "Operations": ("docs/operations.md", "docs/security.md", "docs/recorded-runs.md"),
    "Development": ("CONTRIBUTING.md", "docs/mutation-testing.md", "CHANGELOG.md"),
}
PAGES = ("docs/index.md", *(page for pages in CONTENTS.values() for page in pages))
#: Lowest level of headings that can be link targets.
_ANCHOR_LEVELS = 4

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
#: The language and the group of an example. Only the language is kept for the site.
_FENCE = re.compile(r"^(```[a-z]+) [a-z-]+$", re.MULTILINE)


def name_of(page: str) -> str:
    """Return the file name of a page in the site, such as ``deploy.md`` for ``deploy/README.md``."""
    directory, name = posixpath.split(page)
    return name if directory == "docs" else (directory or posixpath.splitext(name)[0]).lower() + ".md"


def adapted(page: str, text: str) -> str:
    """Return the text of a page for the site.

    Args:
        page: Its path from the root.
        text: As it is there.
    """

    def linked(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match["path"]))
        return f"[{match['text']}]({name_of(target)}{match['anchor'] or ''})" if target in PAGES else match["text"]

    return _FENCE.sub(r"\1", _LINK.sub(linked, text))


def contents() -> str:
    """Return the site's tables of contents, for the index page."""
    trees = []
    for caption, pages in CONTENTS.items():
        names = "\n".join(name_of(page).removesuffix(".md") for page in pages)
        trees.append(f"```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{names}\n```\n")
    return "\n" + "\n".join(trees)


def write_source(source: Path) -> None:
    """Adapt all pages for the site, and write them to a directory."""
    source.mkdir(parents=True)
    for page in PAGES:
        text = adapted(page, (ROOT / page).read_text("utf-8"))
        (source / name_of(page)).write_text(text + (contents() if page == "docs/index.md" else ""), "utf-8")


def settings() -> dict[str, Any]:
    """Return Sphinx's settings."""
    import flightedl

    return {
        "project": "flightedl",
        "release": flightedl.__version__,
        "extensions": ["myst_parser", "sphinx_copybutton"],
        "root_doc": "index",
        "html_theme": "furo",
        "html_title": f"flightedl {flightedl.__version__}",
        "html_show_sourcelink": False,
        "myst_heading_anchors": _ANCHOR_LEVELS,
        "copybutton_prompt_text": "$ ",
        # Shell sessions and output are shown unchanged, without highlighting.
        "highlight_language": "text",
    }


def build(site: Path, work: Path) -> int:
    """Build the site. Returns 0, or 1 if any page has a broken link or another problem."""
    from sphinx.application import Sphinx

    shutil.rmtree(work, ignore_errors=True)
    write_source(work / "source")
    app = Sphinx(
        srcdir=work / "source",
        confdir=None,
        outdir=site,
        doctreedir=work / "doctrees",
        buildername="html",
        confoverrides=settings(),
        status=None,
        warning=sys.stderr,
        warningiserror=True,
        exception_on_warning=False,
    )
    app.build()
    return int(app.statuscode)


if __name__ == "__main__":
    sys.exit(build(ROOT / "site", ROOT / "build" / "site"))
