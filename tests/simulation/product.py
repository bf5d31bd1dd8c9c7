"""Imports the product on the fakes. Must be the first import of ``flightedl`` in its process."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import types
from typing import Any

from tests.simulation import machine, ranks, threads
from tests.simulation.flight import fake_flight

#: Packages of the product that simulated processes execute.
PACKAGES = (
    "adapters",
    "client",
    "coordination",
    "domain",
    "formats",
    "kernels",
    "master",
    "messages",
    "process",
    "pserver",
    "recording",
    "rpc",
    "wire",
)
#: Imported with the real threads: they keep threads of their own, which outlive seeds.
_OTHERS = (
    "concurrent.futures.thread",
    "email.message",
    "http.server",
    "logging",
    "multiprocessing.connection",
    "subprocess",
    "click",
    "fsspec.implementations.local",
    "fsspec.implementations.memory",
    "grpc",
    "msgspec",
    "numba",
    "numpy",
    "prometheus_client",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.dataset",
    "pyarrow.flight",
    "pyarrow.json",
    "pyarrow.orc",
    "pyarrow.parquet",
    "xxhash",
)


def install() -> None:
    """Import the product on the fakes, and replace what belongs to its machine."""
    if "flightedl" in sys.modules:
        raise RuntimeError("flightedl is already imported: start the simulation in a process of its own")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in _OTHERS:
        importlib.import_module(name)
    flight_seam = _module("flightedl.rpc.arrow_flight", flight=fake_flight)
    sys.modules[flight_seam.__name__] = flight_seam
    made = machine.as_module()
    ranks.install()
    # Logs are the simulation's.
    logs = _module("flightedl.process.log_format", set_up=lambda *_: None)
    coordinators = _module("flightedl.coordination.coordinators", open_coordinator=_open_coordinator)
    kept = {name: sys.modules.get(name) for name in threads.REPLACED}
    sys.modules.update(threads.REPLACED)
    try:
        _place(made)
        _place(logs)
        _place(coordinators)
        for package in PACKAGES:
            _import_all(f"flightedl.{package}")
        importlib.import_module("flightedl.launch.status")
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    from flightedl.process.fork_guard import ForkGuard

    # Seeds run in forked children, which use nothing of their parent's. A session of the warm process that is still in
    # memory would otherwise keep the children's sessions from ending.
    setattr(ForkGuard, "register", lambda *_: None)  # noqa: B010 - it is a method


def _module(name: str, **names: object) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    return made


def _place(module: types.ModuleType) -> None:
    """Put a module in place of one of the product."""
    package, _, name = module.__name__.rpartition(".")
    sys.modules[module.__name__] = module
    setattr(importlib.import_module(package), name, module)


def _import_all(package: str) -> None:
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, f"{package}."):
        if not found.name.endswith("__main__") and found.name not in sys.modules:
            importlib.import_module(found.name)


def _open_coordinator(at: object, *, clock: object, timeout_s: float = 2.0) -> Any:
    from tests.simulation import etcd

    return etcd.Connection(etcd.current_etcd())
