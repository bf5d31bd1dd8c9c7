"""A rank whose model counts in its weights how often each record was used in each epoch.

Run as a script by torchrun or ``flightedl run --nproc-per-node``: DATA OUTPUT [name=value ...].
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flightedl as fe

RECORDS = 600


class Counts:
    """Model with one weight per record and epoch. A step adds one to the weights of its records."""

    def __init__(self, kind: str, epochs: int) -> None:
        self.size = dist.get_world_size()
        self.net: Any = torch.nn.Linear(epochs * RECORDS, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        if kind == "fsdp":
            # Imported only if needed, because this takes as long as to import PyTorch.
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=init_device_mesh("cpu", (self.size,), mesh_dim_names=("dp",)))
        self.weight = self.net.weight
        self.trained = DistributedDataParallel(self.net) if kind == "ddp" else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)

    def step(self, epoch: int, ids: list[int]) -> None:
        self.optimizer.zero_grad()
        numbers = torch.tensor(ids, dtype=torch.int64) + epoch * RECORDS
        features = torch.nn.functional.one_hot(numbers, self.net.in_features).float()
        # DDP and FSDP average gradients over ranks.
        (-self.trained(features).sum() * self.size).backward()
        self.optimizer.step()


class WholeFile:
    """A checkpoint that rank 0 writes and all ranks read."""

    def __init__(self, output: Path, counts: Counts, data: Any) -> None:
        self._path, self._counts, self._data = output / "model.pt", counts, data

    def load(self) -> None:
        if self._path.exists():
            state = torch.load(self._path)
            self._counts.net.load_state_dict(state["net"])
            self._data.load_state_dict(state["data"])

    def save(self) -> None:
        if dist.get_rank() == 0:
            new = self._path.with_name("new.pt")
            torch.save({"net": self._counts.net.state_dict(), "data": self._data.state_dict()}, new)
            new.replace(self._path)

    def finish(self) -> None:
        self.save()
        # All ranks wait until the last save is complete.
        dist.barrier()


class Distributed:
    """Checkpoints to which each rank writes a part. The file ``last`` names the newest complete checkpoint."""

    def __init__(self, output: Path, counts: Counts, data: Any) -> None:
        self._output, self._counts, self._data = output, counts, data
        self._state = {"net": counts.net, "data": data}

    def load(self) -> None:
        if (last := self._output / "last").exists():
            import torch.distributed.checkpoint as dcp

            dcp.load(self._state, checkpoint_id=self._output / last.read_text())

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        # All ranks have the same position, which is always later than that of the newest complete checkpoint.
        name = f"at-{self._counts.size}-{zlib.crc32(repr(self._data.state_dict()).encode())}"
        dcp.save(self._state, checkpoint_id=self._output / name)
        dist.barrier()
        if dist.get_rank() == 0:
            new = self._output / "new"
            new.write_text(name)
            new.replace(self._output / "last")

    def finish(self) -> None:
        self.save()
        weights = self._counts.weight.full_tensor()
        if dist.get_rank() == 0:
            torch.save({"net": {"weight": weights}}, self._output / "model.pt")
        dist.barrier()


def main(
    path: str,
    output: Path,
    *,
    kind: str = "ddp",
    epochs: int = 2,
    pause: float = 0.0,
    batch: int = 10,
    poison: int = -1,
    dies_saving: int = 0,
) -> None:
    """Train to the end of the data.

    Args:
        path: File of records with a column ``id`` of numbers below ``RECORDS``.
        output: Directory of the checkpoints; at the end ``model.pt`` has the weights.
        kind: "ddp" or "fsdp".
        epochs: Passes over the data.
        pause: Duration of a step in seconds.
        batch: Number of records per batch.
        poison: Record that kills its rank in the first epoch.
        dies_saving: During its first final save, rank 0 kills itself (1) or the master that it has started (2).
    """
    _join_group()
    counts = Counts(kind, epochs)
    with fe.connect() as job:
        data = job.dataset(
            path, batch_size=batch, epochs=epochs, shuffle=True, seed=7, group="auto", on_lost="continue"
        )
        checkpoint = (Distributed if kind == "fsdp" else WholeFile)(output, counts, data)
        checkpoint.load()
        for step, records in enumerate(data, 1):
            ids = records["id"].to_pylist()
            if poison in ids and data.epoch == 0:
                os.kill(os.getpid(), signal.SIGSEGV)
            counts.step(data.epoch, ids)
            time.sleep(pause)
            if step % 5 == 0:
                checkpoint.save()
        if dies_saving and dist.get_rank() == 0 and not (output / "died").exists():
            (output / "died").touch()
            os.kill(os.getpid() if dies_saving == 1 else masters_below(os.getpid())[0].pid, signal.SIGKILL)
        checkpoint.finish()


def masters_below(pid: int) -> list[psutil.Process]:
    """Return the masters without etcd that processes below this one have started."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "flightedl.launch.group_master" in each.cmdline():
                found.append(each)
    return found


def _join_group() -> None:
    """Join the process group of this start of the ranks.

    torchrun's agent keeps one store over restarts, in which gloo (PyTorch 2.13) may find the address of a rank that has
    ended. A separate prefix for each start prevents this.
    """
    names = os.environ
    if names.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo")
        return
    store = dist.TCPStore(names["MASTER_ADDR"], int(names["MASTER_PORT"]), is_master=False)
    prefixed = dist.PrefixStore(f"start-{names['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=prefixed, rank=int(names["RANK"]), world_size=int(names["WORLD_SIZE"]))


if __name__ == "__main__":
    given: dict[str, Any] = dict(each.split("=") for each in sys.argv[3:])
    kinds: dict[str, Any] = {"kind": str, "pause": float}
    main(sys.argv[1], Path(sys.argv[2]), **{name: kinds.get(name, int)(value) for name, value in given.items()})
