"""Import of pyarrow.flight after the environment has been set, because gRPC reads its experiments at first use."""

from __future__ import annotations

from flightedl.process.tuning import set_grpc_experiments

set_grpc_experiments()

from pyarrow import flight  # noqa: E402 - the environment has to be set first

__all__ = ["flight"]
