"""Parameters from a file or a checkpoint, to begin another job with: ``job.parameters(fe.load(url))``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from flightedl.adapters.storage import FsspecFiles, open_storage, without_credentials
from flightedl.client.arguments import url_of
from flightedl.coordination.checkpoint_places import specs_of
from flightedl.domain.checkpoint.manifest import Manifest, candidates
from flightedl.errors import CorruptError, DataError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints, load_parameters
from flightedl.formats.model_files import format_of, read_model
from flightedl.kernels.half_precision import array_dtype
from flightedl.ports import Storage

Array = npt.NDArray[np.generic]

_SUFFIXES = (".safetensors", ".npz", ".arrow", ".feather")


def load(url: str | Path, *, format: str = "", job: str = "") -> dict[str, Array]:  # noqa: A002 - users' word
    """Read a model: from a file, or from the newest checkpoint of a job.

    Only values are read, no optimizer's slots: what begins with them begins at its first step.

    Args:
        url: Path or URL of a .safetensors, .npz or .arrow file, or of the directory that ``--checkpoint`` named.
        format: Of a file whose name does not say it: "safetensors", "npz" or "arrow".
        job: Whose checkpoint; empty: the only one there is.

    Returns:
        name -> array, as they were declared; of an npz file bfloat16 comes as float32.

    Raises:
        DataError: there is nothing, or it cannot be read.
        UsageError: the arguments do not say what is meant.
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
        raise DataError(f"{shown} has no checkpoint, and its name is not that of a .safetensors, .npz or .arrow file")
    if len(jobs) > 1:
        raise UsageError(
            f"{shown} has checkpoints of {', '.join(jobs)}: say which job is meant, as in load(url, job=...)"
        )
    return open_storage(f"{place}/{jobs[0]}"), jobs[0]
