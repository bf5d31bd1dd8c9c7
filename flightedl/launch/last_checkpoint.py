"""The checkpoint that a job has left behind, in words."""

from __future__ import annotations

from flightedl.coordination.checkpoint_places import job_storage
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.domain.queue.storage import progress_of
from flightedl.errors import FlightedlError
from flightedl.formats.checkpoint_files import found_checkpoints


def last_checkpoint(url: str, job: str) -> str:
    """Say which checkpoint of a job is the newest and how much of the data it has; empty if there is none."""
    storage = job_storage(url, job)
    assert storage is not None, "a job with a checkpoint URL has a storage"
    try:
        found = next((each for each in found_checkpoints(storage, job) if isinstance(each, Manifest)), None)
        if found is None:
            return ""
        which = f"checkpoint c-{found.number} at {storage.url}"
        if found.stored_queue is None:
            return which
        epoch, done, total = progress_of(found.stored_queue)
    except FlightedlError as error:
        return f"the last checkpoint at {storage.url} cannot be read now ({error})"
    return f"{which} has {done} of {total} tasks of epoch {epoch + 1}"
