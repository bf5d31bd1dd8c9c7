"""What a job costs on paper, from a few constants that ``scale`` measures. Pure; ``docs/scale.md`` explains it.

All is linear: a step of a trainer costs something by itself, something for each parameter server that it talks to, and
something for each byte. The master pays for each request, etcd for each process that has a lease, and second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flightedl.master.progress import report_every_s

#: Renewals of a lease in its time to live, see ``coordination.keeper``.
RENEWALS_PER_TTL = 6
GB = 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """How many processes a job has, and what a step moves: bytes of float32 in each direction, over all servers."""

    trainers: int
    pservers: int
    step_bytes: int

    @property
    def moved_gb(self) -> float:
        """Pushed and pulled by one trainer in a step, GB."""
        return 2 * self.step_bytes / GB

    def __str__(self) -> str:
        return f"{self.trainers} x {self.pservers}, {self.step_bytes / (1 << 20):g} MiB"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a job of some shape took; seconds of the processor."""

    shape: Shape
    #: Of one trainer, and of all parameter servers together, for one step of one trainer.
    trainer_s: float
    servers_s: float
    #: A second, of the master and of etcd.
    master_s: float
    etcd_s: float
    #: Steps a second of all trainers together, and requests to the master.
    steps_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds of the processor."""

    #: Of a trainer: for a step, for each server in it, for a GB pushed and pulled.
    step_s: float
    step_server_s: float
    trainer_gb_s: float
    #: Of a server: for a message of one trainer, for a GB of it.
    message_s: float
    server_gb_s: float
    #: Of the master: a second by itself, and for each request.
    master_s: float
    request_s: float
    #: A second, of etcd: by itself, and for each process that has a lease.
    etcd_s: float
    etcd_process_s: float

    def trainer_cpu_s(self, shape: Shape) -> float:
        """Of one trainer, for a step."""
        return self.step_s + self.step_server_s * shape.pservers + self.trainer_gb_s * shape.moved_gb

    def servers_cpu_s(self, shape: Shape) -> float:
        """Of all servers together, for a step of one trainer."""
        return self.message_s * shape.pservers + self.server_gb_s * shape.moved_gb

    def master_cpu_s(self, requests: float) -> float:
        """A second with so many requests."""
        return self.master_s + self.request_s * requests

    def etcd_cpu_s(self, processes: int) -> float:
        """A second."""
        return self.etcd_s + self.etcd_process_s * processes


def fitted(seen: Sequence[Seen], more: Sequence[Seen] = ()) -> Constants:
    """The constants that explain what was seen best, none of them below 0.

    Args:
        seen: Of shapes that differ in servers, and in bytes.
        more: Other shapes, which count for the master and for etcd only: with few trainers these have little to do.
    """
    shapes = [each.shape for each in seen]
    servers = [float(shape.pservers) for shape in shapes]
    moved = [shape.moved_gb for shape in shapes]
    every = [*seen, *more]
    requests = [each.requests_per_s for each in every]
    processes = [float(processes_of(each.shape)) for each in every]
    return Constants(
        *_least_squares([[1.0] * len(seen), servers, moved], [each.trainer_s for each in seen]),
        *_least_squares([servers, moved], [each.servers_s for each in seen]),
        *_least_squares([[1.0] * len(every), requests], [each.master_s for each in every]),
        *_least_squares([[1.0] * len(every), processes], [each.etcd_s for each in every]),
    )


def requests_per_s(trainers: int, task_s: float) -> float:
    """Requests to the master: each trainer asks for tasks, and says how far it is."""
    return trainers * (1 / task_s + 1 / report_every_s(trainers))


def processes_of(shape: Shape) -> int:
    """Those with a lease: trainers, servers, a master."""
    return shape.trainers + shape.pservers + 1


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Relative errors count: a step of a microsecond as much as one of a second."""
    weights = 1 / np.maximum(np.asarray(values), 1e-9)
    left = np.asarray(columns).T * weights[:, None]
    found = np.zeros(len(columns))
    kept = list(range(len(columns)))
    while kept:
        found[:] = 0
        found[kept] = np.linalg.lstsq(left[:, kept], np.ones(len(values)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.remove(int(np.argmin(found)))
    return [float(each) for each in found]


@dataclass(frozen=True, slots=True)
class Machines:
    """What the job on paper runs on. Cores: what a process can use of them."""

    trainer_cores: float = 2.0
    server_cores: float = 8.0
    #: Of Python, one thread at a time.
    master_cores: float = 1.0
    etcd_cores: float = 4.0
    #: Of each machine, in each direction.
    network_bytes_per_s: float = 25e9 / 8
    #: What a server writes to the checkpoints' storage.
    store_bytes_per_s: float = 200e6


@dataclass(frozen=True, slots=True)
class Load:
    """How busy something is at the wanted pace; above 1: it cannot keep up."""

    what: str
    told: str
    part: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job on paper."""

    shape: Shape
    #: Of the model, with slots.
    stored_bytes: float
    #: Of a trainer, from one step to the next; and how long a task lasts.
    step_s: float
    task_s: float
    ttl_s: float = 5.0


def loads(job: Job, cost: Constants, machines: Machines) -> list[Load]:
    """What is busy by how much, the busiest first.

    A message costs a server's Python its whole constant, of which a part is gRPC's: so that is the most it can be.
    """
    shape = job.shape
    steps_per_s = shape.trainers / job.step_s
    server_bytes = steps_per_s * shape.step_bytes / shape.pservers
    messages = steps_per_s
    server_cpu = steps_per_s * cost.servers_cpu_s(shape) / shape.pservers
    trainer_cpu = cost.trainer_cpu_s(shape) / job.step_s
    trainer_bytes = shape.step_bytes / job.step_s
    requests = requests_per_s(shape.trainers, job.task_s)
    renewals = processes_of(shape) * RENEWALS_PER_TTL / job.ttl_s
    written_s = job.stored_bytes / shape.pservers / machines.store_bytes_per_s
    found = [
        Load(
            "a server's network",
            f"{_bytes(server_bytes)}/s in each direction",
            server_bytes / machines.network_bytes_per_s,
        ),
        Load("a server's cores", f"{server_cpu:.2f} busy", server_cpu / machines.server_cores),
        Load("a server's Python", f"{messages:,.0f} messages/s, one at a time", messages * cost.message_s),
        Load(
            "a trainer's network",
            f"{_bytes(trainer_bytes)}/s in each direction",
            trainer_bytes / machines.network_bytes_per_s,
        ),
        Load("a trainer's cores", f"{trainer_cpu:.2f} busy beside its own work", trainer_cpu / machines.trainer_cores),
        Load(
            "the master",
            f"{requests:,.0f} requests/s, {cost.master_cpu_s(requests):.2f} cores",
            cost.master_cpu_s(requests) / machines.master_cores,
        ),
        Load(
            "etcd",
            f"{renewals:,.0f} renewals/s of {processes_of(shape):,} leases, {1 / job.task_s * shape.trainers:,.0f} "
            f"tasks/s in groups, {cost.etcd_cpu_s(processes_of(shape)):.2f} cores",
            cost.etcd_cpu_s(processes_of(shape)) / machines.etcd_cores,
        ),
        Load(
            "a checkpoint an hour",
            f"{_bytes(job.stored_bytes)}, {written_s:,.0f} s at each server, beside training",
            written_s / 3600,
        ),
    ]
    return sorted(found, key=lambda load: -load.part)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
