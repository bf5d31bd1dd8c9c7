"""Output made from logged values at the end of a run: one file of all points, and a picture of their curves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flightedl.errors import FlightedlError, NotFoundError
from flightedl.process.tuning import let_pandas_wait

PICTURE = "metrics.svg"


def keep_curves(directory: Path) -> Iterator[str]:
    """Write both to the output directory; what is to be said of it. A run that logged nothing gets neither."""
    # Needed when the job is over.
    from flightedl.curves.drawing import draw
    from flightedl.curves.files import read_points, write_whole
    from flightedl.curves.merging import LABELS, by_name, curves_of

    try:
        points = read_points(directory)
        let_pandas_wait()
        write_whole(directory, points)
        curves = curves_of(points)
        draw(directory / PICTURE, by_name({directory.name: curves}), x_label=LABELS["records"])
        yield f"curves of {', '.join(curves)} are in {directory / PICTURE}"
    except NotFoundError:
        return
    except (FlightedlError, OSError) as error:
        yield f"what was logged is in {directory}, but there is no picture of it: {error}"
