"""A saved model in a plain module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import flightedl as fe
from flightedl.coordination.checkpoint_places import write_model
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import DataError
from flightedl.torch import Optimizer, load_into

from .bench import TorchBench


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight
        self.half = nn.Linear(2, 1).to(torch.bfloat16)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Net, Path]:
    """A module that was trained for a step, and the file that ``job.save_model`` would write."""
    net, path = Net(), tmp_path / "model.safetensors"
    with TorchBench() as bench:
        optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
        bench.job.begin(0)
        net.norm(net.tied(net.first(torch.randn(4, 2)))).square().sum().backward()
        optimizer.step()
        bench.job.end()
        model = bench.job.trainer.parameters
        specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in model.items()]
        write_model(str(path), "", specs, zip(specs, model.values(), strict=True))
    return net, path


def test_a_plain_module_takes_what_was_trained(saved: tuple[Net, Path]) -> None:
    trained, path = saved
    plain = Net()
    load_into(plain, path)
    for name, value in trained.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    assert plain.norm.num_batches_tracked.item() == 1
    assert plain.tied.weight is plain.first.weight


def test_others_read_the_same_file(saved: tuple[Net, Path]) -> None:
    trained, path = saved
    tensors = load_file(path)
    assert torch.equal(tensors["first.weight"], trained.first.weight)
    assert tensors["half.weight"].dtype == torch.bfloat16
    trained.load_state_dict(tensors, strict=False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(2, 1), r"the file has 'first.weight', but the module has no such parameter"),
        (
            lambda: nn.ModuleDict({"first": nn.Linear(3, 2)}),
            r"'first.weight' has shape \(2, 2\) in the file and ",
        ),
    ],
)
def test_another_module_is_refused(make: type[nn.Module], text: str, saved: tuple[Net, Path]) -> None:
    with pytest.raises(DataError, match=text):
        load_into(make(), saved[1])


def test_what_the_file_lacks_is_named(saved: tuple[Net, Path]) -> None:
    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    with pytest.raises(DataError, match=r"the module has 'more.bias', but the file has not"):
        load_into(More(), saved[1])
