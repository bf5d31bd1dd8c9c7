"""Where the checkpoints of a job lie: under the job's name at the URL that all its servers are given."""

from __future__ import annotations

from flightedl.adapters.storage import open_storage
from flightedl.ports import Storage


def job_storage(url: str, job: str) -> Storage | None:
    """The storage of a job; None: it keeps no checkpoints.

    Raises:
        UsageError: the URL cannot be used.
    """
    return open_storage(f"{url.rstrip('/')}/{job}") if url else None
