"""The optimizers' loops against torch's fused ones, one thread each, taking turns.

python -m benchmarks.kernels [MB]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer
from flightedl.domain.model.sharding import BLOCK_BYTES
from flightedl.kernels.compiled import kernel_for
from flightedl_tools.bench.sides import print_table, ratio

TURNS = 31
#: Name -> ours, and (class in torch.optim, its settings).
RULES: dict[str, tuple[Optimizer, str, dict[str, Any]]] = {
    "SGD": (SGD(lr=0.01), "SGD", {"lr": 0.01}),
    "Momentum": (Momentum(lr=0.01, momentum=0.9), "SGD", {"lr": 0.01, "momentum": 0.9}),
    "Adagrad": (Adagrad(lr=0.01), "Adagrad", {"lr": 0.01}),
    "Adam": (Adam(lr=0.001), "Adam", {"lr": 0.001}),
}


def ours(rule: Optimizer, gradient: Any) -> Callable[[], None]:
    """Return one update of all elements, block by block as a pserver does it."""
    values = np.zeros(gradient.size, np.float32)
    slots = [np.full(gradient.size, slot.initial, np.float32) for slot in rule.slots]
    update = kernel_for(rule, "float32")
    version = 0

    def run() -> None:
        nonlocal version
        for start in range(0, gradient.size, BLOCK_BYTES // 4):
            part = slice(start, start + BLOCK_BYTES // 4)
            update(values[part], gradient[part], [slot[part] for slot in slots], version, version)
        version += 1

    return run


def theirs(kind: str, settings: dict[str, Any], gradient: Any) -> Callable[[], None]:
    """Return one fused step of torch's."""
    values = torch.zeros(gradient.size, requires_grad=True)
    values.grad = torch.from_numpy(gradient)
    return getattr(torch.optim, kind)([values], fused=True, **settings).step


def main(mb: float = 64.0) -> None:
    """Measure all rules."""
    torch.set_num_threads(1)
    gradient = np.random.default_rng(0).standard_normal(int(mb * (1 << 20) / 4), np.float32)
    rows = []
    for rule, (optimizer, kind, settings) in RULES.items():
        sides = [ours(optimizer, gradient), theirs(kind, settings, gradient)]
        seconds: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for side, found in zip(sides, seconds, strict=True):
                begun = time.perf_counter()
                side()
                found.append(time.perf_counter() - begun)
        warm = [found[2:] for found in seconds]
        rows.append((rule, *(f"{statistics.median(each) * 1e3:.2f}" for each in warm), f"{ratio(*warm):.2f}"))
    print_table(f"one update of {mb:g} MiB, medians", ("optimizer", "flightedl ms", "torch fused ms", "ratio"), rows)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
