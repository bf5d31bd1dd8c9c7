"""``python -m flightedl.pserver``: a pserver whose settings come from the environment."""

from __future__ import annotations

import sys

from flightedl.config import PserverSettings, settings
from flightedl.pserver.main import run

if __name__ == "__main__":
    sys.exit(run(settings(PserverSettings)))
