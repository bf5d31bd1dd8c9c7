"""A rank whose model counts in its weights how often each record was used in each epoch.

Run as a script by torchrun or ``flightedl run --nproc-per-node``: DATA OUTPUT [name=value ...].
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import flightedl as fe

RECORDS, EPOCHS = 600, 2


def main(
    path: str, output: Path, *, pause: float = 0.0, batch: float = 10, poison: float = -1, dies_saving: float = 0
) -> None:
    """Train to the end of the data.

    Args:
        path: The records: a column ``id`` of numbers below ``RECORDS``.
        output: Directory of the checkpoint, ``model.pt``.
        pause: Seconds of a step.
        batch: Records of a batch.
        poison: A record that kills its rank in the first epoch.
        dies_saving: 1: rank 0 kills itself in its first last save.
    """
    _join_group()
    rank, saved = dist.get_rank(), output / "model.pt"
    counts = torch.zeros(EPOCHS, RECORDS)

    def save() -> None:
        if rank == 0:
            torch.save({"counts": counts, "data": data.state_dict()}, output / "new.pt")
            (output / "new.pt").replace(saved)

    with fe.connect() as job:
        data = job.dataset(path, batch_size=int(batch), epochs=EPOCHS, shuffle=True, seed=7, group="auto")
        if saved.exists():
            state = torch.load(saved)
            counts.copy_(state["counts"])
            data.load_state_dict(state["data"])
        for step, records in enumerate(data, 1):
            ids = records["id"].to_numpy()
            if poison in ids and data.epoch == 0:
                os.kill(os.getpid(), signal.SIGSEGV)
            gradient = torch.zeros(EPOCHS, RECORDS)
            gradient[data.epoch, ids.tolist()] += 1
            dist.all_reduce(gradient)
            counts += gradient
            time.sleep(pause)
            if step % 5 == 0:
                save()
        if dies_saving and rank == 0 and not (output / "died").exists():
            (output / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        save()
        # Nobody leaves before the last save is there.
        dist.barrier()


def _join_group() -> None:
    """Join the process group of this start of the ranks.

    The agent of torchrun keeps one store over restarts, where gloo of PyTorch 2.13 may find the address of a rank that
    has ended. With a prefix for each start it finds none.
    """
    names = os.environ
    if names.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo")
        return
    store = dist.TCPStore(names["MASTER_ADDR"], int(names["MASTER_PORT"]), is_master=False)
    prefixed = dist.PrefixStore(f"start-{names['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=prefixed, rank=int(names["RANK"]), world_size=int(names["WORLD_SIZE"]))


if __name__ == "__main__":
    given = dict(each.split("=") for each in sys.argv[3:])
    main(sys.argv[1], Path(sys.argv[2]), **{name: float(value) for name, value in given.items()})
