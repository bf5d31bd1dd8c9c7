"""Local steps against an exchange after each batch: loss for equal records, steps a second, and bytes a token.

Two trainers train a small GPT on the bytes of Python's standard library, by an inner AdamW and two outer optimizers:
the Nesterov momentum of DiLoCo (arXiv 2311.08105), and the mean of the trainers' values. The first row is
``fe.torch.Optimizer`` with AdamW on the servers, which does the same as DDP.

    python -m benchmarks.local_steps [RECORDS] [LOCAL_STEPS...]
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from benchmarks.start import run_command
from flightedl.config import child_environment
from flightedl_tools.bench.sides import print_table

#: Number of tokens (bytes of text) in a record that the model reads. A record has one more, which is only predicted.
_CONTEXT = 64
_BATCH_SIZE, _WIDTH, _LAYERS, _HELD_OUT = 16, 128, 4, 512
_OUTER = {
    "mean": fe.SGD(lr=1.0),
    "Nesterov momentum": fe.Momentum(lr=0.7, momentum=0.9, nesterov=True),
}


def run(directory: Path, every: int, outer: str) -> dict[str, float]:
    """Run a job. ``every`` is 0 for ``fe.torch.Optimizer``. Return the figures of its first trainer."""
    output = Path(tempfile.mkdtemp(dir=directory))
    given = ["run", "--output", f"{output}-run", "benchmarks.local_steps", "--trainers", "2", "--pservers", "1", "--"]
    run_command([*given, "train", str(directory), str(output), str(every), outer], child_environment())
    found: dict[str, float] = json.loads(min(output.iterdir()).read_text())
    return found


def gpt() -> Any:
    """Return the modules of a GPT of about 0.9 M weights that predicts bytes; see ``predicted``."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, 0.0, batch_first=True, norm_first=True)
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(256, _WIDTH),
            "places": nn.Embedding(_CONTEXT, _WIDTH),
            "layers": nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False),
            "norm": nn.LayerNorm(_WIDTH),
            "head": nn.Linear(_WIDTH, 256),
        }
    )


def predicted(net: Any, tokens: Any) -> Any:
    """Return a (records, tokens, 256) tensor of logits for the token after each of (records, tokens)."""
    import torch

    count = tokens.shape[1]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(count)
    values = net["tokens"](tokens) + net["places"](torch.arange(count))
    return net["head"](net["norm"](net["layers"](values, mask=mask, is_causal=True)))


def train(directory: str, output: str, every: str, outer: str) -> None:
    """Train. Write the loss on held-out text, the steps per second, and the share of time that local steps add."""
    import torch
    from torch.nn import functional

    net, local = gpt(), int(every)

    def loss_of(tokens: Any) -> Any:
        known = tokens.long()
        return functional.cross_entropy(predicted(net, known[:, :-1]).flatten(0, 1), known[:, 1:].flatten())

    with fe.connect(same_host="never") as job:
        optimizer: Any
        if local:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
            exchange = fe.torch.DiLoCo(net, job, optimizer, every=local, outer=_OUTER[outer])
        else:
            optimizer = fe.torch.Optimizer(net, job, fe.AdamW(lr=1e-3, weight_decay=0.01))
        per_task = pq.ParquetFile(f"{directory}/text.parquet").metadata.row_group(0).num_rows
        data = job.dataset(f"{directory}/text.parquet", batch_size=_BATCH_SIZE, records_per_task=per_task)
        steps, began, extra_s = 0, 0.0, 0.0
        for tokens in fe.torch.batches(data, "tokens"):
            began = began or time.perf_counter()
            optimizer.zero_grad()
            loss_of(tokens).backward()
            optimizer.step()
            steps += 1
            before = time.perf_counter()
            if local and not exchange.step():
                extra_s += time.perf_counter() - before
        took = time.perf_counter() - began
        held_out = torch.from_numpy(np.load(f"{directory}/held_out.npy"))
        with torch.no_grad():
            loss = float(loss_of(held_out))
        found = {"loss": loss, "steps_per_s": steps / took, "extra": extra_s / took}
        (Path(output) / f"{job.trainer}.json").write_text(json.dumps(found))


def write_text(directory: Path, count: int) -> None:
    """Write records of text from the standard library in random order, and other records for measuring."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    starts = np.random.default_rng(0).permutation(len(text) // _CONTEXT - 1)[: count + _HELD_OUT] * _CONTEXT
    if len(starts) < count + _HELD_OUT:
        raise fe.errors.UsageError(f"the standard library has only {len(starts) - _HELD_OUT} records")
    records = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(_CONTEXT + 1)]
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(records[:count].ravel()), _CONTEXT + 1)
    pq.write_table(pa.table({"tokens": tokens}), directory / "text.parquet", row_group_size=count // 4)
    np.save(directory / "held_out.npy", records[count:])


def main(records: str = "48000", *every: str) -> None:
    """Measure, and print a row for each number of local steps."""
    rows = []
    weights = sum(parameter.numel() for parameter in gpt().parameters())
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as name:
        write_text(Path(name), int(records))
        first = math.nan
        for count, outer in [(0, ""), *itertools.product(map(int, every or ("10", "50", "375")), _OUTER)]:
            found = run(Path(name), count, outer)
            first = found["loss"] if math.isnan(first) else first
            # A gradient or difference is sent, and new values are received.
            exchanged = 2 * 4 * weights / (max(count, 1) * _BATCH_SIZE * _CONTEXT)
            rows.append(
                (
                    f"{count} local steps, {outer}" if count else "fe.torch.Optimizer",
                    f"{found['loss']:.3f} ({found['loss'] / first - 1:+.1%})",
                    f"{found['steps_per_s']:.1f}",
                    f"{exchanged:,.0f}" if exchanged >= 100 else f"{exchanged:.1f}",
                    f"{found['extra']:.2%}" if count > 1 else "",
                )
            )
    title = f"a GPT of {weights / 1e6:.1f} M weights, two trainers, {int(records):,} records of {_CONTEXT} tokens"
    print_table(title, ("", "loss on other text", "steps a second", "bytes a token", "cost of local steps"), rows)


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["train"] else main(*sys.argv[1:])
