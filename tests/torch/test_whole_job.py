"""A PyTorch script with ``flightedl run``: real processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.nn import functional

from flightedl.examples.digits_torch import network
from flightedl.launch.forking import ForkServer

from ..launch.forked_launcher import ForkedCommand

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

EPOCHS = 4

#: Each image adds 1 to its own element of a parameter, whose final value counts how often the image was trained.
SCRIPT = f"""
import sys, time
import torch
from torch import nn
from torch.nn import functional
import flightedl as fe
from flightedl.examples.digits_torch import images_and_digits, network

with fe.connect() as job:
    net = nn.ModuleDict({{"network": network(seed=0)}})
    net.register_parameter("seen", nn.Parameter(torch.zeros(2000)))
    # The rate falls to zero: at a constant one the last updates, stale on a busy machine, would decide the accuracy.
    rule = fe.AdamW(lr=fe.Cosine(initial=3e-3, updates={EPOCHS} * 50), overrides={{"seen": fe.Delta()}})
    optimizer = fe.torch.Optimizer(net, job, rule, mode=fe.Async())
    data = job.dataset("train.parquet", batch_size=32, epochs={EPOCHS}, shuffle=True, seed=0)
    print("training", flush=True)
    for batch in data:
        images, digits = images_and_digits(batch)
        optimizer.zero_grad()
        functional.cross_entropy(net["network"](images), digits).backward()
        net.seen.grad = torch.zeros(2000).index_fill_(0, torch.from_dlpack(batch["id"]), 1.0)
        optimizer.step()
        time.sleep(0.02)
    print("values", sum(float(value.double().sum()) for value in net.state_dict().values()), flush=True)
    if job.once("save"):
        job.save_model(job.output_dir / "model.safetensors")
"""


def accuracy(values: dict[str, torch.Tensor], images: torch.Tensor, digits: torch.Tensor) -> float:
    net = network(seed=1)
    net.load_state_dict(values)
    net.eval()
    with torch.no_grad():
        return float((net(images).argmax(dim=1) == digits).float().mean())


def trained_alone(images: torch.Tensor, digits: torch.Tensor) -> dict[str, torch.Tensor]:
    net = network(seed=0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=generator).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(net(images[rows]), digits[rows]).backward()
            optimizer.step()
    return net.state_dict()


def trainers_of(process: psutil.Process) -> list[int]:
    children = process.children(recursive=True)
    return [child.pid for child in children if "flightedl.launch.trainer" in " ".join(child.cmdline())]


def test_every_image_counts_once_despite_a_killed_trainer(tmp_path: Path, forks_with_torch: ForkServer) -> None:
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels).reshape(-1, 1, 8, 8).float() / 16, torch.tensor(labels)
    count = 1400
    column = pa.FixedSizeListArray.from_arrays(pa.array(pixels[:count].astype(np.uint8).ravel()), 64)
    table = pa.table({"pixels": column, "digit": pa.array(labels[:count].astype(np.int8)), "id": np.arange(count)})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=140)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["run", "train.py", "--trainers", "3", "--pservers", "1", "--output", "out", "--lease-ttl-s", "2"]
    log = (tmp_path / "log").open("wb")
    process = ForkedCommand(forks_with_torch, command, cwd=tmp_path, stdout=log, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 90
        while (tmp_path / "log").read_text().count("| training") < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.kill(trainers_of(psutil.Process(process.pid))[0], signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()
    values_after_the_loop = [line for line in (tmp_path / "log").read_text().splitlines() if "| values" in line]
    assert len(values_after_the_loop) == 3
    assert len({line.partition("|")[2] for line in values_after_the_loop}) == 1, values_after_the_loop
    saved = load_file(tmp_path / "out" / "model.safetensors")
    seen = saved.pop("seen")
    assert seen[:count].tolist() == [EPOCHS] * count
    assert not seen[count:].any()
    values = {name.removeprefix("network."): value for name, value in saved.items()}
    values["1.num_batches_tracked"] = values["1.num_batches_tracked"].round().long()
    found = accuracy(values, images[count:], digits[count:])
    alone = accuracy(trained_alone(images[:count], digits[:count]), images[count:], digits[count:])

    assert found > alone - 0.04, (found, alone)
