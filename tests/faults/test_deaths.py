"""A trainer that no launcher watches is killed: the others do not wait for its lease."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from benchmarks.deaths import Trainer


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_death_of_a_trainer_is_noticed_long_before_its_lease_ends(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": np.arange(100_000)}), tmp_path / "data.parquet", row_group_size=1_000)
    with fe.local(pservers=1, job="deaths", lease_ttl_s=60) as cluster:
        trainers = [Trainer(cluster.etcd_address, tmp_path, number, lease_ttl_s=60) for number in range(2)]
        began = time.time()
        for each in trainers:
            each.wait_for(2, began)
        trainers[1].signal(signal.SIGKILL)
        assert trainers[0].wait_for(3, time.time()) < 20
        for each in trainers:
            each.end()
