"""Process settings: applied by the library, overridden by the environment, and cheap to import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(program: str, **environment: str) -> str:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GRPC_EXPERIMENTS"
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.strip()


REPORT = """
import os
from flightedl.process import tuning as process_tuning
print(*process_tuning.apply(), os.environ.get("GRPC_EXPERIMENTS"))
"""
EXPERIMENTS = "tcp_frame_size_tuning,tcp_rcv_lowat"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_apply_tunes_allocator_and_grpc() -> None:
    assert run(REPORT) == f"True True {EXPERIMENTS}"


def test_settings_of_the_environment_are_kept() -> None:
    assert run(REPORT, GRPC_EXPERIMENTS="mine").endswith("True mine")


def test_tuning_reports_when_grpc_is_already_loaded() -> None:
    assert run("import pyarrow.flight\n" + REPORT).endswith("False None")


FOR_FLIGHT_ALONE = """
import os
from flightedl.process import tuning as process_tuning
from pyarrow import flight
class Client:
    def __init__(self, location):
        print(os.environ["GRPC_EXPERIMENTS"])
    def close(self):
        pass
flight.FlightClient = Client
process_tuning.apply()
print(os.environ["GRPC_EXPERIMENTS"])
"""


def test_one_experiment_applies_only_to_flight_clients() -> None:
    assert run(FOR_FLIGHT_ALONE, GRPC_EXPERIMENTS=EXPERIMENTS).split() == [
        f"{EXPERIMENTS},-event_engine_client",
        EXPERIMENTS,
    ]
    assert run(FOR_FLIGHT_ALONE, GRPC_EXPERIMENTS="mine") == "mine"


def test_importing_the_client_sets_grpcs_experiments_first() -> None:
    program = "import flightedl.rpc.client, os; print(os.environ['GRPC_EXPERIMENTS'])"
    assert run(program) == EXPERIMENTS


def test_the_package_loads_nothing_until_it_is_used() -> None:
    program = "import flightedl.rpc, flightedl.process.tuning, sys; print('pyarrow' in sys.modules)"
    assert run(program) == "False"


def test_every_name_of_the_package_can_be_imported() -> None:
    program = "import flightedl.rpc as r; print(all(getattr(r, name) for name in r.__all__), hasattr(r, 'nothing'))"
    assert run(program) == "True False"


LET_OTHERS_GO_ON = """
import contextlib, os, threading
from flightedl.process.tuning import avoid_preemption
{before}
found = [avoid_preemption(), os.sched_getscheduler(0) == os.SCHED_BATCH]
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0) == os.SCHED_BATCH))
thread.start()
thread.join()
# An idle process of a busy machine would take minutes to end.
with contextlib.suppress(PermissionError):
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
print(*found)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's scheduler")
def test_a_pserver_yields_to_runnable_processes() -> None:
    assert run(LET_OTHERS_GO_ON.format(before="")) == "True True True"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's scheduler")
def test_a_scheduling_policy_of_the_user_is_kept() -> None:
    before = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    assert run(LET_OTHERS_GO_ON.format(before=before)) == "False False False"


def test_retained_memory_is_not_faulted_in_again() -> None:
    program = """
import ctypes, resource
from flightedl.process import tuning as process_tuning
process_tuning.apply()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
def cycle():
    block = libc.malloc(32 << 20)
    ctypes.memset(block, 1, 32 << 20)
    libc.free(block)
cycle()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    cycle()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000)
"""
    assert run(program) == "True"


def test_a_server_loads_neither_pandas_nor_scipy() -> None:
    program = """
import sys
from flightedl.process.tuning import leave_out_pandas_and_scipy as leave_out
print(leave_out(), leave_out(), len([each for each in sys.meta_path if "_LeftOut" in repr(each)]))
import numba
import numpy as np
import pyarrow as pa
import pyarrow.dataset
print(pa.array([1, None]).to_pylist(), numba.njit(lambda a: a.sum())(np.ones(2)))
print("pandas" in sys.modules, "scipy" in sys.modules)
"""
    assert run(program).splitlines() == ["True True 1", "[1, None] 2.0", "False False"]


def test_a_trainer_can_import_pandas() -> None:
    program = """
import sys
from flightedl.process.tuning import defer_pandas
print(defer_pandas(), defer_pandas())
import pyarrow as pa
print(pa.table({"k": [1, None]}).column(0).to_numpy(), "pandas" in sys.modules)
frame = pa.table({"k": [1, 2]}).to_pandas()
import pandas
import pandas.core
assert isinstance(frame, pandas.DataFrame)
# As pyarrow reads a series only when it knows pandas.
print(pa.array(pandas.Series([1.0, float("nan")])).null_count, defer_pandas())
print(type(pandas.__loader__).__name__, type(pandas.__spec__.loader).__name__)
"""
    assert run(program).splitlines() == [
        "True True",
        "[ 1. nan] False",
        "1 False",
        "SourceFileLoader SourceFileLoader",
    ]


def test_a_server_raises_its_limit_of_open_files() -> None:
    program = """
import resource
from flightedl.process.tuning import allow_many_connections
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
assert allow_many_connections(500) == 500
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500, hard)
assert allow_many_connections(300) == 500, "it is not made less"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
