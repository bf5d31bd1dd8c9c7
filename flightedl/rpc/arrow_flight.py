"""The import of pyarrow.flight, in its right order: gRPC reads its experiments from the environment when first used."""

from __future__ import annotations

from flightedl.process.tuning import set_grpc_experiments

set_grpc_experiments()

from pyarrow import flight  # noqa: E402 - the environment comes first, that is what this module is for

__all__ = ["flight"]
