"""The recipe of docs/data-only.md for torchft: replica groups that die, restart and heal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from tests.support.etcd_server import EtcdServer

from ..docs.pages import ROOT, examples

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.etcd, pytest.mark.faults, pytest.mark.timeout(240)]

RECORDS = 600
PAGE = ROOT / "docs" / "data-only.md"

#: Each record adds one to the weight with its number, so that the weights count how often each record was trained.
SCRIPT = """
import os, sys
from datetime import timedelta

import torch
import torchft
from torch.distributed import TCPStore

import flightedl as fe

end_after = int(sys.argv[1])
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
net = torch.nn.Linear({records}, 1, bias=False)
torch.nn.init.zeros_(net.weight)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
    min_replica_size=1,
    init_sync=False,
    load_state_dict=net.load_state_dict,
    state_dict=net.state_dict,
    lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    timeout=timedelta(seconds=10),
)
model = torchft.DistributedDataParallel(manager, net)
optimizer = torchft.Optimizer(manager, torch.optim.SGD(net.parameters(), lr=1.0))
job = fe.connect()


def loss_of(batch):
    if manager.current_step() == end_after:
        os._exit(9)
    ids = torch.from_dlpack(batch["id"])
    return -model(torch.nn.functional.one_hot(ids, {records}).float()).sum() * manager.num_participants()


{block}
print("counts", sorted(set(net.weight.flatten().tolist())), flush=True)
manager.shutdown()
os._exit(0)
"""


def test_each_record_counts_once_in_the_surviving_model(etcd: EtcdServer, job_name: str, tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"id": np.arange(RECORDS)}), tmp_path / "data" / "all.parquet", row_group_size=20)
    (block,) = examples(PAGE, "torchft")
    (tmp_path / "train.py").write_text(SCRIPT.format(records=RECORDS, block=block.text))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    with fe.local(pservers=0, job=job_name, etcd=etcd.address):
        environment = os.environ | {
            "FLIGHTEDL_ETCD": etcd.address,
            "FLIGHTEDL_JOB": job_name,
            "TORCHFT_LIGHTHOUSE": lighthouse.address(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

        def start(end_after: int) -> subprocess.Popen[str]:
            command = [sys.executable, "train.py", str(end_after)]
            return subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        running = [start(-1), start(5)]
        assert running[1].wait(120) == 9
        running[1].communicate()
        running[1] = start(15)
        outputs = [process.communicate(timeout=120)[0] for process in running]
    lighthouse.shutdown()
    assert running[0].returncode == 0, outputs[0]
    assert "counts [1.0]" in outputs[0]
