"""The processes that ask for tasks in ``flightedl bench queue``; they take orders as ``bench.orders`` says.

``trainers ETCD JOB COUNT``: that many trainers of a job, each with a lease and a connection of its own, in as many
threads; each call reports the task before and asks for the next. ``bare ETCD ADDRESS``: what a durable dispatch cannot
do without: one transaction on etcd, then one call of a Flight server that answers with a batch of one row.
``server``: that Flight server.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pyarrow as pa
from pyarrow import flight

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.errors import JobFailedError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import Assignment, FinishedTask, TasksReply, TasksTicket
from flightedl.ports import Coordinator, Put
from flightedl.process import tuning as process_tuning
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.rpc.request_stream import RequestStream

from .orders import next_order, ready, report, say_port, serve

_CALL_S = 20.0
_LEASE_S = 60.0
#: About as long as the queue's state with 64 trainers.
_STATE_BYTES = 3000
_SCHEMA = pa.schema([("value", pa.int64())])


class Asking:
    """One trainer: a lease, a connection, the task that it holds."""

    def __init__(self, job: str, name: str, coordinator: Coordinator, address: str, generation: int) -> None:
        held = HeldKey.claim(coordinator, SystemClock(), JobKeys(job).trainer(name), b'{"id":"t"}', _LEASE_S)
        assert held is not None
        self.held = held
        self.name = name
        self.connection = Connection(
            address, expected=ServerIdentity(job, "master", 0, generation), caller=Caller("trainer", name)
        )
        self._request_stream = RequestStream("tasks", SystemClock())
        self.assignment: Assignment | None = None

    def dispatch(self) -> None:
        """Report the last task, get the next."""
        last = self.assignment
        finished = [] if last is None else [_finished(last)]
        ticket = TasksTicket(trainer=self.name, generation=self.held.generation, finished=finished, want=1)
        while True:
            try:
                text = self._request_stream.ask(self.connection, encode(ticket), timeout_s=_CALL_S)
            except UnavailableError:
                continue
            break
        reply = decode(text, TasksReply)
        if not reply.assignments:
            raise JobFailedError("the bench has used up its tasks: ask for fewer dispatches")
        self.assignment = reply.assignments[0]

    def close(self) -> None:
        """Let go of everything."""
        self._request_stream.close_idle()
        self.connection.close()
        self.held.release()


def _finished(last: Assignment) -> FinishedTask:
    return FinishedTask(epoch=last.epoch, position=last.position, attempt=last.attempt)


def run_trainers(etcd: str, job: str, count: int) -> None:
    """Each of ``count`` trainers dispatches as often as ordered, all at once."""
    clock = SystemClock()
    coordinator = EtcdCoordinator(etcd, clock=clock)
    directory = Directory(coordinator, JobKeys(job), clock).start()
    record = directory.wait_until(lambda found: found.master(), 30.0)
    assert record is not None
    trainers = [
        Asking(job, f"bench-{time.time_ns()}-{number}", coordinator, record.address, record.generation)
        for number in range(count)
    ]
    for trainer in trainers:
        trainer.dispatch()
    ready()
    while times := next_order()[0]:
        seconds: list[float] = []
        started = threading.Barrier(count + 1)

        def work(
            trainer: Asking,
            started: threading.Barrier = started,
            times: int = times,
            seconds: list[float] = seconds,
        ) -> None:
            started.wait()
            for _ in range(times):
                begun = time.perf_counter()
                trainer.dispatch()
                seconds.append(time.perf_counter() - begun)

        threads = [threading.Thread(target=work, args=(trainer,)) for trainer in trainers]
        for thread in threads:
            thread.start()
        cpu_s = time.process_time()
        started.wait()
        for thread in threads:
            thread.join()
        report(seconds, time.process_time() - cpu_s)
    for trainer in trainers:
        trainer.close()
    directory.close()
    coordinator.close()


class BareServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers every call with one row."""

    def do_get(self, _context: Any, _ticket: flight.Ticket) -> flight.RecordBatchStream:
        """One row."""
        return flight.RecordBatchStream(pa.table({"value": [1]}, schema=_SCHEMA))


def run_bare(etcd: str, address: str) -> None:
    """A transaction and a call as often as ordered."""
    coordinator = EtcdCoordinator(etcd, clock=SystemClock())
    client = flight.FlightClient(f"grpc://{address}")
    options = flight.FlightCallOptions(timeout=_CALL_S)
    state = b"x" * _STATE_BYTES

    def step() -> None:
        client.do_get(flight.Ticket(b"next"), options).read_all()
        coordinator.transact([], [Put("/flightedl-bench/bare", state)])

    serve(step)
    client.close()
    coordinator.close()


def run_server() -> None:
    """Serve until the input ends."""
    server = BareServer("grpc://127.0.0.1:0")
    say_port(server.port)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    process_tuning.apply()
    role, *rest = sys.argv[1:]
    if role == "trainers":
        run_trainers(rest[0], rest[1], int(rest[2]))
    elif role == "bare":
        run_bare(rest[0], rest[1])
    else:
        run_server()
