"""Load a saved model into a plain module, without a job or servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flightedl.adapters.storage import FsspecFiles
from flightedl.client.arguments import url_of
from flightedl.client.model.loading import load
from flightedl.domain.data_urls import without_credentials
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import DataError, UsageError
from flightedl.formats.table_files import read_table_file
from flightedl.torch.buffers import write
from flightedl.torch.module import buffers_of, names_of, parameters_of
from flightedl.torch.tensors import tensor_of

_NO_ROWS: Mapping[str, str | Path] = {}


def load_into(
    module: nn.Module,
    url: str | Path,
    *,
    format: str = "",  # noqa: A002 - same name as in ``load``
    job: str = "",
    rows: Mapping[str, str | Path] = _NO_ROWS,
) -> None:
    """Load the values in a file written by ``job.save_model``, or in a job's newest checkpoint, into a module.

    Args:
        module: Module whose parameters and buffers have the same names and shapes.
        url: As in ``fe.load``.
        format: As in ``fe.load``.
        job: As in ``fe.load``.
        rows: Name of each ``torch.nn.Embedding`` or ``EmbeddingBag`` that replaces an embedding on a table -> the file
            that ``table.export`` wrote. Ids are row numbers. Rows that are not in the file become zeros.

    Raises:
        DataError: the file does not exist, or does not match the module.
        UsageError: ``rows`` contains a name that is not an embedding of the module.
    """
    values = load(url, format=format, job=job)
    places = parameters_of(module) | buffers_of(module)
    known = names_of(module)
    tables = {f"{name}.weight": (_embedding(module, name), file) for name, file in rows.items()}
    for name, array in values.items():
        place = places.get(known.get(name, name))
        if place is None:
            raise DataError(f"the file has {name!r:.80}, but the module has no such parameter or buffer")
        # Earlier versions saved counters without dimensions.
        if tuple(place.tensor.shape) != array.shape and not place.tensor.numel() == array.size == 1:
            shape = tuple(place.tensor.shape)
            raise DataError(f"{name!r:.80} has shape {array.shape} in the file and {shape} in the module")
    if missing := sorted(places.keys() - {known.get(name, name) for name in [*values, *tables]}):
        others = f", which also lacks {', '.join(missing[1:]):.400}" if missing[1:] else ""
        raise DataError(f"the module has {missing[0]!r:.80}, but the file does not{others}")
    with torch.no_grad():
        for name, array in values.items():
            tensor = places[known.get(name, name)].tensor
            write(tensor, tensor_of(array.copy()).reshape(tensor.shape))
        for name, (embedding, file) in tables.items():
            embedding.weight.copy_(_rows_of(name, embedding.weight, url_of("rows", file)))


def _embedding(module: nn.Module, name: str) -> nn.Embedding | nn.EmbeddingBag:
    found = dict(module.named_modules()).get(name)
    if not isinstance(found, nn.Embedding | nn.EmbeddingBag):
        raise UsageError(f"rows names {name!r:.80}, but the module has no torch.nn.Embedding or EmbeddingBag there")
    return found


def _rows_of(name: str, weight: torch.Tensor, url: str) -> torch.Tensor:
    count, dim = weight.shape
    found = torch.zeros(count, dim, device="cpu")
    for rows in read_table_file(FsspecFiles(), url, TableSpec(name, dim, SGD(lr=1.0))):
        outside = rows.ids[rows.ids >= np.uint64(count)]
        if len(outside):
            raise DataError(
                f"{without_credentials(url)} has id {outside[:1].view(np.int64)[0]}, but {name!r} has {count} "
                "rows, and ids are used as row numbers: make it larger, or renumber the ids in the file"
            )
        found[torch.from_numpy(rows.ids.view(np.int64))] = torch.from_numpy(rows.values)
    return found
