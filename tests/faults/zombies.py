"""Attempts of deposed processes to write to a running job, none of which may be accepted.

Each attempt is a request that the process would have sent just before it was deposed, under its old generation: a
master's write to etcd, view or order of a checkpoint; a pserver's write to its key; a trainer's push or report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FlightedlError
from flightedl.launch.status import JobStatus
from flightedl.messages.base import decode, encode
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, ViewReply, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader, PushReply
from flightedl.messages.status import StatusReply
from flightedl.messages.tasks import FinishedTask, TasksReply, TasksTicket
from flightedl.ports import CreatedAt, Put
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.wire.rows import PUSH_SCHEMA, encode_rows

_CALL_S = 5.0
_GRADIENT = np.ones(8, np.float32)

Attempt = Callable[[int], bool]


def attempts(etcd: str, job: str, status: JobStatus, count: int) -> tuple[Counter[str], Counter[str]]:
    """Try to write as deposed processes. Return (attempts, accepted attempts) by kind.

    Args:
        etcd: ``host:port``.
        job: Name of a job that is training.
        status: Function that queries the job's master.
        count: Total number of attempts.
    """
    now = status.read(_CALL_S)
    tried: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    coordinator = EtcdCoordinator(etcd, clock=SystemClock())
    opened: list[Connection] = []
    try:
        kinds = _kinds(coordinator, JobKeys(job), now, opened)
        for number in range(count):
            name, attempt = kinds[number % len(kinds)]
            tried[name] += 1
            try:
                accepted[name] += attempt(number)
            except FlightedlError:
                continue
    finally:
        for connection in opened:
            connection.close()
        coordinator.close()
    return tried, accepted


def _kinds(
    coordinator: EtcdCoordinator, keys: JobKeys, now: StatusReply, opened: list[Connection]
) -> list[tuple[str, Attempt]]:
    assert now.master is not None, "the job has no master"
    assert now.pservers, "the job has no pservers"
    assert now.trainers, "the job has no trainers"
    pserver, trainer, master = now.pservers[0], now.trainers[0], now.master
    old_master = master.generation - 1

    def connect(address: str, role: str, generation: int, caller: str) -> Connection:
        identity = ServerIdentity(keys.job_name, role, 0, generation)
        opened.append(Connection(address, expected=identity, caller=Caller(caller, "zombie")))
        return opened[-1]

    as_master = connect(pserver.address, "pserver", pserver.generation, "master")
    as_trainer = connect(pserver.address, "pserver", pserver.generation, "trainer")
    to_the_past = connect(pserver.address, "pserver", pserver.generation - 1, "trainer")
    to_master = connect(master.address, "master", master.generation, "trainer")

    def write(fence: str, generation: int, key: str) -> bool:
        entry = coordinator.get(key)
        value = b"" if entry is None else entry.value
        return coordinator.transact([CreatedAt(fence, generation)], [Put(key, value)]).committed

    def view(number: int) -> bool:
        request = ViewRequest(
            plan_hash=now.plan_hash, master_generation=old_master, serial=1_000_000 + number, members=[]
        )
        return not decode(as_master.action("view", encode(request), timeout_s=_CALL_S), ViewReply).outdated

    def order(number: int) -> bool:
        request = SnapshotRequest(
            OrderNumber(old_master, 1_000_000 + number, 1), None, f"c-{number}/zombie", plan_hash=now.plan_hash
        )
        reply = decode(as_master.action("snapshot", encode(request), timeout_s=_CALL_S), SnapshotReply)
        return reply.order.master_generation == old_master

    def push(connection: Connection, generation: int, number: int) -> bool:
        header = PushHeader(
            verb="push",
            trainer=trainer.trainer,
            generation=generation,
            plan_hash=now.plan_hash,
            member=trainer.member,
            identity=BatchIdentity(epoch=1_000_000, task=number, batch=0, batch_count=1),
            weight=1.0,
            rows=1,
        )
        rows = encode_rows([0], [0], [_GRADIENT])
        reply = connection.put(encode(header), PUSH_SCHEMA, [(rows, None)], timeout_s=_CALL_S)
        return decode(reply, PushReply).accepted > 0

    def report(number: int) -> bool:
        finished = [FinishedTask(epoch=now.epoch, position=number % 64, attempt=number, pservers=[1 << 40] * 2)]
        ticket = TasksTicket(
            trainer=trainer.trainer, generation=trainer.generation - 1, finished=finished, want=1, wait_s=0.0
        )
        with to_master.get(encode(ticket), timeout_s=_CALL_S) as stream:
            # Any answer shows that the master has processed the report.
            return decode(stream.text, TasksReply).outcome != ""

    return [
        ("master writes etcd", lambda _: write(keys.master_lock, old_master, keys.task_queues)),
        ("master sends a view", view),
        ("master orders a checkpoint", order),
        ("pserver writes its key", lambda _: write(keys.pserver(0), pserver.generation - 1, keys.pserver(0))),
        ("trainer pushes", lambda number: push(as_trainer, trainer.generation - 1, number)),
        ("trainer pushes to a past pserver", lambda number: push(to_the_past, trainer.generation, number)),
        ("trainer reports", report),
    ]
