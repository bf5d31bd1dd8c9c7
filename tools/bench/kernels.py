"""``flightedl bench kernels``: the optimizers' loops against torch's fused ones, one thread each, taking turns."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer
from flightedl.domain.model.sharding import BLOCK_BYTES
from flightedl.errors import UsageError
from flightedl.kernels.compiled import kernel_for

from ..options import Number

#: name -> ours, and (class in torch.optim, its settings).
RULES: dict[str, tuple[Optimizer, str, dict[str, Any]]] = {
    "SGD": (SGD(lr=0.01), "SGD", {"lr": 0.01}),
    "Momentum": (Momentum(lr=0.01, momentum=0.9), "SGD", {"lr": 0.01, "momentum": 0.9}),
    "Adagrad": (Adagrad(lr=0.01), "Adagrad", {"lr": 0.01}),
    "Adam": (Adam(lr=0.001), "Adam", {"lr": 0.001}),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one update; ``ratio`` is ours by torch's, the median of neighbouring runs: below 1 is faster."""

    rule: str
    flightedl_ms: float
    torch_ms: float | None
    ratio: float | None


def ours(rule: Optimizer, gradient: np.ndarray[Any, np.dtype[np.float32]]) -> Callable[[], None]:
    """One update of all elements, block by block as a pserver does it."""
    values = np.zeros(gradient.size, np.float32)
    slots = [np.full(gradient.size, slot.initial, np.float32) for slot in rule.slots]
    update = kernel_for(rule, "float32")
    count = BLOCK_BYTES // 4
    version = 0

    def run() -> None:
        nonlocal version
        for start in range(0, gradient.size, count):
            part = slice(start, start + count)
            update(values[part], gradient[part], [slot[part] for slot in slots], version)
        version += 1

    return run


def theirs(kind: str, settings: dict[str, Any], gradient: np.ndarray[Any, np.dtype[np.float32]]) -> Callable[[], None]:
    """One fused step of torch's."""
    import torch  # type: ignore[import-not-found,unused-ignore] # only this bench needs it

    torch.set_num_threads(1)
    values = torch.zeros(gradient.size, requires_grad=True)
    values.grad = torch.from_numpy(gradient)
    optimizer = getattr(torch.optim, kind)([values], fused=True, **settings)
    step: Callable[[], None] = optimizer.step
    return step


def timing(rule: str, gradient: np.ndarray[Any, np.dtype[np.float32]], turns: int, *, has_torch: bool) -> Timing:
    """Both in turns."""
    optimizer, kind, settings = RULES[rule]
    sides = [ours(optimizer, gradient)]
    if has_torch:
        sides.append(theirs(kind, settings, gradient))
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(turns + 2):
        for side, found in zip(sides, seconds, strict=True):
            begun = time.perf_counter()
            side()
            if turn >= 2:
                found.append(time.perf_counter() - begun)
    medians = [statistics.median(found) * 1e3 for found in seconds]
    if not has_torch:
        return Timing(rule, medians[0], None, None)
    return Timing(rule, medians[0], medians[1], statistics.median(a / b for a, b in zip(*seconds, strict=True)))


@click.command()
@click.option("--mb", type=Number(min=1), default=64.0, show_default=True, help="MiB of float32.")
@click.option("--turns", type=click.IntRange(min=1), default=31, show_default=True, help="Updates of each side.")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def kernels(*, mb: float, turns: int, wants_json: bool) -> None:
    """The optimizers' loops against torch's fused ones.

    One thread each, in turns. Without PyTorch only our own times are printed.
    """
    try:
        import torch  # noqa: F401 - only whether it is there
    except ImportError:
        has_torch = False
    else:
        has_torch = True
    count = round(mb * (1 << 20) / 4)
    if count < 1:
        raise UsageError(f"--mb is {mb}, too little")
    gradient = np.random.default_rng(0).standard_normal(count, np.float32)
    found = [timing(rule, gradient, turns, has_torch=has_torch) for rule in RULES]
    if wants_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    table = Table(title=f"one update of {mb:g} MB, one thread, medians")
    for name in ("optimizer", "flightedl ms", "torch fused ms", "ratio"):
        table.add_column(name, justify="left" if name == "optimizer" else "right")
    for one in found:
        rest = ("not installed", "") if one.torch_ms is None else (f"{one.torch_ms:.2f}", f"{one.ratio:.2f}")
        table.add_row(one.rule, f"{one.flightedl_ms:.2f}", *rest)
    Console(highlight=False).print(table)
