"""Local steps of a PyTorch optimizer, with real pservers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional

import flightedl as fe
from flightedl.errors import GradientError, UsageError
from flightedl.torch import DiLoCo, Embedding

from .bench import BenchJob, TorchBench
from .test_optimizer import images, line, seeded

EVERY = 4


def outer_batch(job: BenchJob, number: int, records: int = EVERY) -> Iterator[None]:
    """Begin an outer batch, and yield in each of its slices. End the batch afterwards."""
    assert job.trainer is not None
    slices = job.trainer.parameters.slices
    assert slices is not None
    job.begin(number, records)
    for _ in slices.of(pa.record_batch({"k": list(range(records))})):
        yield
    job.end()


@pytest.fixture
def bench() -> Iterator[TorchBench]:
    with TorchBench() as made:
        yield made


@pytest.fixture
def job(bench: TorchBench) -> BenchJob:
    return bench.job


def diloco(
    job: BenchJob, net: nn.Module, inner: torch.optim.Optimizer, *, outer: Any = None, every: int = EVERY, **more: Any
) -> DiLoCo:
    return DiLoCo(net, job, inner, every=every, outer=outer or fe.SGD(lr=1.0), **more)  # type: ignore[arg-type]


def train(net: nn.Module, inner: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    inner.zero_grad()
    functional.cross_entropy(net(x), y).backward()
    inner.step()


INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_one_trainer_with_a_plain_outer_optimizer_trains_like_pytorch_alone(
    job: BenchJob, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    net, alone = seeded(), seeded()
    inner, own = make(net.parameters()), make(alone.parameters())
    outer = diloco(job, net, inner)
    data = iter(images(3 * EVERY))
    pushed = []
    for number in range(3):
        for _ in outer_batch(job, number):
            x, y = next(data)
            train(net, inner, x, y)
            train(alone, own, x, y)
            pushed.append(outer.step())
    assert pushed == ([False] * (EVERY - 1) + [True]) * 3
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_outer_optimizer_is_the_nesterov_momentum_of_the_paper(job: BenchJob) -> None:
    net, alone = seeded(), seeded()
    inner, own = INNER["adamw"](net.parameters()), INNER["adamw"](alone.parameters())
    outer = diloco(job, net, inner, outer=fe.Momentum(lr=0.7, momentum=0.9, nesterov=True))
    of_outer = [parameter.detach().clone().requires_grad_() for parameter in alone.parameters()]
    reference = torch.optim.SGD(of_outer, lr=0.7, momentum=0.9, nesterov=True)
    data = iter(images(3 * EVERY))
    for number in range(3):
        for _ in outer_batch(job, number):
            x, y = next(data)
            train(net, inner, x, y)
            train(alone, own, x, y)
            outer.step()
        with torch.no_grad():
            for before, now in zip(of_outer, alone.parameters(), strict=True):
                before.grad = before - now
            reference.step()
            for before, now in zip(of_outer, alone.parameters(), strict=True):
                now.copy_(before)
    for one, other in zip(net.parameters(), of_outer, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)


def test_two_trainers_get_the_mean_of_their_values_weighted_by_records() -> None:
    def program(job: BenchJob) -> list[float]:
        net = line(2, 1, bias=False)
        outer = diloco(job, net, torch.optim.SGD(net.parameters(), lr=1.0))
        for _ in outer_batch(job, job._member, records=EVERY if job._member == 1 else 2):
            with torch.no_grad():
                net.weight += 1 if job._member == 1 else 5
            outer.step()
        found: list[float] = net.weight.detach().view(-1).tolist()
        return found

    with TorchBench(trainers=2) as bench:
        # From 1, 4 records moved by 4, and 2 records by 10.
        assert bench.run(program) == [[7.0, 7.0], [7.0, 7.0]]


def test_frozen_parameters_are_not_pushed_and_buffers_are(job: BenchJob) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[0].weight.requires_grad_(False)
    inner = torch.optim.SGD([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.1)
    outer = diloco(job, net, inner, outer=fe.Momentum(lr=1.0, momentum=0.9))
    for number in range(2):
        for _ in outer_batch(job, number):
            inner.zero_grad()
            net(torch.randn(5, 3)).square().sum().backward()
            inner.step()
            outer.step()
    assert outer.model.versions["0.weight"] == 2
    assert int(outer.model["1.num_batches_tracked"]) == int(net[1].num_batches_tracked) == 2 * EVERY
    torch.testing.assert_close(torch.from_numpy(outer.model["1.running_var"].copy()), net[1].running_var)


def test_schedules_continue_by_the_count_of_the_job(job: BenchJob) -> None:
    net = line()
    outer = diloco(job, net, torch.optim.SGD(net.parameters(), lr=1.0))
    steps = []
    for number in range(2):
        for _ in outer_batch(job, number):
            steps.append(outer.inner_step)
            outer.step()
    assert steps == list(range(2 * EVERY))
    again = seeded(line)
    assert diloco(job, again, torch.optim.SGD(again.parameters(), lr=1.0)).inner_step == 2 * EVERY


def test_a_batch_that_is_repeated_begins_with_the_values_of_the_job(job: BenchJob) -> None:
    net = line(2, 1, bias=False)
    outer = diloco(job, net, torch.optim.SGD(net.parameters(), lr=1.0))
    with pytest.raises(GradientError):  # noqa: PT012 - the loop ends with it
        for _ in outer_batch(job, 0):
            with torch.no_grad():
                net.weight += torch.nan if job.trainer.parameters.slices.number else 5.0  # type: ignore[union-attr]
            outer.step()
    job.end()
    assert net.weight.view(-1).tolist() == [1.0, 1.0]
    for _ in outer_batch(job, 0):
        with torch.no_grad():
            net.weight += 1
        outer.step()
    assert net.weight.view(-1).tolist() == [5.0, 5.0]


def test_local_steps_that_were_not_pushed_do_not_count(job: BenchJob) -> None:
    net = line()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    outer = diloco(job, net, inner)
    for _ in outer_batch(job, 0):
        """A batch that the script skips."""
    with pytest.raises(UsageError, match=r"call step\(\) of fe\.torch\.DiLoCo after each batch"):  # noqa: PT012
        for number, _ in enumerate(outer_batch(job, 1)):
            train(nn.Sequential(net, nn.Linear(1, 2)), inner, torch.ones(3, 2), torch.zeros(3, dtype=torch.long))
            if number < EVERY - 1:
                outer.step()


def test_what_cannot_be_trained_is_refused(job: BenchJob) -> None:
    net = line()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="trains a tensor that is no parameter of the module"):
        diloco(job, net, torch.optim.SGD(line().parameters(), lr=1.0))
    with pytest.raises(UsageError, match="inner must be an optimizer of PyTorch"):
        diloco(job, net, fe.SGD(lr=1.0))  # type: ignore[arg-type]
    rows = nn.ModuleDict({"rows": Embedding(job.table("rows", 2, optimizer=fe.SGD(lr=1.0))), "net": net})
    with pytest.raises(UsageError, match="embeddings on tables, whose rows have no local copy"):
        diloco(job, rows, inner)
    outer = diloco(job, net, inner)
    with pytest.raises(UsageError, match="there is no current batch"):
        outer.step()
