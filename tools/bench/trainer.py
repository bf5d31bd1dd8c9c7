"""A trainer of the benches: the user's loop, with steps of the size asked for.

A step's time is that of a whole turn of the loop: batch handed out, pushed, pulled, closed. Gradients lie in a
trainer's own memory, as a model's do; where they would not fit, all trainers of a bench map one file of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import flightedl as fe
from flightedl.domain.consistency.modes import Mode

from .bare import OPTIMIZERS
from .orders import next_order, ready, report


def main(options: dict[str, Any]) -> None:
    """Train as ordered."""
    shapes: list[int] = options["shapes"]
    line: np.ndarray[Any, np.dtype[np.float32]] = np.memmap(options["gradients"], np.float32, "r")
    if options["own_gradients"]:
        line = np.array(line)
    gradients = {f"p{i}": part for i, part in enumerate(np.split(line, np.cumsum(shapes)[:-1]))}
    with fe.connect() as job:
        data = job.dataset(options["data"], batch_size=1, epochs=None)
        model = job.parameters(
            {name: np.zeros(gradient.shape, np.float32) for name, gradient in gradients.items()},
            optimizer=OPTIMIZERS[options["optimizer"]],
            mode=Mode.from_json(options["mode"]),
            **options["more"],
        )
        if options["lends"]:
            model.lend_to(lambda _name, _start, _values: None)
        ready()
        # Each order is a loop of its own. One who stayed in its loop would be a member of synchronous rounds between
        # two orders, and another that still has a step to do, as it joined later, would wait for it.
        while count := next_order()[0]:
            seconds, cpu_s = run_steps(data, partial(model.step, gradients), count)
            report(seconds, cpu_s)


def run_steps(data: fe.Dataset, step: Callable[[], object], count: int) -> tuple[list[float], float]:
    """Seconds of each of so many turns of the loop, and processor time of them all; then the loop is left."""
    seconds: list[float] = []
    begun, cpu_s = 0.0, time.process_time()
    for _ in data:
        now = time.perf_counter()
        if begun:
            seconds.append(now - begun)
        else:
            cpu_s = time.process_time()
        if len(seconds) == count:
            break
        begun = now
        step()
    cpu_s = time.process_time() - cpu_s
    data.close()
    return seconds, cpu_s


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
