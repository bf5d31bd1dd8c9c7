"""A session in a forked child: values can be read, everything else raises, and the parent goes on undisturbed."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.errors import UsageError
from flightedl.process.fork_guard import ForkGuard

RECORDS = 40

#: The child leaves all ``with`` blocks and runs exit functions, like a script that ends.
SCRIPT = """
import json, os, sys, warnings
import numpy as np
import flightedl as fe

warnings.simplefilter("ignore")
path = sys.argv[1]

def outcome(call):
    try:
        return repr(call())
    except fe.errors.UsageError as error:
        return "refused" if "belongs to the process" in str(error) else str(error)

with fe.local(1) as cluster:
    with cluster.connect() as job:
        won = job.once("report")
        data = job.dataset(path, batch_size=4)
        model = job.parameters({"w": np.zeros(2)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
        loop = iter(data)
        for number, batch in enumerate(loop):
            if number == 2 and not (child := os.fork()):
                gradient = {"w": np.ones(2)}
                tried = {
                    "epoch": lambda: data.epoch,
                    "step": lambda: model.step(gradient),
                    "push": lambda: model.push(gradient),
                    "pull": lambda: model.pull(),
                    "log": lambda: job.log(loss=1.0),
                    "stop": lambda: job.stop(),
                    "once": lambda: job.once("other"),
                    "require": lambda: won.require(),
                    "save": lambda: job.save_model(path + ".npz"),
                    "wait": lambda: job.wait_for_end(),
                    "end": lambda: data.end(),
                    "next": lambda: next(loop),
                    "loop": lambda: next(iter(data)),
                    "connect": lambda: cluster.connect(),
                    "connect again": lambda: fe.connect(cluster.etcd_address, "local"),
                    "kill": lambda: cluster.kill("master"),
                    "value": lambda: model["w"].tolist(),
                    "won": lambda: bool(won),
                }
                found = {name: outcome(call) for name, call in tried.items()}
                with open(sys.argv[2], "w") as file:
                    json.dump(found, file)
                sys.exit(7)
            if number == 3:
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            model.step({"w": np.full(2, -float(batch.num_rows))})
        won.require()
        print("values", model["w"].tolist())
"""


@pytest.mark.etcd
@pytest.mark.timeout(120)
def test_a_forked_child_can_only_read_and_the_parent_goes_on(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": range(RECORDS)}), tmp_path / "data.parquet")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "data.parquet", tmp_path / "found.json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: found.pop(name) for name in ("epoch", "value", "won")} == {
        "epoch": "0",
        "value": "[8.0, 8.0]",
        "won": "True",
    }
    assert set(found.values()) == {"refused"}, found
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"child 7\nvalues [{RECORDS}.0, {RECORDS}.0]\n"


class Session: ...


@pytest.fixture
def guard() -> Iterator[ForkGuard]:
    made = ForkGuard()
    yield made
    atexit.unregister(made._end_child)


def test_a_child_is_refused_only_if_a_session_is_open_at_the_fork(guard: ForkGuard) -> None:
    session = Session()
    guard.register(session)
    guard.forget(session)
    guard._after_fork_in_child()
    guard.check()
    guard.register(session)
    guard._after_fork_in_child()
    with pytest.raises(UsageError, match="a session belongs to the process that opened it"):
        guard.check()
    assert os.getpid() > 0
