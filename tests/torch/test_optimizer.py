"""The servers' optimizer through PyTorch's interface, with real pservers in this process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import flightedl as fe
from flightedl.errors import GradientError, UsageError
from flightedl.torch import Optimizer
from flightedl.torch.tensors import Copies

from .bench import BenchJob, TorchBench


@pytest.fixture
def bench() -> Iterator[TorchBench]:
    with TorchBench() as made:
        yield made


class Cnn(nn.Module):
    """Small module with a convolution, a bias, a normalization without statistics, and a tied scale."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.convolution(x))).flatten(1))


def seeded(make: Callable[[], nn.Module] = Cnn, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def images(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 1, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator))
        for _ in range(count)
    ]


def line(*sizes: int, **more: Any) -> nn.Linear:
    made = nn.Linear(*(sizes or (2, 1)), **more)
    nn.init.ones_(made.weight)
    if made.bias is not None:
        nn.init.zeros_(made.bias)
    return made


def step_with(job: BenchJob, optimizer: Optimizer, gradients: dict[torch.Tensor, float], batch: int) -> None:
    """Train one batch with constant gradients for these parameters, and with none for others."""
    job.begin(batch)
    optimizer.zero_grad()
    for tensor, value in gradients.items():
        tensor.grad = torch.full_like(tensor, value)
    optimizer.step()
    job.end()


# --- agreement with PyTorch ---


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (fe.Momentum(0.05, 0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        (fe.Adam(1e-2), lambda p: torch.optim.Adam(p, lr=1e-2)),
        (fe.AdamW(1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    ],
    ids=["momentum", "adam", "adamw"],
)
def test_200_steps_of_a_cnn_equal_those_of_torch(
    rule: Any, make: Callable[[Any], torch.optim.Optimizer], bench: TorchBench
) -> None:
    ours, theirs = seeded(), seeded()
    optimizer, reference = Optimizer(ours, bench.job, rule), make(theirs.parameters())
    for batch, (x, y) in enumerate(images(200)):
        bench.job.begin(batch, len(x))
        for net, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            each.step()
        bench.job.end()
    for (name, ours_value), theirs_value in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_value, theirs_value, rtol=0, atol=1e-5, msg=name)


def trained_by_four() -> list[bytes]:
    with TorchBench(trainers=4, pservers=2) as bench:
        nets = [seeded() for _ in range(4)]

        def train(job: BenchJob) -> bytes:
            number = bench.jobs.index(job)
            net = nets[number]
            optimizer = Optimizer(net, job, fe.Adam(1e-2), mode=fe.Sync(deterministic=True))
            for batch, (x, y) in enumerate(images(5, seed=number)):
                job.begin(4 * batch + number, len(x))
                optimizer.zero_grad()
                functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                job.end()
            return b"".join(value.detach().numpy().tobytes() for value in net.parameters())

        return bench.run(train)


def test_four_deterministic_trainers_get_the_same_bits_twice() -> None:
    first, second = trained_by_four(), trained_by_four()
    assert len(set(first)) == 1, "all trainers have the same values"
    assert first == second


# --- parameters with and without gradients ---


def test_a_parameter_without_a_gradient_does_not_change(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.Momentum(1.0, 0.5, weight_decay=0.1))
    step_with(bench.job, optimizer, {net.weight: 1.0, net.bias: 1.0}, 0)
    assert net.bias.item() == -1.0
    step_with(bench.job, optimizer, {net.weight: 0.0}, 1)
    assert net.bias.item() == -1.0, "neither momentum nor decay changes a parameter without a gradient"
    step_with(bench.job, optimizer, {net.bias: 0.0}, 2)
    # Velocity 0.5 * 1, plus decay 0.1 * -1.
    assert net.bias.item() == pytest.approx(-1.0 - (0.5 - 0.1))


def test_a_gradient_of_zero_counts_as_a_gradient(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0, weight_decay=0.5))
    bench.job.begin(0)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    bench.job.end()
    assert net.weight.tolist() == [[0.5, 0.5]]


