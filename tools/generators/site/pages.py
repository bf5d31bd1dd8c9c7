"""The pages of the site, their order, and their adaptation.

The site consists of copies of the pages in docs/ and of some other pages. In a copy, a link to another page leads to
that page's copy, and a link to a source file becomes plain text. Drawings become part of the page, so that they have
the colors of its theme. Under some headings, a generated section of the reference is inserted.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

from .reference import GENERATED

ROOT = Path(__file__).resolve().parents[3]
#: Heading in the table of contents -> paths of its pages, from the root. A page named index.md represents all pages in
#: its directory.
CONTENTS: dict[str, tuple[str, ...]] = {
    "Start here": ("docs/start.md", "README.md"),
    "Guides": (
        "docs/torch.md",
        "docs/data-only.md",
        "docs/tables.md",
        "docs/data.md",
        "docs/frameworks.md",
        "docs/kubernetes.md",
        "docs/machines.md",
        "docs/online.md",
        "docs/clients.md",
        "docs/moving.md",
        "docs/prove.md",
    ),
    "Concepts": (
        "docs/exactly-once.md",
        "docs/local-sgd.md",
        "docs/modes.md",
        "docs/recovery.md",
        "docs/performance.md",
        "docs/scale.md",
        "docs/architecture.md",
        "docs/glossary.md",
    ),
    "Reference": ("docs/api.md", "docs/commands.md", "docs/settings.md", "schemas/README.md"),
    "Operations": (
        "docs/operations.md",
        "deploy/README.md",
        "docs/alerts/index.md",
        "docs/findings/index.md",
        "docs/security.md",
        "docs/recorded-runs.md",
    ),
    "Development": ("CONTRIBUTING.md", "docs/mutation-testing.md", "CHANGELOG.md"),
}

#: Directory of the source. Links to it lead out of the site, and relative links work as long as it is in the clone.
_SOURCE = "flightedl"
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_PICTURE = re.compile(r"^!\[(?P<text>[^\]]*)\]\((?P<path>[^)\s]+)\)$", re.MULTILINE)
#: The language and the group of an example. The site keeps only the language.
_FENCE = re.compile(r"^(```[a-z]+) [a-z-]+$", re.MULTILINE)
#: Long lines of code are wrapped, because the theme would cut them off.
_STYLE = ".highlight pre { white-space: pre-wrap; overflow-wrap: anywhere; }\n"
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def pages_below(index: str) -> tuple[str, ...]:
    """Return the paths of the other pages in the directory of an index page."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / index).parent.glob("*.md"))
    return tuple(path for path in found if path != index)


_LISTED = tuple(page for pages in CONTENTS.values() for page in pages)
_BELOW = {page: pages_below(page) for page in _LISTED if posixpath.basename(page) == "index.md"}
PAGES = ("docs/index.md", *_LISTED, *(page for pages in _BELOW.values() for page in pages))


def name_of(page: str) -> str:
    """Return the path of a page in the site, such as ``deploy.md`` for ``deploy/README.md``."""
    directory, name = posixpath.split(page)
    if directory.split("/")[0] == "docs":
        return posixpath.relpath(page, "docs")
    return (directory or posixpath.splitext(name)[0]).lower() + ".md"


def adapted(page: str, text: str) -> str:
    """Return the text of a page for the site.

    Args:
        page: Its path from the root.
        text: As it is there.
    """

    def linked(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match["path"]))
        if target == _SOURCE:
            # The site's own directory is in the root, too.
            return (
                f'<a href="{posixpath.relpath("..", posixpath.dirname(name_of(page)))}/{_SOURCE}/">{match["text"]}</a>'
            )
        if target not in PAGES:
            return match["text"]
        path = posixpath.relpath(name_of(target), posixpath.dirname(name_of(page)))
        return f"[{match['text']}]({path}{match['anchor'] or ''})"

    def pictured(match: re.Match[str]) -> str:
        picture = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), match["path"]))
        if 'class="drawing"' in (content := picture.read_text("utf-8", "replace")):
            return f"```{{raw}} html\n{content}```"
        path = posixpath.relpath(name_of(picture.relative_to(ROOT).as_posix()), posixpath.dirname(name_of(page)))
        return f"![{match['text']}]({path})"

    return _FENCE.sub(r"\1", _PICTURE.sub(pictured, _LINK.sub(linked, text)))


def with_reference(page: str, text: str) -> str:
    """Return the text of a page with the reference sections that belong under its headings."""
    section = GENERATED.get(page)
    return text if section is None else _HEADING.sub(lambda match: f"{match[0]}\n\n{section(match[1])}".rstrip(), text)


def tree(pages: tuple[str, ...], directory: str = "", *options: str) -> str:
    """Return a hidden table of contents that lists these pages, for a page in a directory of the site.

    Pages have the short titles that the index gives them.
    """
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    titles = {posixpath.normpath(f"docs/{link['path']}"): link["text"] for link in _LINK.finditer(index)}
    paths = {page: posixpath.relpath(name_of(page).removesuffix(".md"), directory or ".") for page in pages}
    names = (f"{titles[page]} <{path}>" if page in titles else path for page, path in paths.items())
    return "\n".join(("", "```{toctree}", *options, ":hidden:", "", *names, "```", ""))


def contents() -> str:
    """Return the site's tables of contents, for the index page."""
    return "\n".join(tree(pages, "", f":caption: {caption}") for caption, pages in CONTENTS.items())


def write_source(source: Path) -> None:
    """Adapt all pages for the site, and write them to a directory."""
    for picture in (ROOT / "docs" / "pictures").iterdir():
        if picture.suffix in {".svg", ".png"}:
            path = source / "pictures" / picture.name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, path)
    (source / "_static").mkdir(parents=True, exist_ok=True)
    (source / "_static" / "site.css").write_text(_STYLE, "utf-8")
    for page in PAGES:
        text = with_reference(page, adapted(page, (ROOT / page).read_text("utf-8")))
        if page == "docs/index.md":
            text += contents()
        elif page in _BELOW:
            text += tree(_BELOW[page], posixpath.dirname(name_of(page)))
        path = source / name_of(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
