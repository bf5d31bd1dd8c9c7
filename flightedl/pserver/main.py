"""A pserver process, from acquiring an index until its exit.

The process first binds its server, which answers "not ready". Then it reads ``ps_desired``, acquires the first free
``ps/<index>``, and publishes its address and generation under that key. Once the model is declared, it builds the
shard, loads its predecessor's values, and serves. A process that finds no free index waits as a spare.
With the setting ``standby``, it instead copies the blocks of a pserver, and claims this pserver's index if it dies. If
no process claims an index without a standby for a while, for example because a machine is gone, the newest standby of
another pserver does, because trainers wait for all pservers.

The lease has a longer TTL until the shard is built. The process exits with code 0 when asked to stop, 75 if it has lost
its lease and should be restarted, and 3 if the job cannot continue. It ignores any state in etcd that is older than the
key of its index.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Sequence

from flightedl.config import PserverSettings
from flightedl.coordination.checkpoint_places import job_storage
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.presence import PresenceStreams
from flightedl.coordination.process import ServerProcess, run_server
from flightedl.domain.moving.standby import claims, has_unclaimed, index_to_follow, keeps_following
from flightedl.errors import (
    EXIT_JOB_FAILED,
    EXIT_START_AGAIN,
    FlightedlError,
    NotReadyError,
    UnavailableError,
    UsageError,
)
from flightedl.ports import Absent, Condition, Coordinator, CreatedAt, Delete, Operation
from flightedl.process import machine
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.meter import MEASURES
from flightedl.pserver.metrics import figures
from flightedl.pserver.moving.peers import Peers
from flightedl.pserver.readers.consumers import ConsumerPositions
from flightedl.pserver.service import PserverService
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller, ServerIdentity

_log = logging.getLogger(__name__)

_POLL_S = 0.5
#: Factor by which the lease's TTL is multiplied while the pserver is starting. On an overloaded machine, a start may
#: take more than a minute, with seconds between renewals. If a pserver dies while it is starting, ``flightedl run``
#: ends its lease; with other launchers, the successor waits until the longer TTL has passed.
_STARTING_FACTOR = 4
_DRAIN_POLL_S = 0.05


class PserverProcess(ServerProcess[PserverSettings]):
    """A pserver process."""

    role = "pserver"

    def _serve(self, coordinator: Coordinator) -> int:
        with Directory(coordinator, self._keys, self._clock, self.failed) as directory:
            return self._serve_index(coordinator, directory)

    def _serve_index(self, coordinator: Coordinator, directory: Directory) -> int:
        shares_memory = self._settings.same_host != "never"
        connector = Connector(Caller("pserver", self._settings.job), Role.SERVER, self._settings.tls_dir)
        service = PserverService(
            directory,
            self._keys,
            lambda why: self.end(EXIT_JOB_FAILED, why),
            lambda why: self.end(EXIT_START_AGAIN, why),
            job_storage(self._settings.checkpoint, self._settings.job),
            self._clock,
            self._recorder,
            self._settings.table_memory_mb << 20,
            shares_memory=shares_memory,
            peers=Peers(directory, self._keys, coordinator, connector),
            retire=lambda: self.end(0, "the job has fewer pservers now"),
            consumers=ConsumerPositions(coordinator, directory, self._keys, self._clock),
        )
        server = self._server(PserverFlight(service, self._clock, shares_memory=shares_memory).routes())
        service.refusals = lambda: server.refusals
        held = presence = None
        try:
            held = self._acquire_index(coordinator, directory, server.port, service)
            if held is None:
                return self._exit_code
            index = self._keys.pserver_index(held.key)
            assert index is not None
            while not self._stop.is_set() and not _has_seen(directory, held):
                directory.wait_until(functools.partial(_has_moved, directory.revision), _POLL_S)
            service.meter.instruments = self._instruments(index, MEASURES)
            service.acquire_index(index, held.generation, lambda: held.is_held)
            server.start_serving(ServerIdentity(self._settings.job, "pserver", index, held.generation))
            _log.info("pserver ready index=%d generation=%d port=%d", index, held.generation, server.port)
            directory.watch_over(lambda: held)
            presence = PresenceStreams(self._settings.job, directory, connector, lambda: held)
            directory.subscribe(lambda: self._look(service))
            self._look(service)
            with self._pages(index, held, lambda: figures(service.status())):
                is_starting = True
                while not self._stop.wait(_POLL_S):
                    self._health.beat(service.doing, is_ready=service.is_settled)
                    service.expire()
                    if is_starting and service.is_built:
                        is_starting = False
                        held.hold_for(self._settings.lease_ttl_s)
                    if not held.is_held:
                        self.lost("its lease could not be renewed")
            self._health.waiting("it is ending")
            if not self._leave(service, directory):
                self._drain(service)
            if self._exit_code:
                _log.error("pserver ends: %s", self._reason)
                sys.stderr.write(f"flightedl pserver: {self._reason}\n")
            return self._exit_code
        finally:
            service.close()
            server.stop(self._settings.drain_s)
            if held is not None:
                held.release()
            if presence is not None:
                presence.close()

    def _leave(self, service: PserverService, directory: Directory) -> bool:
        """Move all blocks to other pservers, if the settings allow it and time is left. Return True if none remain."""
        if self._exit_code or not self._settings.leave_s or not service.is_serving:
            return False
        # Without trainers, the whole job is probably ending. A checkpoint is then better than moves to pservers that
        # end as well. If the trainers have just left, this is not known immediately.
        if self._settings.checkpoint and directory.wait_until(_has_no_trainers, _POLL_S) is not None:
            return False
        deadline = self._clock.now() + self._settings.leave_s
        try:
            while not service.is_empty and self._clock.now() < deadline and len(directory.pservers()) > 1:
                with contextlib.suppress(UnavailableError, NotReadyError):
                    service.leave()
                self._clock.sleep(_POLL_S)
            if not service.is_empty:
                service.leave(is_cancelled=True)
        except FlightedlError as error:
            _log.warning("blocks stay here: %s", error)
        return service.is_empty

    def _drain(self, service: PserverService) -> None:
        """Wait at most ``drain_s`` seconds for a checkpoint that contains everything pushed so far."""
        if self._exit_code or not self._settings.checkpoint or not service.is_serving:
            return
        service.drain()
        deadline = self._clock.now() + self._settings.drain_s
        while self._clock.now() < deadline and not service.is_drained:
            self._clock.sleep(_DRAIN_POLL_S)

    def _look(self, service: PserverService) -> None:
        try:
            service.look()
        except FlightedlError as error:
            self.end(EXIT_JOB_FAILED, str(error))

    def _acquire_index(
        self, coordinator: Coordinator, directory: Directory, port: int, service: PserverService
    ) -> HeldKey | None:
        said, free_since = "", self._clock.now()
        standby: HeldKey | None = None
        try:
            while not self._stop.is_set():
                seen, desired = directory.revision, directory.ps_desired() or 0
                # Nothing waits for a pserver that is being added.
                if not has_unclaimed(service.placed_count(desired), directory.pservers(), directory.standbys()):
                    free_since = self._clock.now()
                held = self._claim_free(coordinator, directory, port, desired, standby)
                if held is not None:
                    return held
                standby = self._keep_standby(
                    coordinator, directory, port, service, desired, standby, self._clock.now() - free_since
                )
                taken = directory.pservers()
                is_free = any(index not in taken for index in range(desired))
                reason = "a free index" if desired else "a master to set the number of pservers"
                if lacks_copy := service.lacks_copy:
                    reason = "a copy of a pserver's blocks"
                # The process is ready as a spare or standby if a pserver may end now. Otherwise a rolling update would
                # end a pserver whose standby has no copy yet.
                self._health.beat(
                    f"it is waiting for {reason}", is_ready=desired > 0 and not is_free and not lacks_copy
                )
                if reason != said:
                    _log.info("waiting for %s", reason)
                    said = reason
                if desired and not is_free:
                    service.prepare()
                directory.wait_until(functools.partial(_has_moved, seen), _POLL_S)
            return None
        finally:
            if standby is not None:
                standby.release()

    def _claim_free(
        self, coordinator: Coordinator, directory: Directory, port: int, desired: int, standby: HeldKey | None
    ) -> HeldKey | None:
        keys = self._keys
        own = None if standby is None else self._place_of(standby)
        for claim in claims(desired, directory.pservers(), _generations(directory), own):
            key = keys.standby(claim.index)
            held = self._claim(
                coordinator,
                keys.pserver(claim.index),
                port,
                self._settings.lease_ttl_s * _STARTING_FACTOR,
                [CreatedAt(key, claim.standby)] if claim.standby else [Absent(key)],
                [Delete(key)] if claim.standby else [],
            )
            if held is not None:
                return held
        return None

    def _place_of(self, standby: HeldKey) -> tuple[int, int]:
        """Return the index and the generation of a standby."""
        index = self._keys.standby_index(standby.key)
        assert index is not None, "this is not the key of a standby"
        return index, standby.generation

    def _keep_standby(
        self,
        coordinator: Coordinator,
        directory: Directory,
        port: int,
        service: PserverService,
        desired: int,
        standby: HeldKey | None,
        unclaimed_s: float,
    ) -> HeldKey | None:
        """Return the key of this process as a standby; None if it is a spare."""
        if standby is not None:
            revision = directory.revision
            own = self._place_of(standby)
            if keeps_following(own, desired, revision, _generations(directory), unclaimed_s):
                return standby
            service.end_standby()
            standby.release()
        index = index_to_follow(desired, directory.pservers(), directory.standbys()) if self._settings.standby else None
        if index is None:
            return None
        if (master := directory.master()) is not None and master.refuses_standbys:
            raise UsageError(
                "standby pservers cannot be used with --recovery rollback, which resets all pservers to one "
                "checkpoint: start this pserver without --standby"
            )
        standby = self._claim(coordinator, self._keys.standby(index), port, self._settings.lease_ttl_s)
        if standby is not None:
            _log.info("following pserver %d as its standby generation=%d", index, standby.generation)
            service.begin_standby(index, standby.generation, self._settings.standby_lag_s)
        return standby

    def _claim(
        self,
        coordinator: Coordinator,
        key: str,
        port: int,
        ttl_s: float,
        also_when: Sequence[Condition] = (),
        also: Sequence[Operation] = (),
    ) -> HeldKey | None:
        return HeldKey.claim(
            coordinator,
            self._clock,
            key,
            self._record(port),
            ttl_s,
            lambda reason: self.lost(f"its lease was lost: {reason}"),
            also_when,
            also,
        )


def _has_seen(directory: Directory, held: HeldKey) -> bool:
    """True if the directory is at least as new as the acquired key, or if the key has been lost."""
    return directory.revision >= held.generation or not held.is_held


def _generations(directory: Directory) -> dict[int, int]:
    """Return index -> generation of each live standby."""
    return {index: record.generation for index, record in directory.standbys().items()}


def _has_moved(seen: int, directory: Directory) -> bool | None:
    return True if directory.revision != seen else None


def _has_no_trainers(directory: Directory) -> bool | None:
    return None if directory.trainers() else True


def run(chosen: PserverSettings) -> int:
    """Run a pserver in this process. Return the exit code."""
    machine.avoid_preemption()
    return run_server(PserverProcess, chosen)
