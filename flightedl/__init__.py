"""Elastic deep-learning training on Apache Arrow Flight, exactly once under any crash.

::

    import flightedl as fe

    with fe.connect() as job:
        data = job.dataset("train-*.parquet", batch_size=256, epochs=3, shuffle=True)
        model = job.parameters({"w": w0}, optimizer=fe.Adam(lr=1e-3), mode=fe.Sync())
        for batch in data:
            model.step(gradients(model, batch))

Reading order:

* ``errors``, ``config``, ``ports``: foundations; ``marks``: marks on fault paths, which tests count
* ``messages``: the types of messages; ``domain``: all decisions, without I/O
* ``kernels``: arithmetic of optimizers; ``rowstore``: rows of embedding tables in memory
* ``wire``: encoding; ``rpc``: transport
* ``process``: support for processes; ``recording``: recordings of processes, which can be replayed
* ``adapters``: access to etcd, files and time; ``formats``: files of training data and checkpoints
* ``coordination``: the state that processes share through etcd
* ``master``, ``pserver``, ``client``: the three kinds of processes; ``torch``: the client for PyTorch programs
* ``launch``: starts complete jobs; ``curves``: learning curves
* ``examples``: example programs

Importing this package loads only this module. Each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flightedl import errors
    from flightedl.client.data.shard_writer import ShardWriter
    from flightedl.client.data.snapshots import delta_files, iceberg_files
    from flightedl.client.following.follower import Follower
    from flightedl.client.model.loading import load
    from flightedl.client.session import Job, connect
    from flightedl.client.tables.ids import text_ids
    from flightedl.domain.consistency.modes import Async, Bounded, Sync
    from flightedl.domain.model.initial import Normal, Uniform, Zeros
    from flightedl.domain.model.optimizers import (
        LAMB,
        SGD,
        Adadelta,
        Adagrad,
        Adam,
        AdamW,
        Delta,
        Ftrl,
        Momentum,
        RMSprop,
    )
    from flightedl.domain.model.schedules import Constant, Cosine, LinearWarmup, Piecewise, Polynomial, StepDecay
    from flightedl.domain.tables.evict import Evict
    from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam
    from flightedl.domain.trainer.acknowledged import Done
    from flightedl.formats import decode
    from flightedl.launch.cluster import LocalCluster, local

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Async",
    "Bounded",
    "Constant",
    "Cosine",
    "Delta",
    "Done",
    "Evict",
    "Follower",
    "Ftrl",
    "Job",
    "LinearWarmup",
    "LocalCluster",
    "Momentum",
    "Normal",
    "Piecewise",
    "Polynomial",
    "RMSprop",
    "RowAdagrad",
    "RowAdam",
    "ShardWriter",
    "StepDecay",
    "Sync",
    "Uniform",
    "Zeros",
    "connect",
    "decode",
    "delta_files",
    "errors",
    "iceberg_files",
    "load",
    "local",
    "text_ids",
]

#: Version of the package, which is the same as in pyproject.toml.
__version__ = "0.1.0"

#: Public name -> module that defines it.
_HOMES = {
    "flightedl.client.data.shard_writer": ("ShardWriter",),
    "flightedl.client.data.snapshots": ("delta_files", "iceberg_files"),
    "flightedl.client.following.follower": ("Follower",),
    "flightedl.client.model.loading": ("load",),
    "flightedl.client.session": ("Job", "connect"),
    "flightedl.client.tables.ids": ("text_ids",),
    "flightedl.domain.consistency.modes": ("Async", "Bounded", "Sync"),
    "flightedl.domain.model.initial": ("Normal", "Uniform", "Zeros"),
    "flightedl.domain.model.optimizers": (
        "SGD",
        "Momentum",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Adam",
        "AdamW",
        "Delta",
        "Ftrl",
        "LAMB",
    ),
    "flightedl.domain.model.schedules": ("Constant", "Cosine", "LinearWarmup", "Piecewise", "Polynomial", "StepDecay"),
    "flightedl.domain.tables.evict": ("Evict",),
    "flightedl.domain.tables.optimizers": ("RowAdagrad", "RowAdam"),
    "flightedl.domain.trainer.acknowledged": ("Done",),
    "flightedl.launch.cluster": ("LocalCluster", "local"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("errors", "torch", "decode"):
        return importlib.import_module(f"flightedl.{'formats.' if name == 'decode' else ''}{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flightedl.process.ending import report_errors
    from flightedl.process.importing import without_collection

    report_errors()
    with without_collection():
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
