"""``python -m flightedl.pserver``: run a pserver whose settings come from environment variables."""

from __future__ import annotations

from flightedl.config import PserverSettings, settings
from flightedl.process.ending import end_at_once
from flightedl.process.importing import of_a_server
from flightedl.process.tuning import leave_out_pandas_and_scipy

if __name__ == "__main__":
    # Must be called before the imports below, which load NumPy.
    leave_out_pandas_and_scipy()
    with of_a_server():
        from flightedl.pserver.main import run

    end_at_once(run(settings(PserverSettings)))
