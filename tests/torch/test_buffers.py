"""Buffers and parameters that servers keep, leave alone or refuse, with real pservers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import flightedl as fe
from flightedl.coordination.checkpoint_places import write_model
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import DataError, GradientError, UsageError
from flightedl.torch import Optimizer, load_into

from .bench import BenchJob, TorchBench

INF = float("inf")


@pytest.fixture
def bench() -> Iterator[TorchBench]:
    with TorchBench() as made:
        yield made


def with_buffers(**buffers: torch.Tensor) -> nn.Module:
    net = nn.Linear(2, 1)
    for name, value in buffers.items():
        net.register_buffer(name, value)
    return net


def save(job: BenchJob, path: Path) -> None:
    model = job.trainer.parameters
    specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in model.items()]
    write_model(str(path), "", specs, zip(specs, model.values(), strict=True))


def train(job: BenchJob, optimizer: Optimizer, batch: int, change: Callable[[], None]) -> None:
    job.begin(batch)
    change()
    optimizer.step()
    job.end()


def test_buffers_keep_shape_and_type_in_the_job_and_its_file(bench: TorchBench, tmp_path: Path) -> None:
    given = {
        "count": torch.tensor([[5]]),
        "low": torch.tensor([INF, -INF], dtype=torch.float16),
        "mask": torch.tensor([True, False, True]),
        "seen": torch.tensor([2**53, -1]),
        "scale": torch.tensor([1.5, 448.0]).to(torch.float8_e4m3fn),
        "flag": torch.tensor(False),
        "bits": torch.tensor([255, 0], dtype=torch.uint8),
    }
    net = with_buffers(**{name: value.clone() for name, value in given.items()})
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    train(bench.job, optimizer, 0, lambda: net.flag.fill_(True))
    save(bench.job, tmp_path / "model.safetensors")
    for loaded in (with_buffers(**{name: torch.zeros_like(value) for name, value in given.items()}), net):
        load_into(loaded, tmp_path / "model.safetensors")
        for name, value in (given | {"flag": torch.tensor(True)}).items():
            found = loaded.get_buffer(name)
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert torch.equal(found.float(), value.float()), name
    plain = with_buffers(**{name: torch.zeros_like(value) for name, value in given.items()})
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert plain.low.tolist() == [INF, -INF]
    assert plain.count.tolist() == [[5]]


def test_a_buffer_of_the_highest_batch_in_a_round_wins() -> None:
    with TorchBench(trainers=2, pservers=2) as bench:
        nets = [
            with_buffers(seen=torch.zeros(3, dtype=torch.int64), mask=torch.zeros(2, dtype=torch.bool)) for _ in "ab"
        ]

        def run(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            net = nets[number]
            optimizer = Optimizer(net, job, fe.SGD(1.0))
            # In the second round, only the first trainer has changes.
            for batch, value in ((10 - number, 7 + number), (20 + number, 9 if number == 0 else 8)):
                job.begin(batch, records=1 + 50 * number)
                if batch != 21:
                    net.seen.fill_(value)
                    net.mask[number] = True
                net.weight.grad = torch.zeros_like(net.weight)
                optimizer.step()
                job.end()
                optimizer.zero_grad()
                if batch < 20:
                    assert (net.seen.tolist(), net.mask.tolist()) == ([7, 7, 7], [True, False])

        bench.run(run)
        for net in nets:
            assert net.seen.tolist() == [9, 9, 9]


@pytest.mark.parametrize("mode", [fe.Sync(push_every=2), fe.Async(push_every=2)], ids=["sync", "async"])
def test_the_last_value_of_several_batches_is_pushed(mode: Any, bench: TorchBench) -> None:
    net = with_buffers(seen=torch.zeros(2, dtype=torch.int32))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), mode=mode)
    for batch in range(4):
        train(bench.job, optimizer, batch, lambda value=batch: net.seen.fill_(value + 1))
    assert bench.job.trainer.parameters["seen"].tolist() == [4, 4]
    assert net.seen.tolist() == [4, 4]


@pytest.mark.parametrize("mode", [fe.Sync(), fe.Sync(reduce="sum"), fe.Sync(deterministic=True), fe.Async()])
def test_the_first_change_from_infinity_sets(mode: Any) -> None:
    with TorchBench(trainers=2) as bench:
        nets = [with_buffers(low=torch.tensor([INF, -INF, INF])) for _ in "ab"]

        def run(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            optimizer = Optimizer(nets[number], job, fe.SGD(1.0), mode=mode)
            job.begin(number)
            nets[number].low[:2] = 4.0
            optimizer.step()
            job.end()

        bench.run(run)
        for job, net in zip(bench.jobs, nets, strict=True):
            job.trainer.parameters.pull()
            assert net.low.tolist() == [4, 4, INF]


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_a_buffer_that_becomes_infinite_after_its_declaration_is_named(value: float, bench: TorchBench) -> None:
    net = with_buffers(low=torch.zeros(2))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    with pytest.raises(GradientError, match=r"'low' has NaN or infinity .*; 'low' is a buffer, which may have infin"):
        train(bench.job, optimizer, 0, lambda: net.low.fill_(value))
    bench.job.end()
    train(bench.job, optimizer, 0, lambda: net.low.fill_(1.0))
    assert bench.job.trainer.parameters["low"].tolist() == [1, 1]


def test_a_buffer_that_is_assigned_or_moved_is_still_kept(bench: TorchBench) -> None:
    net = with_buffers(mean=torch.zeros(2), count=torch.tensor([0]))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))

    def change() -> None:
        net.mean = net.mean + 1
        net.count = net.count + 1

    train(bench.job, optimizer, 0, change)
    net.to(torch.float64)
    train(bench.job, optimizer, 1, change)
    assert bench.job.trainer.parameters["mean"].tolist() == net.mean.tolist() == [2, 2]
    assert bench.job.trainer.parameters["count"].tolist() == net.count.tolist() == [2]
    net.mean = torch.zeros(3)
    with pytest.raises(UsageError, match=r"buffer 'mean' no longer has the declared shape \(2,\)"):
        train(bench.job, optimizer, 2, lambda: None)


def test_rounding_in_the_module_is_not_a_change(bench: TorchBench) -> None:
    net = with_buffers(mean=torch.zeros(1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    train(bench.job, optimizer, 0, lambda: net.mean.fill_(0.1))
    net.half()
    for batch in range(1, 4):
        bench.job.trainer.parameters.pull()
        train(bench.job, optimizer, batch, lambda: None)
    assert bench.job.trainer.parameters["mean"].tolist() == [torch.tensor(0.1).item()]


def test_shared_buffers_are_one(bench: TorchBench, tmp_path: Path) -> None:
    def make() -> nn.ModuleList:
        shared = torch.zeros(2)
        return nn.ModuleList([with_buffers(mean=shared), with_buffers(mean=shared)])

    net = make()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    train(bench.job, optimizer, 0, lambda: net[1].mean.fill_(3.0))
    save(bench.job, tmp_path / "model.safetensors")
    load_into(other := make(), tmp_path / "model.safetensors")
    assert other[1].mean.tolist() == [3, 3]


def test_missing_buffers_are_named(bench: TorchBench, tmp_path: Path) -> None:
    Optimizer(with_buffers(), bench.job, fe.SGD(1.0))
    save(bench.job, tmp_path / "model.npz")
    with pytest.raises(DataError, match=r"the module has 'low', but the file does not, which also lacks mean$"):
        load_into(with_buffers(mean=torch.zeros(1), low=torch.zeros(1)), tmp_path / "model.npz")


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: with_buffers(turn=torch.ones(2, dtype=torch.complex64)), "buffer 'turn' is complex, sparse or exp"),
        (lambda: with_buffers(graph=torch.eye(2).to_sparse()), "buffer 'graph' is complex, sparse or expanded"),
        (lambda: with_buffers(wide=torch.ones(1).expand(3)), "buffer 'wide' is complex, sparse or expanded"),
        (lambda: with_buffers(gap=torch.tensor([1.0, float("nan")])), "buffer 'gap' has NaN"),
        (lambda: with_buffers(key=torch.tensor([2**53 + 1, 0])), r"buffer 'key' has whole numbers beyond 2\*\*53"),
        (lambda: with_buffers(away=torch.ones(1, device="meta")), "buffer 'away' has no values"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(1, 1)), "'0.running_mean' has no shape yet"),
    ],
    ids=["complex", "sparse", "expanded", "nan", "large", "meta", "lazy"],
)
def test_buffers_that_servers_cannot_keep_are_refused_by_name(make: Any, text: str, bench: TorchBench) -> None:
    with pytest.raises(UsageError, match=text):
        Optimizer(make(), bench.job, fe.SGD(1.0))
    assert bench.cluster is None, "the model was not declared"


def with_parameter(value: torch.Tensor, *, trains: bool) -> nn.Module:
    net = nn.Linear(2, 1)
    net.extra = nn.Parameter(value, requires_grad=trains)
    return net


def in_one_memory(*cut: Any) -> nn.Module:
    """Return a module whose two parameters are parts of one tensor."""
    net, whole = nn.Module(), torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4)
    net.a, net.b = (nn.Parameter(whole[part]) for part in cut)
    return net


def test_parameters_in_one_memory_are_refused_if_they_share_elements(bench: TorchBench) -> None:
    tied = with_parameter(torch.ones(1), trains=True)
    tied.extra = nn.Parameter(tied.weight.t())
    text = "'weight' and 'extra' share memory, so their updates would overwrite each other: use the same nn.Parameter"
    with pytest.raises(UsageError, match=text):
        Optimizer(tied, bench.job, fe.SGD(1.0))
    with pytest.raises(UsageError, match="'a' and 'b' share memory"):
        Optimizer(in_one_memory(np.s_[:2], np.s_[1:]), bench.job, fe.SGD(1.0))
    net = nn.Linear(2, 1)
    net.register_buffer("seen", net.weight.data[0])
    with pytest.raises(UsageError, match="'weight' and 'seen' share memory"):
        Optimizer(net, bench.job, fe.SGD(1.0))
    assert bench.cluster is None, "the model was not declared"
    apart = in_one_memory(np.s_[:, ::2], np.s_[:, 1::2])
    train(bench.job, Optimizer(apart, bench.job, fe.SGD(1.0)), 0, lambda: setattr(apart.a, "grad", apart.a.data + 0))
    assert apart.a.tolist() == [[0, 0]] * 3
    assert apart.b.tolist() == [[1, 3], [5, 7], [9, 11]]


class WithState(nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state


def test_extra_state_is_refused(bench: TorchBench) -> None:
    net = nn.Sequential(WithState(2, 1))
    net[0].state = {"seen": 3}
    with pytest.raises(UsageError, match="module '0' has extra state, which servers do not keep: register it as a b"):
        Optimizer(net, bench.job, fe.SGD(1.0))
    net[0].state = None
    Optimizer(net, bench.job, fe.SGD(1.0))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(1).expand(3),
        torch.eye(2).to_sparse(),
    ],
    ids=["complex", "float8", "expanded", "sparse"],
)
def test_parameters_that_servers_cannot_train_are_refused_unless_they_are_frozen(
    value: torch.Tensor, bench: TorchBench
) -> None:
    with pytest.raises(UsageError, match=r"parameter 'extra' has type .* which servers cannot train: make it a dense"):
        Optimizer(with_parameter(value, trains=True), bench.job, fe.SGD(1.0))
    net = with_parameter(value, trains=False)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), groups=[{"params": net.named_parameters(), "lr": 0.5}])
    assert set(bench.job.trainer.parameters) == {"weight", "bias"}
    assert optimizer.param_groups[0]["lr"] == 0.5
    train(bench.job, optimizer, 0, lambda: None)
    net.extra.requires_grad_(True)
    with pytest.raises(UsageError, match="parameter 'extra' was frozen or empty when it was declared"):
        train(bench.job, optimizer, 1, lambda: None)


def test_parameters_of_integers_and_without_elements_are_left_alone(bench: TorchBench) -> None:
    net = with_parameter(torch.tensor([3]), trains=False)
    net.none = nn.Parameter(torch.empty(0, 2))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), groups=[{"params": net.parameters()}])
    train(bench.job, optimizer, 0, lambda: None)
    assert net.extra.tolist() == [3]


def test_settings_of_groups_and_buffers_match_exact_names(bench: TorchBench) -> None:
    net = nn.ModuleDict({"a*": nn.BatchNorm1d(1), "ab": nn.BatchNorm1d(1), "a?": nn.BatchNorm1d(1)})
    del net.ab.running_mean
    net.ab.register_parameter("running_mean", nn.Parameter(torch.zeros(1)))
    rule = fe.SGD(1.0, overrides={"a*.weight": {"lr": 0.25}})
    groups = [
        {"params": net["a*"].parameters(), "lr": 0.5},
        {"params": [*net["ab"].parameters(), *net["a?"].parameters()], "weight_decay": 0.0},
    ]
    optimizer = Optimizer(net, bench.job, rule, groups=groups)
    before = {name: value.item() for name, value in net.named_parameters()}
    bench.job.begin(0)
    for each in net.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    bench.job.end()
    moved = {name: before[name] - value.item() for name, value in net.named_parameters()}
    assert moved == {
        "a*.weight": 0.5,
        "a*.bias": 0.5,
        "ab.weight": 0.25,
        "ab.bias": 1.0,
        "ab.running_mean": 1.0,
        "a?.weight": 0.25,
        "a?.bias": 1.0,
    }
