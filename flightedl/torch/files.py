"""A saved model in a plain module: no job, no servers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from flightedl.client.model.loading import load
from flightedl.errors import DataError
from flightedl.torch.module import buffers_of, names_of, parameters_of
from flightedl.torch.tensors import tensor_of


def load_into(module: nn.Module, url: str | Path, *, format: str = "", job: str = "") -> None:  # noqa: A002 - as ``load``
    """Give a module the values that ``job.save_model`` wrote, or those of a job's newest checkpoint.

    Args:
        module: Has parameters of the same names and shapes; its buffers that the file does not have stay as they are.
        url: As of ``fe.load``.
        format: Likewise.
        job: Likewise.

    Raises:
        DataError: there is nothing, or it is of another module.
    """
    values = load(url, format=format, job=job)
    parameters = parameters_of(module)
    places = parameters | buffers_of(module)
    known = names_of(module)
    for name, array in values.items():
        place = places.get(known.get(name, name))
        if place is None:
            raise DataError(f"the file has {name!r:.80}, but the module has no such parameter or buffer")
        if tuple(place.tensor.shape) != array.shape:
            shape = tuple(place.tensor.shape)
            raise DataError(f"{name!r:.80} has shape {array.shape} in the file and {shape} in the module")
    if missing := sorted(parameters.keys() - {known.get(name, name) for name in values}):
        raise DataError(f"the module has {missing[0]!r:.80}, but the file has not")
    with torch.no_grad():
        for name, array in values.items():
            places[known.get(name, name)].tensor.copy_(tensor_of(array.copy()))