def test_the_mean_is_over_the_trainers_with_a_gradient() -> None:
    with TorchBench(trainers=2) as bench:
        nets = [line(), line()]

        def train(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            net = nets[number]
            optimizer = Optimizer(net, job, fe.SGD(1.0))
            job.begin(number, records=[30, 10][number])
            net.weight.grad = torch.full_like(net.weight, 1.0 + number)
            if number == 1:
                net.bias.grad = torch.full_like(net.bias, 8.0)
            optimizer.step()
            job.end()

        bench.run(train)
        for net in nets:
            # (30 * 1 + 10 * 2) / 40, as with DDP if batches are weighted by records
            assert net.weight.tolist() == [[1 - 1.25, 1 - 1.25]]
            # 8, not 8 * 10 / 40
            assert net.bias.item() == -8.0


def test_frozen_parameters_are_declared_and_may_be_unfrozen(bench: TorchBench) -> None:
    net = nn.Sequential(line(2, 2), line(2, 1))
    for value in net[0].parameters():
        value.requires_grad_(False)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    for batch, is_frozen in enumerate((True, False, True)):
        net[0].requires_grad_(not is_frozen)
        before = net[0].weight.clone()
        bench.job.begin(batch)
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        bench.job.end()
        assert torch.equal(before, net[0].weight) == is_frozen


def test_sparse_gradients_are_summed(bench: TorchBench) -> None:
    net = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(net.weight)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([1, 1, 3])).sum().backward()
    assert net.weight.grad.is_sparse
    optimizer.step()
    bench.job.end()
    assert net.weight.tolist() == [[0, 0], [-2, -2], [0, 0], [-1, -1]]


def test_tied_weights_are_one_parameter(bench: TorchBench) -> None:
    net = nn.Sequential(line(2, 2, bias=False), line(2, 2, bias=False))
    net[1].weight = net[0].weight
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    assert list(bench.job.trainer.parameters) == ["0.weight"]
    step_with(bench.job, optimizer, {net[0].weight: 1.0}, 0)
    assert net[1].weight.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_trained(dtype: torch.dtype, bench: TorchBench) -> None:
    net = line().to(dtype)
    optimizer = Optimizer(net, bench.job, fe.SGD(2.0**-10))
    for batch in range(16):
        step_with(bench.job, optimizer, {net.weight: 0.25}, batch)
    # Each step alone is too small to change a 16-bit 1, but the servers have a float32 master copy.
    assert net.weight.dtype == dtype
    assert net.weight.double().tolist() == [[1 - 2.0**-8] * 2]


def test_a_parameter_without_dimensions_is_trained(bench: TorchBench) -> None:
    net = nn.PReLU()
    net.weight = nn.Parameter(torch.tensor(1.0))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    step_with(bench.job, optimizer, {net.weight: 0.5}, 0)
    assert net.weight.shape == ()
    assert net.weight.item() == 0.5


def test_strided_parameters_keep_their_strides(bench: TorchBench) -> None:
    net = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    before = net.weight.detach().clone()
    strides = net.weight.stride()
    assert not net.weight.is_contiguous()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.randn(1, 3, 5, 5).to(memory_format=torch.channels_last)).square().sum().backward()
    gradient = net.weight.grad.clone()
    optimizer.step()
    bench.job.end()
    assert net.weight.stride() == strides
    torch.testing.assert_close(net.weight.detach(), before - gradient)


def test_values_are_written_in_place(bench: TorchBench) -> None:
    net = line()
    weight = net.weight
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    memory = net.weight.data_ptr()
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    assert net.weight is weight
    assert weight.data_ptr() == memory
    assert weight.tolist() == [[0, 0]]


def test_a_trainer_that_joins_late_has_the_values_of_the_job() -> None:
    with TorchBench(trainers=2) as bench:
        first, second = line(), line()
        nn.init.constant_(second.weight, 7.0)
        Optimizer(first, bench.jobs[0], fe.SGD(1.0))
        Optimizer(second, bench.jobs[1], fe.SGD(1.0))
        assert second.weight.tolist() == [[1, 1]]


