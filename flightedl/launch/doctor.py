"""Asks everybody that a job is made of how it is, for ``domain.diagnosis`` to say what is wrong.

Whatever does not answer is an observation as well: nothing here raises because a server is gone. All are asked at the
same time, so that one who is silent costs a few seconds and not a few for each.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import ServerRecord
from flightedl.domain.diagnosis.examine import examine
from flightedl.domain.diagnosis.findings import Cause, Finding
from flightedl.domain.diagnosis.observations import Asked, Observations, ShownCertificate
from flightedl.errors import FlightedlError
from flightedl.launch.probes import certificate_of, disk_of, try_store
from flightedl.launch.status import tool_connector
from flightedl.messages.base import decode, encode
from flightedl.messages.decoding import from_json
from flightedl.messages.status import (
    EventsReply,
    EventsRequest,
    PserverStatusReply,
    StacksReply,
    StacksRequest,
    StatusReply,
)
from flightedl.ports import Clock, Listing
from flightedl.process.host import host_facts
from flightedl.rpc.authentication import SERVER_NAME, Role, place_of
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import ServerIdentity

Reply = TypeVar("Reply", bound=msgspec.Struct)
Item = TypeVar("Item")
Result = TypeVar("Result")

_CALL_S = 3.0
_CONNECT_S = 1.5
#: A trainer says something every 5 s at least, and with the next report where its threads stand.
_STACKS_S = 12.0
#: Before the names of jobs, see ``coordination.keys``.
_ALL_JOBS = "/flightedl/"
_AT_ONCE = 16


class Doctor:
    """Looks at one job.

    Args:
        etcd: How etcd is reached.
        job: The job's name.
        clock: The process's clock.
        tls_dir: Directory with an admin's or a reader's certificate; empty: plain text.
        checkpoint: URL of the job's checkpoints, to try out; empty: that is left out.
    """

    def __init__(self, etcd: EtcdAccess, job: str, clock: Clock, tls_dir: str = "", checkpoint: str = "") -> None:
        self._tls_dir = tls_dir
        self._checkpoint = checkpoint
        self._etcd = etcd
        self._job = job
        self._keys = JobKeys(job)
        self._clock = clock
        self._connector: Connector = tool_connector(tls_dir)

    def look(self, *, with_stacks: bool = False) -> Observations:
        """Ask everybody once; ``with_stacks``: also where the threads of servers stand."""
        endpoints = _at_once(self._ask_etcd, self._etcd.each_endpoint)
        here = Path()
        found_disk = disk_of(here)
        seen = Observations(
            job=self._job,
            asker=host_facts(),
            etcd=tuple(asked for asked, _ in endpoints),
            store=try_store(self._checkpoint, self._job, self._clock) if self._checkpoint else None,
            disks={} if found_disk is None else {str(here.absolute()): found_disk},
        )
        listing = next((found for _, found in endpoints if found is not None), None)
        if listing is None:
            return seen
        records = self._records(listing)
        master = records.get(self._keys.master_address)
        lock = next((each for each in listing.entries if each.key == self._keys.master_lock), None)
        seen = dataclasses.replace(
            seen,
            jobs=(self._job,) if listing.entries else self._other_jobs(),
            lock_generation=0 if lock is None else lock.create_revision,
            address_generation=0 if master is None else master.generation,
        )
        if master is not None:
            seen = self._ask_master(seen, master)
        places = {
            index: record
            for key, record in records.items()
            if (index := self._keys.pserver_index(key)) is not None and record.address
        }
        seen = self._ask_pservers(seen, places)
        seen = dataclasses.replace(seen, certificates=self._certificates(master, places))
        return self._with_stacks(seen, master, places) if with_stacks else seen

    def explain(self, seen: Observations) -> tuple[Observations, list[Finding]]:
        """Return the findings. Slow trainers are first asked for the stacks of their threads."""
        found = examine(seen)
        slow = [each.who for each in found if each.cause is Cause.TRAINER_IS_SLOW and each.who not in seen.stacks]
        if not slow or seen.master is None:
            return seen, found
        seen = dataclasses.replace(seen, stacks={**seen.stacks, **self._stacks_of_trainers(seen, slow)})
        return seen, examine(seen)

    # etcd

    def _ask_etcd(self, endpoint: str) -> tuple[Asked, Listing | None]:
        """One of its members: how it answers, and what it has of the job."""
        access = dataclasses.replace(self._etcd, endpoints=endpoint)
        asked = Asked(address=endpoint, is_connected=_is_listening(endpoint))
        if not asked.is_connected:
            error = f"nothing listens at {endpoint}"
            return dataclasses.replace(asked, error=error, code="unavailable"), None
        began = self._clock.now()
        try:
            inner = EtcdCoordinator(access, timeout_s=_CALL_S, clock=self._clock)
            with closing(JobCoordinator(inner, self._keys)) as coordinator:
                coordinator.get(self._keys.master_lock)
                seconds = self._clock.now() - began
                found = coordinator.list(self._keys.prefix)
        except FlightedlError as error:
            return dataclasses.replace(asked, error=str(error), code=error.code), None
        return dataclasses.replace(asked, seconds=seconds, heard_s=self._clock.wall_time()), found

    def _records(self, listing: Listing) -> dict[str, ServerRecord]:
        """The servers that have a key."""
        found: dict[str, ServerRecord] = {}
        for entry in listing.entries:
            index = self._keys.pserver_index(entry.key)
            if entry.key == self._keys.master_address or index is not None:
                with suppress(msgspec.DecodeError):
                    record = from_json(entry.value, ServerRecord)
                    generation = record.generation if index is None else entry.create_revision
                    found[entry.key] = msgspec.structs.replace(record, generation=generation)
        return found

    def _other_jobs(self) -> tuple[str, ...]:
        """Jobs that have a key."""
        try:
            with closing(EtcdCoordinator(self._etcd, timeout_s=_CALL_S, clock=self._clock)) as coordinator:
                keys = [entry.key for entry in coordinator.list(_ALL_JOBS).entries]
        except FlightedlError:
            return ()
        return tuple(sorted({key.removeprefix(_ALL_JOBS).partition("/")[0] for key in keys}))

    # servers

    def _ask_master(self, seen: Observations, record: ServerRecord) -> Observations:
        identity = ServerIdentity(self._job, "master", 0, record.generation)
        asked, status = self._ask(record.address, identity, "status", b"{}", StatusReply)
        seen = dataclasses.replace(seen, master=asked, status=status)
        if status is None:
            return seen
        _, events = self._ask(record.address, identity, "events", encode(EventsRequest()), EventsReply)
        return seen if events is None else dataclasses.replace(seen, events=tuple(events.events))

    def _ask_pservers(self, seen: Observations, places: dict[int, ServerRecord]) -> Observations:
        def ask(place: tuple[int, ServerRecord]) -> tuple[Asked, PserverStatusReply | None]:
            index, record = place
            identity = ServerIdentity(self._job, "pserver", index, record.generation)
            return self._ask(record.address, identity, "status", b"", PserverStatusReply)

        answers = dict(zip(places, _at_once(ask, places.items()), strict=True))
        return dataclasses.replace(
            seen,
            pservers={index: asked for index, (asked, _) in answers.items()},
            replies={index: reply for index, (_, reply) in answers.items() if reply is not None},
        )

    def _certificates(
        self, master: ServerRecord | None, places: dict[int, ServerRecord]
    ) -> dict[str, ShownCertificate]:
        """Those that servers show; nothing where there is no TLS."""
        if not self._tls_dir:
            return {}
        servers = {f"pserver-{index}": record.address for index, record in places.items()}
        if master is not None:
            servers["master"] = master.address
        place = place_of(self._tls_dir, Role.ADMIN)
        shown = _at_once(lambda address: certificate_of(address, place, SERVER_NAME), servers.values())
        return dict(zip(servers, shown, strict=True))

    def _ask(
        self,
        address: str,
        identity: ServerIdentity,
        verb: str,
        body: bytes,
        kind: type[Reply],
        timeout_s: float = _CALL_S,
    ) -> tuple[Asked, Reply | None]:
        asked = Asked(address=address, is_connected=_is_listening(address))
        if not asked.is_connected:
            return dataclasses.replace(asked, error=f"nothing listens at {address}", code="unavailable"), None
        began = self._clock.now()
        try:
            with self._connector.connect(address, identity) as connection:
                reply = decode(connection.action(verb, body, timeout_s=timeout_s), kind)
        except FlightedlError as error:
            return dataclasses.replace(asked, error=str(error), code=error.code), None
        seconds = self._clock.now() - began
        return dataclasses.replace(asked, seconds=seconds, heard_s=self._clock.wall_time()), reply

    # stacks

    def _with_stacks(
        self, seen: Observations, master: ServerRecord | None, places: dict[int, ServerRecord]
    ) -> Observations:
        servers = [("pserver", index, record) for index, record in places.items()]
        if master is not None:
            servers.append(("master", 0, master))

        def ask(server: tuple[str, int, ServerRecord]) -> tuple[str, str]:
            role, index, record = server
            identity = ServerIdentity(self._job, role, index, record.generation)
            _, reply = self._ask(record.address, identity, "stacks", encode(StacksRequest()), StacksReply)
            return role if role == "master" else f"{role}-{index}", "" if reply is None else reply.text

        told = {who: text for who, text in _at_once(ask, servers) if text}
        trainers = [] if seen.status is None else [each.trainer for each in seen.status.trainers]
        return dataclasses.replace(seen, stacks={**told, **self._stacks_of_trainers(seen, trainers)})

    def _stacks_of_trainers(self, seen: Observations, trainers: Sequence[str]) -> dict[str, str]:
        """Return the stacks of the trainers that report them."""
        told = _at_once(lambda trainer: self._stacks_of_trainer(seen, trainer), trainers)
        return {trainer: text for trainer, text in zip(trainers, told, strict=True) if text}

    def _stacks_of_trainer(self, seen: Observations, trainer: str) -> str:
        assert seen.master is not None, "it is asked by way of the master"
        identity = ServerIdentity(self._job, "master", 0, seen.address_generation)
        request = encode(StacksRequest(trainer=trainer, wait_s=_STACKS_S))
        timeout_s = _STACKS_S + _CALL_S
        _, reply = self._ask(seen.master.address, identity, "stacks", request, StacksReply, timeout_s)
        return "" if reply is None else reply.text


def _is_listening(address: str) -> bool:
    """True if ``host:port`` accepts a TCP connection. Sends nothing."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _at_once(ask: Callable[[Item], Result], whom: Iterable[Item]) -> list[Result]:
    """The answers of all, in their order."""
    asked = list(whom)
    if not asked:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(asked))) as pool:
        return list(pool.map(ask, asked))
