"""Determines whether a job with leases in etcd is running, or its leases have outlived it.

A lease outlives its holder by its time to live. Moreover, etcd extends all leases when it starts, so an etcd restored
from a backup has leases of processes that exited long ago. So a lease does not prove that the job is running. Rules:

* The job is running if a master answers at its recorded address, belongs to this job and has the recorded generation.
* The job is running if a process writes a leased key after the first check.
* The job is running if, counted from the first check, a lease lives longer than its time to live. Some process must
  have renewed it, perhaps on a machine that is unreachable from here. For the same reason, a master that does not
  answer proves nothing: its address ``127.0.0.1`` may refer to another machine.
* Otherwise the launcher waits for the leases. When they have ended, the job is not running.

A launcher holds the key ``launcher`` from before it starts the first process until the job ends. So if several
launchers have waited for the same leases or have found none, only one of them starts the job. Trainers and pservers may
be waiting for a master to return, so their leases do not prevent a launcher from starting one.

Limitation: a launcher loses its key if etcd is unreachable for longer than the key's lease. By then the job has a
master, or soon will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.errors import UsageError
from flightedl.messages.decoding import from_json
from flightedl.ports import Absent, Clock, Coordinator, Entry, Listing
from flightedl.process import machine

#: True if the master described by this record answers.
IsAnswering = Callable[[ServerRecord], bool]

_POLL_S = 0.2
#: Maximum delay, in seconds, with which etcd ends leases. It checks twice per second, and elects a leader first.
_SLACK_S = 3.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The fields, common to all records, that identify the process that wrote a record."""

    address: str = ""
    pid: int = 0
    #: Host of a server.
    name: str = ""
    #: Host of a trainer.
    host: str = ""


@dataclass(frozen=True, slots=True)
class Liveness:
    """Examines one job."""

    #: Direct access to etcd, with etcd's own revisions instead of those of the job.
    coordinator: Coordinator
    keys: JobKeys
    #: Measures how long leases survive.
    clock: Clock
    is_answering: IsAnswering
    #: Called with a message about the leases that the caller must wait for.
    say: Callable[[str], None] = lambda _: None
    #: True ends the wait.
    is_unwanted: Callable[[], bool] = lambda: False

    def claim_name(self, ttl_s: float) -> HeldKey | None:
        """Claim the right to start this job, once it is not running. Returns None if the wait is cancelled.

        Raises:
            UsageError: the job is running, or another launcher is starting it.
        """
        keys = self.keys
        starting = {keys.launcher, keys.master_lock, keys.master_address}
        record = msgspec.json.encode(ServerRecord(address="", name=machine.host_name(), pid=machine.process_id()))
        while True:
            if who := self._who_runs(lambda entry: entry.key in starting):
                raise UsageError(
                    f"a job named {keys.job_name} is already running ({who}): "
                    f"choose another name (--job), or wait for it to end"
                )
            if self.is_unwanted():
                return None
            free = Absent(keys.master_lock)
            held = HeldKey.claim(self.coordinator, self.clock, keys.launcher, record, ttl_s, also_when=[free])
            if held is not None:
                return held

    def require_ended(self, held: HeldKey | None = None) -> None:
        """Wait until no process of the job is left. ``held`` is the caller's own key.

        Raises:
            UsageError: the job is running.
        """
        own = None if held is None else held.key
        if who := self._who_runs(lambda entry: entry.key != own and names_process(entry, self.keys)):
            raise UsageError(f"job {self.keys.job_name} is running ({who}): stop it first")

    def _who_runs(self, counts: Callable[[Entry], bool]) -> str:
        """Describe a process that proves that the job is running; empty if there is none or the wait was cancelled."""
        first: Listing | None = None
        ends_at, asked = 0.0, 0
        while not self.is_unwanted():
            listing = self.coordinator.list(self.keys.prefix)
            left = [entry for entry in listing.entries if counts(entry)]
            if not left:
                return ""
            address = next((entry for entry in left if entry.key == self.keys.master_address), None)
            if address is not None and address.mod_revision != asked:
                asked = address.mod_revision
                record = from_json(address.value, ServerRecord)
                if self.is_answering(record):
                    return f"its master is at {record.address}"
            if first is None:
                first, limit_s = listing, self._limit_s(left)
                ends_at = self.clock.now() + limit_s
                self.say(
                    f"etcd still has leases of job {self.keys.job_name}, but its master does not answer: "
                    f"waiting for them to expire, at most {limit_s:.0f} s"
                )
            writing = [entry for entry in left if entry.mod_revision > first.revision]
            if writing or self.clock.now() >= ends_at:
                return self._described(writing or left)
            self.clock.sleep(_POLL_S)
        return ""

    def _limit_s(self, entries: Sequence[Entry]) -> float:
        leases = {entry.lease_id for entry in entries}
        return max(self.coordinator.lease_ttl_s(lease) or 0.0 for lease in leases) + _SLACK_S

    def _described(self, entries: Sequence[Entry]) -> str:
        entry = next((entry for entry in entries if entry.key == self.keys.master_address), entries[0])
        holder = holder_of(entry) or Holder()
        if holder.address and entry.key == self.keys.master_address:
            return f"its master is at {holder.address}, which does not answer from here"
        return f"process {holder.pid} on {holder.host or holder.name or 'some machine'} holds {entry.key} in etcd"


def names_process(entry: Entry, keys: JobKeys) -> bool:
    """True if an entry is leased to a process. Names of ``job.once`` do not count: they may outlive the process."""
    return bool(entry.lease_id) and not entry.key.startswith(keys.once)


def holder_of(entry: Entry) -> Holder | None:
    """Return the process that wrote a leased entry, or None if the entry does not identify one."""
    try:
        return from_json(entry.value, Holder)
    except msgspec.DecodeError:
        return None
