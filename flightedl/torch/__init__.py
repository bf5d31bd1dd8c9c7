"""PyTorch adapter: the servers' optimizer as a ``torch.optim.Optimizer``, and the job's data as tensors.

::

    optimizer = fe.torch.Optimizer(net, job, fe.Adam(lr=1e-3), mode=fe.Sync())
    for x, y in fe.torch.batches(job.dataset(...), "pixels", "label"):
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()

* ``batches``: conversion of a dataset's Arrow batches to tensors
* ``ahead``: detection of loaders that request the next batch before the step
* ``module``: names of the parameters and buffers to declare
* ``buffers``: buffers of the module, whose changes trainers push
* ``tensors``: conversion between tensors and arrays
* ``groups``: conversion of parameter groups to settings of the servers' optimizer
* ``embedding``: embedding modules whose rows are stored in tables
* ``rows``: rows that were looked up, as parameters of the current batch
* ``optimizer``: pushing gradients, pulling values, and keeping the module's values equal to the job's
* ``diloco``: several steps of a local optimizer between two exchanges of values
* ``staging``: moving gradients during ``backward`` to the memory from which they are sent
* ``files``: loading of saved models into a plain module

A batch's path: ``batches`` yields the batch as tensors. ``forward`` looks up the batch's rows in tables, and these rows
become parameters. ``backward`` computes gradients. ``Optimizer.step`` copies the gradients to arrays, pushes them, and
waits until the servers' new values have arrived in the module's own memory.

``import flightedl`` does not import PyTorch. This package is imported when ``fe.torch`` is first used.
"""

from __future__ import annotations

from flightedl.process.importing import install_command

try:
    import torch as _torch  # noqa: F401 - fails here if PyTorch is missing
except ImportError as error:
    raise ImportError(f"fe.torch needs PyTorch: {install_command('torch')} ({error})") from None

from flightedl.torch.batches import IterableDataset, batches
from flightedl.torch.diloco import DiLoCo
from flightedl.torch.embedding import Embedding, EmbeddingBag, EmbeddingCollection
from flightedl.torch.files import load_into
from flightedl.torch.optimizer import Optimizer

__all__ = [
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "IterableDataset",
    "Optimizer",
    "batches",
    "load_into",
]
