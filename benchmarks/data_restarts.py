"""Records that a restart within an epoch loses or repeats: flightedl's groups and torchdata's StatefulDataLoader.

Some ranks train ten steps of an epoch and save. The same or another number of ranks loads that and trains the rest.
Each rank of StatefulDataLoader loads its own state, or that of rank 0 if it has none. The script counts the records
that the model never gets, and those that it gets more than once.

    pip install torchdata; python -m benchmarks.data_restarts
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from flightedl.domain.groups.plan import BEGINNING, Round, RoundPlan

RECORDS = 1009
STEPS = 10


#: (number of ranks, batch size) of each start.
Starts = list[tuple[int, int]]


def of_flightedl(starts: Starts) -> Counter[int]:
    """Return how often the model gets each record that it gets."""
    sizes = np.full(-(-RECORDS // 20), 20, np.int64)
    sizes[-1] = RECORDS - sizes[:-1].sum()
    firsts = np.cumsum(sizes) - sizes
    found: Counter[int] = Counter()
    position = BEGINNING
    for number, (ranks, batch_size) in enumerate(starts):
        plans = [
            RoundPlan(sizes, epochs=1, seed=0, world_size=ranks, rank=rank, batch_size=batch_size, start=position)
            for rank in range(ranks)
        ]
        for plan in plans:
            steps = 0
            while isinstance(step := plan.next(), Round):
                for piece in step.pieces:
                    found.update(range(firsts[piece.task] + piece.first_record, firsts[piece.task] + piece.end_record))
                steps += 1
                if number < len(starts) - 1 and steps == STEPS:
                    break
        position = plans[0].position()
    return found


def of_torchdata(starts: Starts) -> Counter[int]:
    """Return how often the model gets each record that it gets."""
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


if __name__ == "__main__":
    for starts in ([(4, 8), (4, 8)], [(4, 8), (2, 8)], [(4, 8), (2, 16)], [(2, 8), (3, 8)]):
        (ranks, size), (then, then_size) = starts
        print(f"{ranks} x {size} -> {then} x {then_size}", end="")
        for name, count in (("flightedl", of_flightedl), ("torchdata", of_torchdata)):
            found = count(starts)
            lost = RECORDS - len(found)
            print(f"  {name}: {lost} lost, {sum(found.values()) - len(found)} repeated", end="")
        print()
