"""Loading of saved models into plain modules."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import flightedl as fe
from flightedl.coordination.checkpoint_places import write_model
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import DataError, UsageError
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
    """A module after one step of training, and the file that ``job.save_model`` would write."""
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


def test_a_plain_module_loads_the_trained_values(saved: tuple[Net, Path]) -> None:
    trained, path = saved
    plain = Net()
    load_into(plain, path)
    for name, value in trained.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    assert plain.norm.num_batches_tracked.item() == 1
    assert plain.tied.weight is plain.first.weight


def test_other_libraries_read_the_same_file(saved: tuple[Net, Path]) -> None:
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
def test_another_module_is_rejected(make: type[nn.Module], text: str, saved: tuple[Net, Path]) -> None:
    with pytest.raises(DataError, match=text):
        load_into(make(), saved[1])


def test_parameters_missing_in_the_file_are_named(saved: tuple[Net, Path]) -> None:
    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    with pytest.raises(DataError, match=r"the module has 'more.bias', but the file does not"):
        load_into(More(), saved[1])


class Towers(nn.Module):
    """Module with rows in a table, or in the module itself."""

    def __init__(self, users: nn.Module) -> None:
        super().__init__()
        self.users = users
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.users(ids))


@pytest.fixture
def served(tmp_path: Path) -> tuple[Towers, torch.Tensor, Path]:
    """A net on a table, its output for the trained ids 1 and 3, and the folder with its model and rows."""
    with TorchBench() as bench:
        table = bench.job.table("users", 2, optimizer=fe.SGD(0.1), init=fe.Uniform(0.5))
        net = Towers(fe.torch.Embedding(table))
        optimizer = Optimizer(net, bench.job, fe.SGD(0.1))
        bench.job.begin(0)
        net(torch.tensor([3, 1])).square().sum().backward()
        optimizer.step()
        bench.job.end()
        model = bench.job.trainer.parameters
        specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in model.items()]
        write_model(str(tmp_path / "model.npz"), "", specs, zip(specs, model.values(), strict=True))
        rows = pa.FixedSizeListArray.from_arrays(table.pull([3, 1]).reshape(-1), 2)
        pq.write_table(pa.table({"id": pa.array([3, 1], pa.int64()), "values": rows}), tmp_path / "users.parquet")
        return net, net.eval()(torch.tensor([1, 3])).detach(), tmp_path


def test_a_plain_module_loads_rows_of_tables(served: tuple[Towers, torch.Tensor, Path]) -> None:
    _, output, folder = served
    for kind in (nn.Embedding, nn.EmbeddingBag):
        plain = Towers(kind(5, 2))
        load_into(plain, folder / "model.npz", rows={"users": folder / "users.parquet"})
        ids = torch.tensor([1, 3])
        assert torch.equal(plain(ids if kind is nn.Embedding else ids.reshape(-1, 1)), output)
        assert not plain.users.weight[[0, 2, 4]].any()


@pytest.mark.parametrize(
    ("users", "rows", "text"),
    [
        (nn.Embedding(5, 2), {}, "the module has 'users.weight', but the file does not"),
        (nn.Embedding(3, 2), {"users": "users.parquet"}, r"has id 3, but 'users.weight' has 3 rows.*make it larger"),
        (nn.Embedding(5, 4), {"users": "users.parquet"}, "has rows of 2 values, and table 'users.weight' has dim 4"),
        (nn.Embedding(5, 2), {"users": "model.npz"}, r"model.npz is corrupt, .*not a parquet file"),
        (
            nn.Embedding(5, 2),
            {"userz": "users.parquet"},
            "rows names 'userz', but the module has no torch.nn.Embedding",
        ),
    ],
)
def test_rows_that_do_not_fit_are_rejected(
    users: nn.Module, rows: dict[str, str], text: str, served: tuple[Towers, torch.Tensor, Path]
) -> None:
    folder = served[2]
    with pytest.raises((DataError, UsageError), match=text):
        load_into(Towers(users), folder / "model.npz", rows={name: folder / file for name, file in rows.items()})
