"""Tools around PyTorch that use a module and its optimizer: wrappers, checkpoints, loaders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

import flightedl as fe
from flightedl.client.model.job_model import JobModel
from flightedl.errors import UsageError
from flightedl.torch import Embedding, IterableDataset, Optimizer

from .bench import TorchBench
from .page import JobOfOne, OneByOne


@pytest.fixture
def bench() -> Iterator[TorchBench]:
    with TorchBench() as made:
        yield made


@pytest.fixture
def group() -> Iterator[None]:
    """A process group with only this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def step(bench: TorchBench, net: Any, optimizer: Optimizer, batch: int = 0) -> None:
    bench.job.begin(batch)
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    bench.job.end()


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
@pytest.mark.usefixtures("group")
def test_wrappers_of_devices_and_processes_leave_no_prefix(wrapper: Any, bench: TorchBench) -> None:
    net = nn.Linear(2, 1)
    wrapped = wrapper(net)
    optimizer = Optimizer(wrapped, bench.job, fe.SGD(1.0))
    assert list(bench.job.trainer.parameters) == ["weight", "bias"]
    before = net.weight.detach().clone()
    step(bench, wrapped, optimizer)
    assert torch.equal(net.weight, before - 1)


@pytest.mark.usefixtures("group")
def test_sharded_modules_are_rejected(bench: TorchBench) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
    for sharded in (net, fully_shard(nn.Linear(2, 2), mesh=mesh)):
        with pytest.raises(UsageError, match=r"'weight' is sharded over .* \(DTensor\).*pass the unsharded module"):
            Optimizer(sharded, bench.job, fe.SGD(1.0))


def test_a_second_optimizer_is_rejected_with_an_alternative() -> None:
    session = JobModel(Mock(), Mock())
    session._parameters = Mock()
    job = SimpleNamespace(parameters=partial(session.declare, dtypes=None))
    with pytest.raises(UsageError, match=r"already has its parameters.* one nn.ModuleDict with one fe.torch.Optimizer"):
        Optimizer(nn.Linear(2, 1), job, fe.SGD(1.0))


@pytest.mark.parametrize("rate", [torch.tensor(0.1), torch.tensor([0.1, 0.2])])
def test_a_rate_that_is_a_tensor_is_rejected(rate: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"lr is tensor.* but must be a number or a Schedule"):
        fe.SGD(rate)


def test_a_scaler_unscales_automatically(bench: TorchBench) -> None:
    optimizer = Optimizer(nn.Linear(2, 1), bench.job, fe.SGD(1.0))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_distributed_checkpoints_read_the_state_and_push_nothing(bench: TorchBench) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net = nn.ModuleDict(
        {"users": Embedding(bench.job.table("users", 2, optimizer=fe.SGD(1.0))), "head": nn.Linear(2, 1)}
    )
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    model, state = get_state_dict(net, optimizer)
    assert set(model) == {"head.weight", "head.bias"}
    assert set(state["state"]) == {"head.weight", "head.bias", "users.rows"}
    assert bench.cluster.shards[0].meter.messages == 0
    bench.job.end()
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_a_loader_that_pins_memory_yields_the_current_batch(bench: TorchBench) -> None:
    job = JobOfOne(bench)
    bench.jobs = [job]
    data = OneByOne(job, [pa.record_batch({"x": [[float(n), 1.0]]}) for n in range(3)], 1)
    net = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = Optimizer(net, job, fe.SGD(1.0))
    for number, x in enumerate(DataLoader(IterableDataset(data, "x"), batch_size=None, pin_memory=True)):
        assert job.trainer.current.number == number == int(x[0, 0])
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
    assert job.trainer.parameters.versions["bias"] == 3


def test_a_loader_set_to_prefetch_requires_workers_and_is_rejected(bench: TorchBench) -> None:
    dataset = IterableDataset([pa.record_batch({"x": [1.0]})], "x")
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in multiprocessing"):
        DataLoader(dataset, batch_size=None, prefetch_factor=2)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=2, multiprocessing_context="spawn")
    with pytest.raises(UsageError, match=r"worker processes of a DataLoader cannot read.*num_workers=0"):
        next(iter(loader))
