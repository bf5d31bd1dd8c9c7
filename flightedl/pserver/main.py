"""One pserver process: wiring, taking an index, serving, ending.

Order: bind the server (it answers "not ready"), read ``ps_desired``, take the first free ``ps/<index>`` (or wait for
one: a spare), publish address and generation with it, build the shard when the model is declared, load what its
predecessor had, serve. Its lease lives longer until the shard is built. It ends when told to (exit code 0), when its
lease is lost (75: start me again), or when the job cannot go on (3). What etcd says of the job counts only from the
moment when the index was taken.
"""

from __future__ import annotations

import functools
import logging
import sys

from flightedl.config import PserverSettings
from flightedl.coordination.checkpoint_places import job_storage
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.process import ServerProcess, run_server
from flightedl.errors import EXIT_JOB_FAILED, EXIT_START_AGAIN, FlightedlError
from flightedl.ports import Coordinator
from flightedl.process.tuning import avoid_preemption
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.meter import MEASURES
from flightedl.pserver.metrics import figures
from flightedl.pserver.service import PserverService
from flightedl.rpc.identity import ServerIdentity

_log = logging.getLogger(__name__)

_POLL_S = 0.5
#: How much longer a lease lives while its pserver is made ready: on a starved machine that has taken a minute and more,
#: in which it could not renew for seconds. ``flightedl run`` ends the lease of one that dies meanwhile; elsewhere its
#: successor waits for so long.
_STARTING_FACTOR = 4
_DRAIN_POLL_S = 0.05


class PserverProcess(ServerProcess[PserverSettings]):
    """Everything one pserver process is made of."""

    role = "pserver"

    def _serve(self, coordinator: Coordinator) -> int:
        with Directory(coordinator, self._keys, self._clock) as directory:
            return self._serve_index(coordinator, directory)

    def _serve_index(self, coordinator: Coordinator, directory: Directory) -> int:
        shares_memory = self._settings.same_host != "never"
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
        )
        server = self._server(PserverFlight(service, self._clock, shares_memory=shares_memory).routes())
        service.refusals = lambda: server.refusals
        held = None
        try:
            held = self._take_index(coordinator, directory, server.port, service)
            if held is None:
                return self._exit_code
            index = self._keys.pserver_index(held.key)
            assert index is not None
            while not self._stop.is_set() and not _has_seen(directory, held):
                directory.wait_until(functools.partial(_has_moved, directory.revision), _POLL_S)
            service.meter.instruments = self._instruments(index, MEASURES)
            service.take_index(index, held.generation, lambda: held.is_held)
            server.start_serving(ServerIdentity(self._settings.job, "pserver", index, held.generation))
            _log.info("pserver ready index=%d generation=%d port=%d", index, held.generation, server.port)
            directory.subscribe(lambda: self._look(service))
            self._look(service)
            with self._pages(index, held, lambda: figures(service.status())):
                is_starting = True
                while not self._stop.wait(_POLL_S):
                    self._health.beat(service.doing, is_ready=service.is_settled)
                    if is_starting and service.is_built:
                        is_starting = False
                        held.hold_for(self._settings.lease_ttl_s)
                    if not held.is_held:
                        self.lost("its lease could not be renewed")
            self._health.waiting("it is ending")
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

    def _drain(self, service: PserverService) -> None:
        """Told to end: wait a little for a checkpoint that has everything that was pushed until now."""
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

    def _take_index(
        self, coordinator: Coordinator, directory: Directory, port: int, service: PserverService
    ) -> HeldKey | None:
        """The first free index, waiting for one; None when told to end before."""
        said = ""
        while not self._stop.is_set():
            desired = directory.ps_desired()
            taken = directory.pservers()
            free = [] if desired is None else [index for index in range(desired) if index not in taken]
            for index in free:
                if (held := self._claim(coordinator, index, port)) is not None:
                    return held
            reason = "a master to say how many pservers there are" if desired is None else "a free index"
            # A spare is one only while nothing is free.
            self._health.beat(f"it waits for {reason}", is_ready=desired is not None and not free)
            if reason != said:
                _log.info("waiting for %s", reason)
                said = reason
            if desired is not None and len(taken) >= desired:
                service.prepare()
            seen = directory.revision
            directory.wait_until(functools.partial(_has_moved, seen), _POLL_S)
        return None

    def _claim(self, coordinator: Coordinator, index: int, port: int) -> HeldKey | None:
        return HeldKey.claim(
            coordinator,
            self._clock,
            self._keys.pserver(index),
            self._record(port),
            self._settings.lease_ttl_s * _STARTING_FACTOR,
            on_lost=lambda reason: self.lost(f"its lease is lost: {reason}"),
        )


def _has_seen(directory: Directory, held: HeldKey) -> bool:
    """Whether the directory knows everything that was there when the key was taken."""
    return directory.revision >= held.generation or not held.is_held


def _has_moved(seen: int, directory: Directory) -> bool | None:
    return True if directory.revision != seen else None


def run(chosen: PserverSettings) -> int:
    """Run a pserver in this process; returns the exit code."""
    avoid_preemption()
    return run_server(PserverProcess, chosen)
