"""PyTorch on a job: the servers' optimizer as a ``torch.optim.Optimizer``, and the job's data as tensors.

::

    optimizer = fe.torch.Optimizer(net, job, fe.Adam(lr=1e-3), mode=fe.Sync())
    for x, y in fe.torch.batches(job.dataset(...), "pixels", "label"):
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()

* ``module`` knows what of a module the job has, and under which names; ``tensors`` turns tensors into arrays and back.
* ``groups`` turns parameter groups into settings of the servers; ``optimizer`` pushes, pulls, and keeps module and
  job the same.
* ``embedding`` has modules whose rows lie in tables; ``rows`` makes parameters of the rows that a batch uses.
* ``batches`` makes tensors of Arrow's batches, ``ahead`` finds out who asks for them too early; ``files`` loads a saved
  model into a plain module.

Imported only when asked for: ``import flightedl`` needs no PyTorch.
"""

from __future__ import annotations

from flightedl.process.importing import install_command

try:
    import torch as _torch  # noqa: F401 - whether it is there
except ImportError as error:
    raise ImportError(f"fe.torch needs PyTorch: {install_command('torch')} ({error})") from None

from flightedl.torch.batches import IterableDataset, batches
from flightedl.torch.embedding import Embedding, EmbeddingBag, EmbeddingCollection
from flightedl.torch.files import load_into
from flightedl.torch.optimizer import Optimizer

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingCollection", "IterableDataset", "Optimizer", "batches", "load_into"]
