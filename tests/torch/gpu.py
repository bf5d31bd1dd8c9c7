"""Tests that require a GPU, which run only by name: ``make test-one t=tests/torch/gpu.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import flightedl as fe
from flightedl.errors import UsageError
from flightedl.torch import Embedding, EmbeddingBag, Optimizer

from .bench import TorchBench

STEPS = 8
#: GPU cycles that take about 50 ms.
LONG = 100_000_000


def trained(device: str) -> dict[str, torch.Tensor]:
    with TorchBench() as bench:
        table = bench.job.table("users", 4, optimizer=fe.Adagrad(0.1), init=fe.Uniform(0.1))
        torch.manual_seed(0)
        net = nn.Sequential(Embedding(table), nn.Linear(4, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(device)
        optimizer = Optimizer(net, bench.job, fe.SGD(0.1))
        for batch in range(20):
            ids = torch.arange(batch, batch + 8, device=device)
            bench.job.begin(batch, 8)
            optimizer.zero_grad()
            (net(ids) - 1).square().mean().backward()
            optimizer.step()
            bench.job.end()
        found = {name: value.detach().cpu() for name, value in net.named_parameters() if value.numel()}
        assert next(net[1].parameters()).device.type == torch.device(device).type
        return found | {"rows": torch.from_numpy(table.pull(range(30)))}


def test_gradients_from_a_gpu_equal_those_in_main_memory() -> None:
    on_gpu, here = trained("cuda"), trained("cpu")
    for name, values in here.items():
        torch.testing.assert_close(on_gpu[name], values, rtol=1e-4, atol=1e-5, msg=name)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers).to("cuda", dtype)


def loss_of(net: nn.Module, batch: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(batch)
    x = torch.randn(32, 64, generator=generator, device="cuda").to(next(net.parameters()).dtype)
    label = torch.randint(10, (32,), generator=generator, device="cuda")
    return functional.cross_entropy(net(x), label)


Loop = Callable[[nn.Module, Any, int], None]


def plain(net: nn.Module, optimizer: Any, batch: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    optimizer.step()


def mixed(net: nn.Module, optimizer: Any, batch: int) -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = loss_of(net, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(optimizer)


def on_a_stream(net: nn.Module, optimizer: Any, batch: int) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plain(net, optimizer, batch)
    torch.cuda.current_stream().wait_stream(stream)


def delayed(net: nn.Module, optimizer: Any, batch: int) -> None:
    torch.cuda._sleep(LONG)
    plain(net, optimizer, batch)


def by_torch(loop: Loop, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    net = network(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for batch in range(STEPS):
        loop(net, optimizer, batch)
    return {name: value.detach().float().cpu() for name, value in net.named_parameters()}


def by_job(
    loop: Loop, dtype: torch.dtype, compiled: Callable[[Any], Any] = lambda net: net, **more: Any
) -> dict[str, torch.Tensor]:
    net = network(dtype)
    with TorchBench() as bench:
        optimizer = Optimizer(net, bench.job, fe.SGD(0.05), **more)
        called = compiled(net)
        for batch in range(STEPS):
            bench.job.begin(batch, 32)
            loop(called, optimizer, batch)
            bench.job.end()
    return {name: value.detach().float().cpu() for name, value in net.named_parameters()}


@pytest.mark.parametrize("more", [{}, {"overlap_backward": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("loop", [plain, mixed, on_a_stream, delayed], ids=lambda loop: loop.__name__)
def test_steps_equal_those_of_torch(loop: Loop, more: dict[str, Any]) -> None:
    expected = by_torch(loop, torch.float32)
    for name, values in by_job(loop, torch.float32, **more).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_bfloat16_parameters_are_trained() -> None:
    expected = by_torch(plain, torch.bfloat16)
    for name, values in by_job(plain, torch.bfloat16).items():
        torch.testing.assert_close(values, expected[name], rtol=5e-2, atol=5e-2, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise the compiler leaves a pool of processes and a thread that watches its progress bars.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    expected = by_torch(plain, torch.float32)
    for name, values in by_job(plain, torch.float32, torch.compile).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_captured_graph_sees_the_new_values() -> None:
    net = network()
    x, label = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    with TorchBench() as bench:
        optimizer = Optimizer(net, bench.job, fe.SGD(0.05))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                functional.cross_entropy(net(x), label).backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = functional.cross_entropy(net(x), label)
            loss.backward()
        losses = []
        for batch in range(STEPS):
            bench.job.begin(batch, 32)
            graph.replay()
            optimizer.step()
            bench.job.end()
            losses.append(float(loss.detach()))
    assert sorted(losses, reverse=True) == losses
    assert losses[-1] < 0.9 * losses[0]


def test_a_gradient_may_be_overwritten_right_after_the_step() -> None:
    net = nn.Linear(4096, 4096, bias=False, device="cuda")
    nn.init.zeros_(net.weight)
    with TorchBench() as bench:
        optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
        for batch in range(5):
            bench.job.begin(batch)
            net.weight.grad = torch.full_like(net.weight, float(batch + 1))
            torch.cuda._sleep(LONG)
            net.weight.grad.mul_(2)
            optimizer.step()
            net.weight.grad.fill_(1e9)
            bench.job.end()
    assert torch.equal(net.weight.detach(), torch.full_like(net.weight, -30.0))


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_the_gpu_may_be_the_default_device() -> None:
    expected = by_torch(plain, torch.float32)
    for name, values in by_job(plain, torch.float32).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("offsets", [[1], [0, 3], [-1, 1]])
def test_invalid_offsets_are_rejected(offsets: list[int]) -> None:
    with TorchBench() as bench:
        net = EmbeddingBag(bench.job.table("users", 4, optimizer=fe.SGD(0.1))).to("cuda")
        Optimizer(net, bench.job, fe.SGD(0.1))
        bench.job.begin(0)
        with pytest.raises(UsageError, match="the bags of table 'users' are invalid: offsets must begin with 0"):
            net(torch.tensor([1, 2], device="cuda"), torch.tensor(offsets, device="cuda"))
