"""The in-memory Flight of the simulation passes the tests of ``rpc``, as the real one does."""

from __future__ import annotations

import pytest

from .client import Simulation

pytestmark = [pytest.mark.seeds, pytest.mark.timeout(120)]

FILES = (
    "arrivals",
    "calls",
    "checksums",
    "errors",
    "identity",
    "lifecycle",
    "request_stream",
    "socket_abort",
    "streams",
)
#: These start other programs, or open sockets, neither of which the simulation has. The tests of certificates, signals,
#: shared memory and lines are left out for the same reason.
LEFT_OUT = ["dead_server", "killed", "rejects_answers_of_another", "connections_to_the_replaced_server"]


def test_tests_of_rpc_pass_on_the_in_memory_flight(simulation: Simulation) -> None:
    passed, failed = simulation.run_tests([f"tests/rpc/test_rpc_{name}.py" for name in FILES], LEFT_OUT)
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert len(passed) > 300
