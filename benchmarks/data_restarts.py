"""Records that a restart within an epoch loses or repeats: flightedl's groups, torchdata and MosaicML streaming.

Some ranks train ten steps of an epoch and save. The same or another number of ranks loads that and trains the rest.
Each rank of torchdata's StatefulDataLoader loads its own state, or that of rank 0 if it has none. All ranks of MosaicML
streaming load the state of rank 0. The script counts the records that the model never gets, and those that it gets
more than once.

    pip install torchdata; python -m benchmarks.data_restarts flightedl torchdata

MosaicML streaming needs an older NumPy than flightedl, and therefore an environment of its own:

    python -m venv other; other/bin/pip install mosaicml-streaming
    other/bin/python benchmarks/data_restarts.py mosaicml
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

RECORDS = 1009
STEPS = 10


#: (number of ranks, batch size) of each start.
Starts = list[tuple[int, int]]


def of_flightedl(starts: Starts) -> Counter[int]:
    """Return how often the model gets each record that it gets."""
    from flightedl.domain.groups.lanes import EpochOrder, GroupData
    from flightedl.domain.groups.plan import BEGINNING, Round, RoundPlan
    from flightedl.domain.groups.shuffling import Shuffling, order_of

    sizes = np.full(-(-RECORDS // 20), 20, np.int64)
    sizes[-1] = RECORDS - sizes[:-1].sum()
    firsts = np.cumsum(sizes) - sizes
    data = GroupData(sizes, sizes, np.zeros(len(sizes), np.int64), seed=0)
    found: Counter[int] = Counter()
    position = BEGINNING
    for number, (ranks, batch_size) in enumerate(starts):
        batch = ranks * batch_size
        order, count = order_of(data, batch, Shuffling()), data.record_count
        plans = [
            RoundPlan(count, epochs=1, order=order, world_size=ranks, rank=rank, batch_size=batch, start=position)
            for rank in range(ranks)
        ]
        for plan in plans:
            steps = 0
            while isinstance(step := plan.next(), Round):
                for piece in step.pieces:
                    for chunk, numbers in EpochOrder(data, step.epoch, step.order).chunk_records(piece):
                        found.update((firsts[chunk] + numbers).tolist())
                steps += 1
                if number < len(starts) - 1 and steps == STEPS:
                    break
        position = plans[0].position()
    return found


def of_torchdata(starts: Starts) -> Counter[int]:
    """Return how often the model gets each record that it gets."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    found: Counter[int] = Counter()
    states: list[dict[str, Any]] = []
    for number, (ranks, batch_size) in enumerate(starts):
        saved = []
        for rank in range(ranks):
            sampler = StatefulDistributedSampler(range(RECORDS), num_replicas=ranks, rank=rank, shuffle=True, seed=0)
            loader = StatefulDataLoader(range(RECORDS), batch_size=batch_size, sampler=sampler)
            if states:
                loader.load_state_dict(states[rank] if rank < len(states) else states[0])
            for step, batch in enumerate(loader, 1):
                found.update(batch.tolist())
                if number < len(starts) - 1 and step == STEPS:
                    break
            saved.append(loader.state_dict())
        states = saved
    return found


def of_mosaicml(starts: Starts) -> Counter[int]:
    """Return how often the model gets each record that it gets. Ranks are processes."""
    from streaming import MDSWriter

    found: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        with MDSWriter(out=f"{directory}/data", columns={"id": "int"}, size_limit=2000) as writer:
            for number in range(RECORDS):
                writer.write({"id": number})
        for number, (ranks, batch_size) in enumerate(starts):
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            steps = STEPS if number < len(starts) - 1 else 0
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", directory, str(batch_size), str(steps)],
                    env=os.environ | {k: str(v) for k, v in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(ranks)
            ]
            for process in processes:
                found.update(map(int, process.communicate()[0].split()))
                if process.returncode:
                    raise RuntimeError(f"a rank has ended with exit code {process.returncode}")
    return found


def mosaicml_rank(directory: str, batch_size: int, steps: int) -> None:
    """Train some steps, or the rest of the epoch if ``steps`` is 0, and print the records."""
    import torch.distributed as dist
    from streaming import StreamingDataLoader, StreamingDataset

    dist.init_process_group("gloo")
    dataset = StreamingDataset(local=f"{directory}/data", shuffle=True, shuffle_seed=0, batch_size=batch_size)
    loader = StreamingDataLoader(dataset, batch_size=batch_size)
    state = Path(directory, "state.json")
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    for step, batch in enumerate(loader, 1):
        print(*batch["id"].tolist(), flush=True)
        if step == steps:
            break
    saved = loader.state_dict()
    dist.barrier()
    if dist.get_rank() == 0:
        state.write_text(json.dumps(saved))
    dist.barrier()


LIBRARIES = {"flightedl": of_flightedl, "torchdata": of_torchdata, "mosaicml": of_mosaicml}


def main(names: list[str]) -> None:
    """Print what each library loses and repeats."""
    for starts in ([(4, 8), (4, 8)], [(4, 8), (2, 8)], [(4, 8), (2, 16)], [(2, 8), (3, 8)]):
        (ranks, size), (then, then_size) = starts
        print(f"{ranks} x {size} -> {then} x {then_size}", end="")
        for name in names:
            found = LIBRARIES[name](starts)
            lost = RECORDS - len(found)
            print(f"  {name}: {lost} lost, {sum(found.values()) - len(found)} repeated", end="", flush=True)
        print()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        mosaicml_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(sys.argv[1:] or ["flightedl", "torchdata"])
