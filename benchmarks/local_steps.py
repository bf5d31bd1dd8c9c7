"""Local steps against a push after each batch: steps a second, bytes a step, and the loss that the model reaches.

Two trainers train a network with 0.6 M weights on scikit-learn's digits, by an inner AdamW and the outer Nesterov
momentum of DiLoCo (arXiv 2311.08105). The first row is ``fe.torch.Optimizer`` with AdamW on the servers.

    python -m benchmarks.local_steps [EPOCHS] [TURNS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.config import child_environment
from flightedl.errors import JobFailedError
from flightedl_tools.bench.sides import print_table

_EVERY = (1, 5, 25)
_BATCH_SIZE, _TRAINED = 16, 1600


def run(directory: Path, every: int, epochs: int) -> dict[str, float]:
    """Run a job. ``every`` is 0 for ``fe.torch.Optimizer``. Return the figures of its first trainer."""
    output = Path(tempfile.mkdtemp(dir=directory))
    given = ["run", "--output", f"{output}-run", "benchmarks.local_steps", "--trainers", "2", "--pservers", "1", "--"]
    command = [sys.executable, "-m", "flightedl", *given, "train", str(directory), str(output), str(every), str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        raise JobFailedError(
            f"flightedl run ended with code {done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}"
        )
    found: dict[str, float] = json.loads(next(output.iterdir()).read_text())
    return found


def train(directory: str, output: str, every: str, epochs: str) -> None:
    """Train, and write steps a second, bytes that this trainer exchanged for a step, and the accuracy."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
    local = int(every)
    with fe.connect(same_host="never") as job:
        optimizer: Any
        if local:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
            rule = fe.Momentum(lr=0.7, momentum=0.9, nesterov=True)
            exchange = fe.torch.DiLoCo(net, job, optimizer, every=local, outer=rule)
        else:
            optimizer = fe.torch.Optimizer(net, job, fe.AdamW(lr=1e-3))
        data = job.dataset(f"{directory}/digits.parquet", batch_size=_BATCH_SIZE, epochs=int(epochs), shuffle=True)
        steps, began = 0, 0.0
        for pixels, labels in fe.torch.batches(data, "pixels", "label"):
            began = began or time.perf_counter()
            optimizer.zero_grad()
            functional.cross_entropy(net(pixels), labels).backward()
            optimizer.step()
            if local:
                exchange.step()
            steps += 1
        took = time.perf_counter() - began
        held_out = np.load(f"{directory}/held_out.npz")
        with torch.no_grad():
            right = net(torch.from_numpy(held_out["pixels"])).argmax(1).numpy() == held_out["labels"]
        # A gradient or difference is sent and new values are received.
        exchanged = 2 * 4 * sum(parameter.numel() for parameter in net.parameters()) / (local or 1)
        found = {"steps_per_s": steps / took, "bytes": exchanged, "accuracy": float(right.mean())}
        (Path(output) / f"{job.trainer}.json").write_text(json.dumps(found))


def write_digits(directory: Path) -> None:
    """Write the training data in row groups of 400 records, and the data for measuring."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    column = pa.FixedSizeListArray.from_arrays(pa.array(pixels[:_TRAINED].ravel()), 64)
    table = pa.table({"pixels": column, "label": labels[:_TRAINED]})
    pq.write_table(table, directory / "digits.parquet", row_group_size=400)
    np.savez(directory / "held_out.npz", pixels=pixels[_TRAINED:], labels=labels[_TRAINED:])


def main(epochs: str = "20", turns: str = "3") -> None:
    """Measure, and print a row for each number of local steps."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as name:
        write_digits(Path(name))
        for every in (0, *_EVERY):
            found = [run(Path(name), every, int(epochs)) for _ in range(int(turns))]
            middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
            label = f"{every} local steps" if every else "fe.torch.Optimizer"
            rows.append(
                (label, f"{middle['steps_per_s']:.0f}", f"{middle['bytes'] / 1e6:.2f}", f"{middle['accuracy']:.3f}")
            )
    print_table("two trainers, 0.6 M weights", ("", "steps a second", "MB a step", "accuracy"), rows)


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["train"] else main(*sys.argv[1:])
