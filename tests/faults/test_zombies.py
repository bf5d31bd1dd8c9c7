"""A thousand writes of deposed masters, pservers and trainers to a running job, none of which is accepted."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import flightedl as fe
from flightedl.examples.ledger import balance
from flightedl.launch.programs import TrainerProgram

from .zombies import attempts

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]


def test_no_write_of_a_deposed_process_is_accepted(tmp_path: Path) -> None:
    arguments = ("--records", "6000", "--epochs", "2", "--pause", "0.03", "--data", str(tmp_path / "d"))
    cluster = fe.local(
        pservers=2,
        job="zombies",
        checkpoint=str(tmp_path / "ck"),
        output_dir=tmp_path / "out",
        trainers=TrainerProgram("flightedl.examples.ledger", arguments, 2),
    )
    with cluster, cluster.status() as status:
        deadline = time.monotonic() + 60
        while status.read(5.0).batches < 10:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        tried, accepted = attempts(cluster.etcd_address, "zombies", status, 1000)
        assert tried.total() == 1000
        assert not accepted.total(), accepted
        outcome = cluster.outcome(120)
    assert outcome is not None
    assert outcome.exit_code == 0, outcome
    with np.load(tmp_path / "out" / "ledger.npz") as counts:
        assert balance(counts) == (0, 0)
