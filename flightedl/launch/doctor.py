"""Queries every process of a job, so that ``domain.diagnosis`` can find problems.

A missing answer is also a finding, so no function in this module raises an error if a server is unreachable. All
processes are queried concurrently, so even many unresponsive processes delay the result by only a few seconds.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import DoctorSettings
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.directory import decoded, records
from flightedl.coordination.keys import JobKeys, jobs_in
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import ServerRecord
from flightedl.domain.diagnosis.examine import examine
from flightedl.domain.diagnosis.findings import Cause, Finding
from flightedl.domain.diagnosis.observations import Asked, Observations, ShownCertificate
from flightedl.domain.etcd_versions import Version
from flightedl.errors import FlightedlError
from flightedl.launch.probes import certificate_of, disk_of, try_store
from flightedl.launch.status import tool_connector
from flightedl.messages.base import decode, encode
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
from flightedl.rpc.identity import ServerIdentity

Reply = TypeVar("Reply", bound=msgspec.Struct)
Item = TypeVar("Item")
Result = TypeVar("Result")

_CALL_S = 3.0
_CONNECT_S = 1.5
#: A trainer reports at least every 5 s. Its next report contains its stack traces.
_STACKS_S = 12.0
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Server:
    role: str
    index: int
    record: ServerRecord

    @property
    def name(self) -> str:
        return self.role if self.role == "master" else f"{self.role}-{self.index}"


class Doctor:
    """Examines one job.

    Args:
        chosen: Settings that name the job, its etcd, the directory of certificates, and the checkpoint URL to test.
        clock: The process's clock.
    """

    def __init__(self, chosen: DoctorSettings, clock: Clock) -> None:
        self._chosen = chosen
        self._etcd = EtcdAccess.of(chosen)
        self._keys = JobKeys(chosen.job)
        self._clock = clock
        self._connector = tool_connector(chosen.tls_dir)

    def look(self, *, with_stacks: bool = False) -> Observations:
        """Query every process once. ``with_stacks`` includes the stack traces of all threads."""
        endpoints = _at_once(self._ask_etcd, self._etcd.each_endpoint)
        here, chosen = Path(), self._chosen
        found_disk = disk_of(here)
        seen = Observations(
            job=chosen.job,
            asker=host_facts(),
            etcd=tuple(asked for asked, _ in endpoints),
            store=try_store(chosen.checkpoint, chosen.job, self._clock) if chosen.checkpoint else None,
            disks={} if found_disk is None else {str(here.absolute()): found_disk},
        )
        listing = next((found for _, found in endpoints if found is not None), None)
        if listing is None:
            return seen
        servers = self._servers(listing)
        master = next((each for each in servers if each.role == "master"), None)
        pservers = [each for each in servers if each.role == "pserver" and each.record.address]
        lock = next((each for each in listing.entries if each.key == self._keys.master_lock), None)
        answers = _at_once(lambda each: self._ask(each, "status", b"", PserverStatusReply), pservers)
        seen = dataclasses.replace(
            seen,
            jobs=(chosen.job,) if listing.entries else self._jobs(),
            lock_generation=0 if lock is None else lock.create_revision,
            address_generation=0 if master is None else master.record.generation,
            pservers={each.index: asked for each, (asked, _) in zip(pservers, answers, strict=True)},
            replies={each.index: reply for each, (_, reply) in zip(pservers, answers, strict=True) if reply},
            certificates=self._certificates([*([master] if master else []), *pservers]),
        )
        if master is not None:
            asked, status = self._ask(master, "status", b"{}", StatusReply)
            _, said = self._ask(master, "events", encode(EventsRequest()), EventsReply) if status else (asked, None)
            events = seen.events if said is None else tuple(said.events)
            seen = dataclasses.replace(seen, master=asked, status=status, events=events)
        if not with_stacks:
            return seen
        trainers = [] if seen.status is None else [each.trainer for each in seen.status.trainers]
        own = [*pservers, *([master] if master else [])]
        texts = zip([each.name for each in own], _at_once(self._stacks_of, own), strict=True)
        return self._with_stacks(seen, dict(texts), trainers)

    def explain(self, seen: Observations) -> tuple[Observations, list[Finding]]:
        """Return the findings. If trainers are slow, their stack traces are requested first."""
        found = examine(seen)
        slow = [each.who for each in found if each.cause is Cause.TRAINER_IS_SLOW and each.who not in seen.stacks]
        if not slow or seen.master is None:
            return seen, found
        seen = self._with_stacks(seen, {}, slow)
        return seen, examine(seen)

    # etcd

    def _ask_etcd(self, endpoint: str) -> tuple[Asked, Listing | None]:
        version: Version = ()
        member_count, is_full = 0, False

        def ask() -> Listing:
            nonlocal version, member_count, is_full
            inner = open_coordinator(
                dataclasses.replace(self._etcd, endpoints=endpoint), timeout_s=_CALL_S, clock=self._clock
            )
            with closing(JobCoordinator(inner, self._keys)) as coordinator:
                listing = coordinator.list(self._keys.prefix)
                with suppress(FlightedlError):
                    version, member_count = inner.version()
                    is_full = inner.is_full()
                return listing

        asked, listing = self._tried(endpoint, ask)
        return dataclasses.replace(asked, version=version, member_count=member_count, is_full=is_full), listing

    def _servers(self, listing: Listing) -> list[_Server]:
        entries = {entry.key: entry for entry in listing.entries}
        pservers = records(entries, self._keys.pserver_index, ServerRecord)
        found = [_Server("pserver", index, record) for index, record in pservers]
        entry = entries.get(self._keys.master_address)
        if entry is not None and (record := decoded(entry, ServerRecord)) is not None:
            found.append(_Server("master", 0, record))
        return found

    def _jobs(self) -> tuple[str, ...]:
        with (
            suppress(FlightedlError),
            closing(open_coordinator(self._etcd, timeout_s=_CALL_S, clock=self._clock)) as it,
        ):
            return tuple(jobs_in(it))
        return ()

    # servers

    def _certificates(self, servers: Sequence[_Server]) -> dict[str, ShownCertificate]:
        if not self._chosen.tls_dir:
            return {}
        place = place_of(self._chosen.tls_dir, Role.ADMIN)
        shown = _at_once(lambda each: certificate_of(each.record.address, place, SERVER_NAME), servers)
        return {each.name: certificate for each, certificate in zip(servers, shown, strict=True)}

    def _ask(
        self, server: _Server, verb: str, body: bytes, kind: type[Reply], timeout_s: float = _CALL_S
    ) -> tuple[Asked, Reply | None]:
        address = server.record.address
        identity = ServerIdentity(self._chosen.job, server.role, server.index, server.record.generation)

        def ask() -> Reply:
            with self._connector.connect(address, identity) as connection:
                return decode(connection.action(verb, body, timeout_s=timeout_s), kind)

        return self._tried(address, ask)

    def _tried(self, address: str, ask: Callable[[], Result]) -> tuple[Asked, Result | None]:
        """Query a server. Return the outcome of the query, and the server's answer."""
        asked = Asked(address=address, is_connected=_is_listening(address))
        if not asked.is_connected:
            return dataclasses.replace(asked, error=f"nothing listens at {address}", code="unavailable"), None
        began = self._clock.now()
        try:
            reply = ask()
        except FlightedlError as error:
            return dataclasses.replace(asked, error=str(error), code=error.code), None
        seconds = self._clock.now() - began
        return dataclasses.replace(asked, seconds=seconds, received_s=self._clock.wall_time()), reply

    # stacks

    def _stacks_of(self, server: _Server, trainer: str = "") -> str:
        wait_s = _STACKS_S if trainer else 0.0
        request = StacksRequest(trainer=trainer, wait_s=wait_s)
        _, reply = self._ask(server, "stacks", encode(request), StacksReply, wait_s + _CALL_S)
        return "" if reply is None else reply.text

    def _with_stacks(self, seen: Observations, more: Mapping[str, str], trainers: Sequence[str]) -> Observations:
        found = {**seen.stacks, **more}
        if seen.master is not None:
            record = ServerRecord(address=seen.master.address, generation=seen.address_generation)
            master = _Server("master", 0, record)
            found |= zip(trainers, _at_once(lambda each: self._stacks_of(master, each), trainers), strict=True)
        return dataclasses.replace(seen, stacks={who: text for who, text in found.items() if text})


def _is_listening(address: str) -> bool:
    """True if ``host:port`` accepts a TCP connection. No data is sent."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _at_once(ask: Callable[[Item], Result], targets: Iterable[Item]) -> list[Result]:
    asked = list(targets)
    if not asked:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(asked))) as pool:
        return list(pool.map(ask, asked))
