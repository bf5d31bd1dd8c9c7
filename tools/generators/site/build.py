"""Sphinx build of the site."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import flightedl

from .pages import write_source

#: Lowest level of headings that can be targets of links.
_ANCHOR_LEVELS = 4


def settings() -> dict[str, Any]:
    """Return Sphinx's settings."""
    return {
        "project": "flightedl",
        "release": flightedl.__version__,
        "extensions": ["myst_parser", "sphinx_copybutton"],
        "root_doc": "index",
        # Smart quotes would turn the two dashes of an option into one.
        "smartquotes": False,
        "html_theme": "furo",
        "html_static_path": ["_static"],
        "html_css_files": ["site.css"],
        "html_title": f"flightedl {flightedl.__version__}",
        "html_show_sourcelink": False,
        "html_show_copyright": False,
        "myst_heading_anchors": _ANCHOR_LEVELS,
        "copybutton_prompt_text": "$ ",
        # Shell sessions and output are shown unchanged, without highlighting.
        "highlight_language": "text",
    }


def build(site: Path, work: Path) -> int:
    """Build the site. Return 0, or 1 if any page has a broken link or another problem."""
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
        parallel=os.cpu_count() or 1,
    )
    app.build()
    return int(app.statuscode)
