"""Detection of code that requests batches ahead of the step."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flightedl as fe
from flightedl.errors import UsageError
from flightedl.torch import IterableDataset, Optimizer, batches
from flightedl.torch.ahead import Seen

from .bench import TorchBench
from .page import JobOfOne, OneByOne


def data_of(job: JobOfOne, count: int = 4) -> OneByOne:
    return OneByOne(job, [pa.record_batch({"x": [float(n)], "y": [0.0]}) for n in range(count)], 1)


@pytest.fixture
def job() -> Iterator[JobOfOne]:
    with TorchBench() as bench:
        yield JobOfOne(bench)


def one_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """Prefetch one batch, as many wrappers do."""
    source = iter(loader)
    current = next(source)
    for following in source:
        yield current
        current = following
    yield current


def two_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    kept: deque[Any] = deque()
    for each in loader:
        kept.append(each)
        if len(kept) > 2:
            yield kept.popleft()
    yield from kept


def in_a_thread(loader: Iterable[Any]) -> Iterator[Any]:
    items: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        try:
            for each in loader:
                items.put(each)
        except UsageError as error:
            items.put(error)
        items.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while (each := items.get()) is not None and not isinstance(each, UsageError):
            yield each
    finally:
        thread.join()


def train(job: JobOfOne, loop: Iterable[Any]) -> list[float]:
    net = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = Optimizer(net, job, fe.SGD(0.1))
    job.bias_at_first = net.bias.item()
    seen = []
    for x, y in loop:
        optimizer.zero_grad()
        functional.mse_loss(net(x.reshape(-1, 1)), y.reshape(-1, 1)).backward()
        optimizer.step()
        seen.append(x.item())
    return seen


@pytest.mark.parametrize("wrapper", [one_ahead, two_ahead])
def test_a_wrapper_that_prefetches_is_detected_at_its_first_step(wrapper: Any, job: JobOfOne) -> None:
    with pytest.raises(
        UsageError, match=r"epoch 1, task 0, batch \d was handed out and had no gradient, .*keep only clones"
    ):
        train(job, wrapper(batches(data_of(job), "x", "y")))
    assert job.trainer.parameters["bias"] == job.bias_at_first, "no gradient was pushed"


def test_a_list_of_batches_is_detected_as_prefetching(job: JobOfOne) -> None:
    with pytest.raises(UsageError, match=r"no current batch: .* before the next batch is requested"):
        train(job, list(batches(data_of(job), "x", "y")))


def test_a_loader_that_reads_in_a_thread_is_detected(job: JobOfOne) -> None:
    with pytest.raises(UsageError, match=r"batches are requested by another thread than the one that trains"):
        train(job, in_a_thread(batches(data_of(job), "x", "y")))


@pytest.mark.parametrize(
    "wrapper", [enumerate, lambda loop: zip(loop, range(9), strict=False), iter], ids=["enumerate", "zip", "iter"]
)
def test_wrappers_that_request_one_batch_at_a_time_work(wrapper: Any, job: JobOfOne) -> None:
    loader = DataLoader(IterableDataset(data_of(job), "x", "y"), batch_size=None)
    pairs = (each if isinstance(each[1], torch.Tensor) else each[isinstance(each[0], int)] for each in wrapper(loader))
    assert train(job, pairs) == [0, 1, 2, 3]


def test_a_batch_may_be_skipped_after_it_was_inspected(job: JobOfOne) -> None:
    net = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = Optimizer(net, job, fe.SGD(0.1))
    for x, y in batches(data_of(job), transform=lambda b: (torch.tensor(b["x"].to_pylist()), torch.zeros(1))):
        optimizer.zero_grad()
        loss = functional.mse_loss(net(x.double().reshape(-1, 1)), y.double().reshape(-1, 1))
        if x.item() == 1:
            continue
        loss.backward()
        optimizer.step()
    assert job.trainer.parameters.versions["weight"] == 4, "one round per batch"


def test_gradients_of_steps_skipped_by_a_scaler_may_be_kept(job: JobOfOne) -> None:
    net = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = Optimizer(net, job, fe.SGD(0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    kept = []
    for x, y in batches(data_of(job), "x", "y"):
        kept.append(x[:1])
        optimizer.zero_grad()
        loss = functional.mse_loss(net(x.reshape(-1, 1)), y.reshape(-1, 1))
        scaler.scale(loss * (float("inf") if len(kept) < 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [each.item() for each in kept] == [0, 1, 2, 3]
    assert scaler.get_scale() == 1.0


def test_a_gradient_counts_as_seen_until_it_is_replaced() -> None:
    first = torch.ones(1)
    seen = Seen([first])
    assert first in seen
    first.mul_(2)
    assert first not in seen
    seen = Seen([first])
    del first
    # One of them may reuse the memory of the first one.
    assert not any(each in seen for each in [torch.ones(1) for _ in range(100)])


#: Module name -> (name of its prefetching class, advice in the error). tests/frameworks uses the real modules.
KNOWN = {
    "accelerate.data_loader": (
        """
def ask(loader):
    source = iter(loader)
    now = next(source)
    for then in source:
        yield now
        now = then
""",
        r"accelerate's prepared loaders request a batch ahead.*to accelerator.prepare",
    ),
    "lightning.pytorch.loops.fetchers": (
        """
class _PrefetchDataFetcher:
    length = None

    def ask(self, loader):
        yield from list(loader)


ask = _PrefetchDataFetcher().ask
""",
        r"Lightning requests a batch ahead.*next\(dataloader_iter\)",
    ),
}


def on_another_device(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield copies of the batches."""
    for x, y in loader:
        yield x.clone(), y.clone()


@pytest.mark.parametrize("module", KNOWN)
def test_errors_about_known_loaders_say_what_to_do(module: str, job: JobOfOne) -> None:
    source, text = KNOWN[module]
    names: dict[str, Any] = {"__name__": module}
    exec(source, names)
    with pytest.raises(UsageError, match=text):
        train(job, names["ask"](on_another_device(batches(data_of(job), "x", "y"))))
