"""Data-only jobs with real torchrun groups: the documented DDP script, and FSDP2 with distributed checkpoints."""

from __future__ import annotations

import contextlib
import difflib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import flightedl as fe
from tests.support.etcd_server import EtcdServer

from ..docs.pages import ROOT, examples

PAGE = ROOT / "docs" / "data-only.md"
RECORDS = 600

#: Program that runs a script, records the records of each round, and ends all ranks at once after some saves.
WITH_LEDGER = """
import os, runpy, sys
from flightedl.client.data.group_dataset import GroupDataset

ledger, saves_left = sys.argv[1], int(sys.argv[2])
rounds, replace = GroupDataset.rounds, os.replace


def written(data):
    with open(f"{ledger}-{os.environ['RANK']}", "w") as file:
        for number, batch in enumerate(rounds(data)):
            file.writelines(f"{number} {data.epoch} {value}\\n" for value in batch["id"].to_pylist())
            file.flush()
            yield batch


def saved(source, target):
    global saves_left
    replace(source, target)
    saves_left -= 1
    if not saves_left:
        os._exit(9)


GroupDataset.rounds, os.replace = written, saved
runpy.run_path("train.py", run_name="__main__")
"""

FSDP = """
import os, sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flightedl as fe

RECORDS, end_after = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
net = torch.nn.Linear(RECORDS, 1, bias=False)
torch.nn.init.zeros_(net.weight)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)


class Model:
    def state_dict(self):
        model, optim = get_state_dict(net, optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


with fe.connect() as job:
    data = job.dataset("data/*.parquet", batch_size=4, shuffle=True, group=mesh["dp"])
    state = {"model": Model(), "data": data}
    if Path("last").exists():
        dcp.load(state, checkpoint_id=Path("last").read_text())
    for step, (ids,) in enumerate(fe.torch.batches(data, transform=lambda batch: (torch.from_dlpack(batch["id"]),)), 1):
        optimizer.zero_grad()
        # What a record adds to the weights is one at its own number: afterwards they say how often it was trained.
        (-net(torch.nn.functional.one_hot(ids, RECORDS).float()).sum() * size).backward()
        optimizer.step()
        if step % 5 == 0:
            dcp.save(state, checkpoint_id=f"{size}-{step}")
            if rank == 0:
                Path("last").write_text(f"{size}-{step}")
            dist.barrier()
        if step == end_after:
            os._exit(9)
    weight = net.weight.full_tensor().flatten()
    if rank == 0:
        Path("counts").write_text(" ".join(str(int(count)) for count in weight))
dist.destroy_process_group()
"""


class Torchrun:
    """Runner of scripts with a number of ranks, and of a master that serves only data."""

    def __init__(self, cluster: fe.LocalCluster) -> None:
        self._cluster = cluster

    def __call__(self, ranks: int, *arguments: object) -> int:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments]
        environment = os.environ | {
            "FLIGHTEDL_ETCD": self._cluster.etcd_address,
            "FLIGHTEDL_JOB": self._cluster.job,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode and "exitcode  : 9" not in done.stderr:
            pytest.fail(done.stderr)
        return done.returncode

    @property
    def phase(self) -> str:
        """Phase of the group according to the master."""
        with contextlib.closing(self._cluster.status()) as asked:
            status = asked.read(5.0)
        assert status.group is not None
        return status.group.phase


@pytest.fixture
def torchrun(etcd: EtcdServer, job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torchrun]:
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    x, y = random.standard_normal((2, RECORDS))
    table = pa.table({"x": x, "y": y, "label": (x + y > 0).astype(np.int64), "id": np.arange(RECORDS)})
    pq.write_table(table, tmp_path / "data" / "all.parquet", row_group_size=20)
    monkeypatch.chdir(tmp_path)
    with fe.local(pservers=0, job=job_name, etcd=etcd.address) as cluster:
        yield Torchrun(cluster)


def script(group: str) -> str:
    return next(each.text for each in examples(PAGE, group))


def test_the_ddp_script_needs_five_changed_lines() -> None:
    difference = difflib.ndiff(script("before").splitlines(), script("ddp").splitlines())
    added = [line[2:].strip() for line in difference if line.startswith("+ ") and line[2:].strip()]
    moved = {line.strip() for line in script("before").splitlines()}
    assert len([line for line in added if line not in moved]) == 5, added


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_ddp_script_resumes_with_more_ranks_after_a_crash(torchrun: Torchrun, tmp_path: Path) -> None:
    """The surviving model contains each record once per epoch."""
    (tmp_path / "train.py").write_text(script("ddp"))
    (tmp_path / "ledger.py").write_text(WITH_LEDGER)
    assert torchrun(2, "ledger.py", "first", 2) != 0
    assert torchrun.phase != "done"
    assert torchrun(3, "ledger.py", "second", -1) == 0
    assert torchrun.phase == "done"

    counts: Counter[tuple[int, int]] = Counter()
    for name, ranks, rounds in (("first", 2, 20), ("second", 3, RECORDS)):
        for rank in range(ranks):
            for line in (tmp_path / f"{name}-{rank}").read_text().splitlines():
                number, epoch, record = map(int, line.split())
                counts[epoch, record] += number < rounds
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * RECORDS


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_fsdp_resumes_from_a_distributed_checkpoint_with_more_ranks(torchrun: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "fsdp.py").write_text(FSDP)
    assert torchrun(2, "fsdp.py", RECORDS, 18) != 0
    assert (tmp_path / "last").read_text() == "2-15"
    assert torchrun(3, "fsdp.py", RECORDS, 0) == 0
    assert torchrun.phase == "done"
    assert (tmp_path / "counts").read_text().split() == ["1"] * RECORDS


def test_a_weighted_loss_counts_every_record_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the ranks' gradients is the gradient of the round's mean loss, even if a rank has no records."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 7)
    label = (x > 0).long()
    net = torch.nn.Linear(2, 2)
    cross_entropy(net(torch.stack([x, y], dim=1)), label).backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.fill_(7.0))
    for part in (slice(0, 5), slice(5, 7), slice(7, 7)):
        names: dict[str, Any] = {"net": net, "x": x[part], "y": y[part], "label": label[part]}
        exec(script("ddp-weighted"), {"torch": torch, "dist": dist, "cross_entropy": cross_entropy, **names})
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad / 3, gradient)
