"""``python -m tools.generators.site`` builds the site."""

from __future__ import annotations

import sys

from .build import build
from .pages import ROOT

if __name__ == "__main__":
    sys.exit(build(ROOT / "site", ROOT / "build" / "site"))
