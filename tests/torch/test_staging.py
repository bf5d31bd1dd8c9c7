"""Staged gradients have the same bits as others, no matter what happens to them between ``backward`` and ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import flightedl as fe
from flightedl.errors import GradientError
from flightedl.torch import Optimizer
from flightedl.wire import shared_values

from .bench import TorchBench

#: Width of the largest parameter, which is sent in several messages.
WIDTH = 1500


class Net(nn.Module):
    """A module with a parameter that only a branch uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.branch = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.inner(torch.relu(self.body(x)))))
        return self.head(hidden) if float(x[0, 0]) > 0 else self.branch(hidden)


def loss_of(net: nn.Module, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    x, label = torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
    return functional.cross_entropy(net(x), label)


Loop = Callable[[Net, Optimizer, int], None]


def plain(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    optimizer.step()


def clipping(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.step()


def scaling(net: Net, optimizer: Optimizer, batch: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(net, batch)).backward()
    scaler.step(optimizer)


def accumulation(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    loss_of(net, batch + 100).backward()
    optimizer.step()


def zeroed(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(net, batch).backward()
    optimizer.step()


def by_closure(net: Net, optimizer: Optimizer, batch: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    optimizer.step(closure)


def through_data(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-1e-4, 1e-4)
    optimizer.step()


def replaced(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    net.inner.weight.grad = -net.inner.weight.grad
    optimizer.step()


def in_a_bucket(net: Net, optimizer: Optimizer, batch: int) -> None:
    """Let the gradient be part of a larger buffer, which is scaled at once."""
    optimizer.zero_grad()
    bucket = torch.zeros(2 * net.inner.weight.numel())
    net.inner.weight.grad = bucket[: net.inner.weight.numel()].view_as(net.inner.weight)
    loss_of(net, batch).backward()
    bucket.mul_(0.5)
    optimizer.step()


def held_by_a_hook(net: Net, optimizer: Optimizer, batch: int) -> None:
    """Let an earlier hook keep the gradient's tensor, and double it later."""
    held: list[torch.Tensor] = []
    optimizer.zero_grad()
    first = net.inner.weight.register_post_accumulate_grad_hook(lambda parameter: held.append(parameter.grad))
    net.inner.weight._post_accumulate_grad_hooks.move_to_end(first.id, last=False)
    loss_of(net, batch).backward()
    first.remove()
    for gradient in held:
        gradient.mul_(2.0)
    optimizer.step()


def with_a_graph(net: Net, optimizer: Optimizer, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward(create_graph=True)
    sum(parameter.grad.square().sum() for parameter in net.parameters() if parameter.grad is not None).backward()
    optimizer.step()
    for parameter in net.parameters():
        parameter.grad = None


def with_kept_gradients(net: Net, optimizer: Optimizer, batch: int) -> None:
    """Keep gradients, which must remain those of their batch after the next one."""
    kept = getattr(net, "kept", [])
    net.kept = kept
    plain(net, optimizer, batch)
    for gradient, was in kept[-1:]:
        assert torch.equal(gradient, was)
    gradient = net.inner.weight.grad.view(-1) if batch % 2 else net.inner.weight.grad
    kept.append((gradient, gradient.clone()))


LOOPS = [
    plain,
    clipping,
    scaling,
    accumulation,
    zeroed,
    by_closure,
    through_data,
    replaced,
    in_a_bucket,
    held_by_a_hook,
    with_kept_gradients,
]


def trained(loop: Loop, *, overlap_backward: bool, pservers: int = 1, **more: Any) -> dict[str, bytes]:
    torch.manual_seed(0)
    net = Net()
    with TorchBench(pservers=pservers) as bench:
        optimizer = Optimizer(net, bench.job, fe.Adam(1e-2), overlap_backward=overlap_backward, **more)
        for batch in range(6):
            bench.job.begin(batch)
            loop(net, optimizer, batch)
            bench.job.end()
    return {name: value.detach().numpy().tobytes() for name, value in net.named_parameters()}


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each message whose values were lent without a copy."""
    found: list[int] = []
    real = shared_values.Outbox._place_in_store

    def noted(self: shared_values.Outbox, values: Any) -> int | None:
        place = real(self, values)
        if place is not None and self._store is not None and not self._store.flags.writeable:
            raise AssertionError("it is the reader's")
        if place is not None:
            found.append(sum(part.nbytes for part in values))
        return place

    monkeypatch.setattr(shared_values.Outbox, "_place_in_store", noted)
    return found


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_staging_does_not_change_a_bit(loop: Loop) -> None:
    assert trained(loop, overlap_backward=True) == trained(loop, overlap_backward=False)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_staging_does_not_change_gradients_with_a_graph() -> None:
    assert trained(with_a_graph, overlap_backward=True) == trained(with_a_graph, overlap_backward=False)


@pytest.mark.parametrize("more", [{"mode": fe.Sync(push_every=2)}, {"wire": "bfloat16"}, {"pservers": 2}], ids=str)
def test_staging_does_not_change_a_bit_with_other_settings(more: dict[str, Any]) -> None:
    assert trained(plain, overlap_backward=True, **more) == trained(plain, overlap_backward=False, **more)


def test_a_step_sends_gradients_from_where_they_were_staged(lent: list[int]) -> None:
    trained(plain, overlap_backward=False)
    values_only = sum(lent)
    lent.clear()
    trained(clipping, overlap_backward=True)
    # Others are interrupted by those that the branch and the frozen bias lack.
    assert sum(lent) - values_only > 0.9 * 6 * 4 * WIDTH * WIDTH, "nearly all of the large gradient, in each step"


def test_a_gradient_that_is_not_finite_is_rejected_before_anything_is_sent() -> None:
    net = Net()
    with TorchBench() as bench:
        optimizer = Optimizer(net, bench.job, fe.SGD(1.0), overlap_backward=True)
        bench.job.begin(0)
        loss_of(net, 1).backward()
        assert net.inner.weight.grad is not None
        net.inner.weight.grad.data[3, 4] = float("nan")
        before = net.inner.weight.detach().clone()
        with pytest.raises(GradientError, match=r"'inner\.weight' has NaN or infinity"):
            optimizer.step()
        optimizer.model.pull()
        assert torch.equal(net.inner.weight, before)


def test_hooks_do_nothing_after_the_optimizer_is_deleted() -> None:
    net = Net()
    with TorchBench() as bench:
        optimizer = Optimizer(net, bench.job, fe.SGD(1.0), overlap_backward=True)
        staging = optimizer._staging
        assert staging is not None
        home = staging._homes["inner.weight"]
        loss_of(net, 1).backward()
        assert net.inner.weight.grad is not None
        assert net.inner.weight.grad.data_ptr() == home.data_ptr()
        optimizer._staging = staging = None
        net.inner.weight.grad = None
        loss_of(net, 1).backward()
        assert net.inner.weight.grad is not None
        assert net.inner.weight.grad.data_ptr() != home.data_ptr()
