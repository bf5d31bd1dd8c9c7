"""Load parameters from a file or a checkpoint, for example as initial values: ``job.parameters(fe.load(url))``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from flightedl.adapters.storage import FsspecFiles, open_storage
from flightedl.client.arguments import url_of
from flightedl.coordination.checkpoint_places import specs_of
from flightedl.domain.checkpoint.manifest import Manifest, candidates
from flightedl.domain.data_urls import without_credentials
from flightedl.errors import CorruptError, DataError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints, load_parameters
from flightedl.formats.model_files import format_of, read_model
from flightedl.kernels.half_precision import array_dtype
from flightedl.ports import Storage

Array = npt.NDArray[np.generic]

_SUFFIXES = (".safetensors", ".npz", ".arrow", ".feather")


def load(url: str | Path, *, format: str = "", job: str = "") -> dict[str, Array]:  # noqa: A002 - common name
    """Read a model from a file, or from a job's newest checkpoint.

    Only values are read. A job with these initial values begins with fresh optimizer state.

    Args:
        url: Path or URL of a .safetensors, .npz or .arrow file, or of the directory given to ``--checkpoint``.
        format: Format of a file with another extension: "safetensors", "npz" or "arrow".
        job: Name of the checkpoint's job; empty if there is only one.

    Returns:
        Name -> array, in the declared dtypes. bfloat16 values from an npz file are returned as float32.

    Raises:
        DataError: the model does not exist or cannot be read.
        UsageError: the arguments are ambiguous.
    """
    place = url_of("url", url)
    shown = without_credentials(place)
    if format or place.endswith(_SUFFIXES):
        kind = format_of(place, format)
        with FsspecFiles().open(place) as file:
            return read_model(file.read(), kind, shown)
    return _checkpoint(place.rstrip("/"), shown, job)


def _checkpoint(place: str, shown: str, job: str) -> dict[str, Array]:
    storage, name = _storage_of_job(place, shown, job)
    for found in found_checkpoints(storage, name):
        if isinstance(found, Manifest):
            try:
                return {
                    spec.name: values.astype(array_dtype(spec.dtype), copy=False)
                    for spec, values in load_parameters(storage, found, specs_of(found))
                }
            except CorruptError as error:
                raise DataError(f"{shown}: checkpoint {found.number} is damaged: {error}") from None
    raise DataError(f"{shown} has no complete checkpoint of job {name}")


def _storage_of_job(place: str, shown: str, job: str) -> tuple[Storage, str]:
    if job:
        return open_storage(f"{place}/{job}"), job
    storage = open_storage(place)
    names = [file.name for file in storage.list("")]
    if candidates(dict.fromkeys(names, 0)):
        return storage, place.rpartition("/")[2]
    jobs = sorted({name.partition("/")[0] for name in names if name.endswith("/manifest.json")})
    if not jobs:
        raise DataError(f"{shown} has no checkpoint, and its name does not end in .safetensors, .npz or .arrow")
    if len(jobs) > 1:
        raise UsageError(f"{shown} has checkpoints of {', '.join(jobs)}: choose one, as in load(url, job={jobs[0]!r})")
    return open_storage(f"{place}/{jobs[0]}"), jobs[0]
