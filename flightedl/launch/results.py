"""Results of a run: a picture of its curves, and a description of its last checkpoint.

The modules that create these results are imported only after the job has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flightedl.errors import FlightedlError, NotFoundError

PICTURE = "metrics.svg"


def keep_curves(directory: Path) -> Iterator[str]:
    """Write all logged points, if there are any, and a picture of their curves. Yield messages about the files."""
    from flightedl.curves.drawing import draw
    from flightedl.curves.files import read_points, write_merged
    from flightedl.curves.merging import LABELS, by_name, curves_of
    from flightedl.process.tuning import defer_pandas

    try:
        points = read_points(directory)
        defer_pandas()
        write_merged(directory, points)
        curves = curves_of(points)
        draw(directory / PICTURE, by_name({directory.name: curves}), x_label=LABELS["records"])
        yield f"curves of {', '.join(curves)} are in {directory / PICTURE}"
    except NotFoundError:
        return
    except (FlightedlError, OSError) as error:
        yield f"the logged points are in {directory}, but their curves could not be drawn: {error}"


def last_checkpoint(url: str, job: str) -> str:
    """Describe a job's newest checkpoint and its progress; empty if there is no checkpoint."""
    from flightedl.coordination.checkpoint_places import job_storage
    from flightedl.domain.checkpoint.manifest import Manifest
    from flightedl.domain.queue.storage import progress_of
    from flightedl.formats.checkpoint_files import found_checkpoints

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
        return f"the last checkpoint at {storage.url} cannot be read at the moment ({error})"
    return f"{which} has {done} of {total} tasks of epoch {epoch + 1}"
