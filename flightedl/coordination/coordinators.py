"""Choice of the coordinator by its address. All connections to a job's coordinator are opened here."""

from __future__ import annotations

from typing import overload

from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import CommonSettings
from flightedl.coordination.flight_coordinator import FlightAccess, FlightCoordinator
from flightedl.ports import Clock


@overload
def open_coordinator(at: CommonSettings | EtcdAccess, *, clock: Clock, timeout_s: float = 2.0) -> EtcdCoordinator: ...
@overload
def open_coordinator(at: FlightAccess, *, clock: Clock, timeout_s: float = 2.0) -> FlightCoordinator: ...
def open_coordinator(
    at: CommonSettings | EtcdAccess | FlightAccess, *, clock: Clock, timeout_s: float = 2.0
) -> EtcdCoordinator | FlightCoordinator:
    """Return a connection to etcd, or to a group's own master. Raises UsageError if no address is given."""
    if isinstance(at, FlightAccess):
        return FlightCoordinator(at, timeout_s=timeout_s, clock=clock)
    access = at if isinstance(at, EtcdAccess) else EtcdAccess.of(at)
    return EtcdCoordinator(access, timeout_s=timeout_s, clock=clock)