def test_a_skipped_batch_still_fetches_updates_of_others(bench: TorchBench) -> None:
    net = line()
    Optimizer(net, bench.job, fe.SGD(1.0))
    other = bench.cluster.trainer(1)
    other.begin(5, of=1000)
    other.step(5, {"weight": np.ones((1, 2), np.float32)})
    bench.job.begin(0)
    bench.job.trainer.parameters.pull()
    assert net.weight.tolist() == [[0, 0]]
    bench.job.end()


@pytest.mark.parametrize("mode", [fe.Sync(push_every=2), fe.Async(push_every=2)], ids=["sync", "async"])
def test_gradients_of_several_batches_are_one_push(mode: Any, bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.Momentum(1.0, 0.5), mode=mode)
    values = []
    for batch in range(4):
        bench.job.begin(batch, records=1 + 2 * (batch % 2))
        optimizer.zero_grad()
        net.weight.grad = torch.full_like(net.weight, 4.0 * (batch % 2))
        optimizer.step()
        bench.job.end()
        values.append(net.weight[0, 0].item())
    # The mean over records is (1 * 0 + 3 * 4) / 4. The second push adds half of the first one's velocity.
    assert values == [1, -2, -2, -6.5]


def test_a_round_of_sums_is_the_mean_over_all_their_records() -> None:
    with TorchBench(trainers=2) as bench:
        nets = [line(), line()]

        def train(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            net = nets[number]
            optimizer = Optimizer(net, job, fe.SGD(1.0), mode=fe.Sync(push_every=2))
            for batch in range(2):
                job.begin(2 * number + batch, records=10 + 20 * number)
                # The second trainer skips its second batch.
                if number == 0 or batch == 0:
                    net.weight.grad = torch.full_like(net.weight, 2.0 * number + batch)
                    optimizer.step()
                optimizer.zero_grad()
                job.end()

        bench.run(train)
        for net in nets:
            assert net.weight[0, 0].item() == pytest.approx(1 - (10 * 0 + 10 * 1 + 30 * 2) / 50)


# groups and settings


def test_groups_have_their_own_settings(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(
        net,
        bench.job,
        fe.SGD(1.0),
        groups=[{"params": net.weight, "lr": torch.tensor(0.25)}, {"params": [net.bias], "weight_decay": 0.5}],
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.5]
    step_with(bench.job, optimizer, {net.weight: 1.0, net.bias: 1.0}, 0)
    step_with(bench.job, optimizer, {net.weight: 1.0, net.bias: 0.0}, 1)
    assert net.weight.tolist() == [[0.5, 0.5]]
    assert net.bias.item() == -0.5


def test_betas_are_beta1_and_beta2(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.Adam(), groups=[{"params": net.parameters(), "betas": (0.5, 0.6)}])
    assert (optimizer.param_groups[0]["beta1"], optimizer.param_groups[0]["beta2"]) == (0.5, 0.6)


def test_a_group_may_be_added_later(bench: TorchBench) -> None:
    net = nn.ModuleDict({"body": line(), "head": line()})
    rule = fe.SGD(1.0, overrides={"body.*": {"lr": 0.5}})
    optimizer = Optimizer(net, bench.job, rule, groups=[{"params": net["head"].parameters()}])
    step_with(bench.job, optimizer, {net["head"].weight: 1.0, net["body"].weight: 1.0}, 0)
    assert net["body"].weight.tolist() == [[1, 1]]
    with pytest.raises(UsageError, match=r"servers use lr=0.5 for 'body.weight', not 0.1: declare it from the start"):
        optimizer.add_param_group({"params": net["body"].parameters(), "lr": 0.1})
    optimizer.add_param_group({"params": net["body"].parameters(), "lr": 0.5})
    step_with(bench.job, optimizer, {net["head"].weight: 1.0, net["body"].weight: 1.0}, 1)
    assert net["body"].weight.tolist() == [[0.5, 0.5]]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]


def test_the_shown_rate_is_that_of_the_servers(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(fe.StepDecay(1.0, 0.5, every=1)))
    shown = []
    for batch in range(3):
        shown.append(optimizer.param_groups[0]["lr"])
        step_with(bench.job, optimizer, {net.weight: 0.0}, batch)
    assert shown == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("mode", [fe.Sync(), fe.Async(), fe.Bounded(staleness=1)], ids=["sync", "async", "bounded"])
def test_a_backbone_that_is_unfrozen_later_has_the_rate_of_the_head(mode: Any, bench: TorchBench) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    theirs = copy.deepcopy(ours)
    optimizer = Optimizer(ours, bench.job, fe.Adam(fe.StepDecay(0.1, 0.5, every=3)), mode=mode)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 0.5 ** (step // 3))
    for batch in range(14):
        x, y = torch.randn(5, 3), torch.randint(2, (5,))
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        bench.job.begin(batch, len(x))
        for net, each in ((ours, optimizer), (theirs, reference)):
            net[0].requires_grad_(6 <= batch < 9 or batch >= 11)
            each.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            each.step()
        scheduler.step()
        bench.job.end()
    for ours_value, theirs_value in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_value, theirs_value, rtol=0, atol=1e-6)


def test_a_torch_scheduler_is_rejected_with_an_alternative(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    scheduler.step()
    with pytest.raises(UsageError, match=r"lr of group 0 was set to 0.5, .* fe.SGD\(lr=fe.StepDecay"):
        step_with(bench.job, optimizer, {net.weight: 1.0}, 1)


def test_a_scheduler_that_keeps_the_rate_is_accepted(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    scheduler.step()
    step_with(bench.job, optimizer, {net.weight: 1.0}, 1)
    assert net.weight.tolist() == [[-1, -1]]


# --- tools of PyTorch ---


def test_step_returns_what_the_closure_returned(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    bench.job.begin(0)
    with torch.no_grad():
        assert optimizer.step(closure).item() == 2.0
    bench.job.end()
    assert net.weight.tolist() == [[0, 0]]


def test_hooks_of_steps_are_called(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    assert calls == ["before", "after"]


def test_the_class_of_the_optimizer_may_be_changed(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))

    class Wrapped:
        def toggle(self) -> int:
            return len(self.param_groups)

    optimizer.__class__ = type("LightningOptimizer", (Wrapped, optimizer.__class__), {})
    assert optimizer.toggle() == 1
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    assert net.weight.tolist() == [[0, 0]]


def test_the_state_of_the_optimizer_may_be_loaded_again(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.Adam(fe.StepDecay(1.0, 0.5, every=1)))
    before = copy.deepcopy(optimizer.state_dict())
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    optimizer.load_state_dict(before)
    state = optimizer.state_dict()
    assert [each["version"].item() for each in state["state"].values()] == [1, 1]
    assert state["param_groups"][0]["params"] == [0, 1]
    step_with(bench.job, optimizer, {net.weight: 1.0}, 1)


def test_the_state_of_another_optimizer_is_rejected(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"belongs to another optimizer.*--resume"):
        optimizer.load_state_dict(other.state_dict())


def test_a_trial_step_of_torch_pushes_nothing(bench: TorchBench) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    found = get_optimizer_state_dict(net, optimizer)
    assert set(found["state"]) == {"weight", "bias"}
    assert bench.cluster.shards[0].meter.messages == 0
    assert net.weight.grad is None


@pytest.mark.parametrize("of", [copy.deepcopy, copy.copy, pickle.dumps])
def test_the_optimizer_can_be_neither_copied_nor_pickled(of: Callable[[Any], Any], bench: TorchBench) -> None:
    optimizer = Optimizer(line(), bench.job, fe.SGD(1.0))
    with pytest.raises(UsageError, match="be neither pickled nor copied"):
        of(optimizer)


def test_a_scaler_unscales_gradients_and_skips_overflowing_steps(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for batch, factor in enumerate((1.0, float("inf"), 1.0)):
        bench.job.begin(batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.ones(1, 2)).float().sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        bench.job.end()
    assert net.weight.tolist() == [[-1, -1]]
    assert scaler.get_scale() == 2.0


def test_clipping_before_the_step_applies_to_this_trainer(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net.weight.grad = torch.tensor([[30.0, 40.0]])
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
    bench.job.end()
    torch.testing.assert_close(net.weight.detach(), torch.tensor([[-2.0, -3.0]]))


def test_clip_norm_excludes_changes_of_buffers(bench: TorchBench) -> None:
    net = nn.BatchNorm1d(1, momentum=1.0)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0, clip_norm=5.0))
    bench.job.begin(0)
    net(torch.tensor([[1000.0], [3000.0]])).sum()
    net.weight.grad, net.bias.grad = torch.tensor([30.0]), torch.tensor([40.0])
    optimizer.step()
    bench.job.end()
    torch.testing.assert_close(torch.cat([net.weight, net.bias]).detach(), torch.tensor([-2.0, -4.0]))
    assert net.running_mean.item() == 2000.0


def test_a_compiled_module_has_the_names_of_the_plain_one(bench: TorchBench) -> None:
    net = nn.Sequential(line(), torch.compile(line(1, 1), backend="eager"))
    compiled = torch.compile(net, backend="eager")
    optimizer = Optimizer(compiled, bench.job, fe.SGD(1.0))
    assert sorted(bench.job.trainer.parameters) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    for batch in range(2):
        bench.job.begin(batch)
        optimizer.zero_grad()
        compiled(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        bench.job.end()
    # 1 - 1, then 0: the second gradient belongs to a head of weight 1 - 2
    assert net[0].weight.tolist() == [[1.0, 1.0]]


def test_reading_does_not_join_rounds(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    before = bench.cluster.shards[0].meter.messages
    net.eval()
    with torch.no_grad():
        net(torch.ones(1, 2))
    assert bench.cluster.shards[0].meter.messages == before


# buffers


def test_the_statistics_of_a_normalization_are_averaged() -> None:
    with TorchBench(trainers=2) as bench:
        nets = [nn.BatchNorm1d(1, momentum=0.5), nn.BatchNorm1d(1, momentum=0.5)]

        def train(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            net = nets[number]
            optimizer = Optimizer(net, job, fe.Adam(0.1))
            for batch in range(2):
                job.begin(2 * batch + number, records=2)
                optimizer.zero_grad()
                net(torch.tensor([[1.0], [3.0]]) * (1 + number)).square().sum().backward()
                optimizer.step()
                job.end()

        bench.run(train)
        for net in nets:
            # Means of 2 and 4: both trainers have the average of their separate statistics, and the number of rounds.
            torch.testing.assert_close(net.running_mean, torch.tensor([0.75 * 3.0]))
            assert net.num_batches_tracked.item() == 2
            assert net.num_batches_tracked.dtype == torch.int64


def test_the_change_of_a_buffer_is_pushed_once_for_several_batches(bench: TorchBench) -> None:
    net = nn.BatchNorm1d(1, momentum=0.5)
    optimizer = Optimizer(net, bench.job, fe.SGD(0.1), mode=fe.Sync(reduce="sum", push_every=3))
    for batch in range(6):
        bench.job.begin(batch)
        optimizer.zero_grad()
        net(torch.tensor([[1.0], [3.0]])).sum().backward()
        optimizer.step()
        bench.job.end()
    assert net.num_batches_tracked.item() == 6
    torch.testing.assert_close(net.running_mean, torch.tensor([2.0 * (1 - 0.5**6)]))


def test_buffers_without_state_stay_local(bench: TorchBench) -> None:
    net = line()
    net.register_buffer("cache", torch.zeros(2), persistent=False)
    net.register_buffer("empty", torch.zeros(0))
    net.register_buffer("mask", torch.tensor([True, False]))
    Optimizer(net, bench.job, fe.SGD(1.0))
    assert set(bench.job.trainer.parameters) == {"weight", "bias", "mask"}


# --- rejected input ---


def test_a_step_without_a_batch_raises(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    net.weight.grad = torch.ones_like(net.weight)
    with pytest.raises(UsageError, match="there is no current batch"):
        optimizer.step()


def test_a_second_step_of_a_batch_is_rejected(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.step()
    with pytest.raises(UsageError, match=r"already pushed for this batch .*steps_per_batch=2"):
        optimizer.step()


def test_a_lost_device_is_named() -> None:
    with pytest.raises(UsageError, match=r"gradient of 'head.weight' from meta: .*restart this trainer"):
        Copies().arrays({"head.weight": torch.empty(2, device="meta")})


def test_a_gradient_that_is_not_finite_is_named_by_its_module_path(bench: TorchBench) -> None:
    net = nn.Sequential(line(), line(1, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net[1].weight.grad = torch.full((1, 1), float("nan"))
    with pytest.raises(GradientError, match=r"the gradient of '1.weight' has NaN or infinity"):
        optimizer.step()


def test_gradients_that_were_not_pushed_raise_an_error(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    # This batch is skipped before any computation.
    bench.job.begin(1)
    bench.job.end()
    bench.job.begin(2)
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match=r"gradients of epoch 1, task 0, batch 2 were not pushed.*optimizer.step\(\)"):
        bench.job.end()
    optimizer.zero_grad()
    bench.job.end()


def test_gradients_from_before_the_job_belong_to_no_batch(bench: TorchBench) -> None:
    net = line()
    net(torch.ones(1, 2)).sum().backward()
    Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    bench.job.end()


def test_values_loaded_in_only_one_trainer_are_rejected(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    kept = copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    net.load_state_dict(kept)
    with pytest.raises(UsageError, match=r"the value of 'weight' was changed in this trainer only"):
        step_with(bench.job, optimizer, {net.weight: 1.0}, 1)


def test_values_that_were_swapped_and_restored_are_accepted(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    kept = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()
        net.weight.copy_(kept)
    step_with(bench.job, optimizer, {net.weight: 1.0}, 0)
    assert net.weight.tolist() == [[0, 0]]


def is_where_values_arrive(optimizer: Optimizer, name: str, tensor: torch.Tensor) -> bool:
    return bool(tensor.data_ptr() == optimizer.model[name].ctypes.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_use_the_memory_in_which_values_arrive(dtype: torch.dtype, bench: TorchBench) -> None:
    net = line().to(dtype)
    net.bias.requires_grad_(False)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    for name, tensor in net.named_parameters():
        assert is_where_values_arrive(optimizer, name, tensor)
    copied = copy.deepcopy(net)
    step_with(bench.job, optimizer, {net.weight: 0.5}, 0)
    assert net.weight.tolist() == net.state_dict()["weight"].tolist() == [[0.5, 0.5]]
    assert copied.weight.tolist() == [[1, 1]]
    assert not is_where_values_arrive(optimizer, "weight", copied.weight)


def test_a_parameter_with_shared_memory_is_not_moved(bench: TorchBench) -> None:
    net = nn.Sequential(line(), line())
    loaded = net[0].state_dict()
    shared = torch.ones(2, 2)
    net[1].weight = nn.Parameter(shared[:1])
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    step_with(bench.job, optimizer, {net[0].weight: 1.0, net[1].weight: 1.0}, 0)
    assert loaded["weight"].tolist() == [[0, 0]]
    assert shared.tolist() == [[0, 0], [1, 1]]


def test_a_parameter_that_was_moved_still_gets_values(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    net.to(torch.float64)
    for batch in range(2):
        step_with(bench.job, optimizer, {net.weight: 0.5}, batch)
    assert net.weight.dtype == torch.float64
    assert net.weight.tolist() == [[0, 0]]
    with torch.no_grad():
        net.weight[0, 1] = 1.0
    with pytest.raises(UsageError, match="the value of 'weight' was changed in this trainer only"):
        step_with(bench.job, optimizer, {net.weight: 0.5}, 2)


def test_a_change_of_one_element_is_detected(bench: TorchBench) -> None:
    net = line(1000, 100)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), mode=fe.Async())
    step_with(bench.job, optimizer, {net.weight: 0.5}, 0)
    with torch.no_grad():
        net.weight[50, 500] = 7.0
    with pytest.raises(UsageError, match="the value of 'weight' was changed in this trainer only"):
        step_with(bench.job, optimizer, {net.weight: 0.5}, 1)


def test_autograd_detects_values_that_arrived_before_backward(bench: TorchBench) -> None:
    net = nn.Sequential(line(2, 2), line(2, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.ones(1, 2)).sum().backward()
    loss = net(torch.ones(1, 2)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    bench.job.end()


def test_a_replaced_parameter_tensor_is_rejected(bench: TorchBench) -> None:
    net = line()
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    net.weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(UsageError, match="tensor 'weight' is not the declared one"):
        step_with(bench.job, optimizer, {}, 0)


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def nothing() -> nn.Module:
    return nn.ReLU()


def on_no_device() -> nn.Module:
    return nn.Linear(2, 1, device="meta")


def sharded() -> nn.Module:
    class DTensor(nn.Parameter):
        pass

    net = nn.Linear(2, 1)
    net.weight = DTensor(torch.ones(1, 2))
    return net


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "rule", "text"),
    [
        (lazy, fe.SGD(1.0), "parameter 'weight' has no shape yet: run the module on one batch"),
        (nothing, fe.SGD(1.0), "no floating-point parameters"),
        (on_no_device, fe.SGD(1.0), "meta device.*: initialize it first"),
        (sharded, fe.SGD(1.0), "'weight' is sharded over processes.*pass the unsharded module"),
        (dict, fe.SGD(1.0), "first argument is {}, but must be the module"),
        (line, torch.optim.LBFGS, "LBFGS evaluates the loss many times"),
        (line, torch.optim.Adam, r"pass fe.Adam\(lr=...\) or another optimizer of fe instead of torch.optim.Adam"),
        (line, "adamm", "there is no optimizer 'adamm'"),
    ],
)
def test_parameters_that_servers_cannot_train_are_rejected(make: Any, rule: Any, text: str, bench: TorchBench) -> None:
    with pytest.raises(UsageError, match=text):
        Optimizer(make(), bench.job, rule)
    assert bench.cluster is None, "the model was not declared"


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([nn.Parameter(torch.ones(1))], "must have dicts such as"),
        ([{"params": [nn.Parameter(torch.ones(1))]}], "a parameter that is not in the module"),
        ([{"params": [], "momentun": 0.9}], "a group sets 'momentun', but SGD only has"),
    ],
)
def test_wrong_groups_are_rejected(groups: Any, text: str, bench: TorchBench) -> None:
    with pytest.raises(UsageError, match=text):
        Optimizer(line(), bench.job, fe.SGD(1.0), groups=groups)


def test_settings_of_a_group_whose_parameters_have_another_rule_are_rejected(bench: TorchBench) -> None:
    rule = fe.Momentum(1.0, overrides={"w*": fe.Adam(0.5), "bias": {"momentum": 0.5}})
    net = nn.Linear(2, 1)
    for setting, used in (("lr", "0.5"), ("momentum", "'nothing'")):
        text = rf"use {setting}={used} for 'weight', not 0.25.*{{'weight': fe.Adam\(...\)}}"
        with pytest.raises(UsageError, match=text):
            Optimizer(net, bench.job, rule, groups=[{"params": net.parameters(), setting: 0.25}])
    assert bench.cluster is None, "the model was not declared"
    groups = [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "lr": fe.StepDecay(0.5, 0.5, every=2)}]
    optimizer = Optimizer(net, bench.job, rule, groups=groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
