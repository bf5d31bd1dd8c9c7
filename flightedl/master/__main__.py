"""``python -m flightedl.master``: a master whose settings come from the environment."""

from __future__ import annotations

import sys

from flightedl.config import MasterSettings, settings
from flightedl.master.main import run

if __name__ == "__main__":
    sys.exit(run(settings(MasterSettings)))
