"""One master process, from waiting for the lock until its exit.

A master performs these steps: wait for ``master/lock``; check that etcd was not restored from an older state; write the
number of pservers; bind the server, which answers "not ready"; read the predecessor's state, or a checkpoint if the job
is resumed; serve; publish the address. The exit code is 0 if the master was stopped, 75 if it lost the lock or its
lease and should be restarted as a standby, and 3 if etcd was restored from an older state.
"""

from __future__ import annotations

import contextlib
import logging

from flightedl.adapters.patience import PatientStorage, Persistence
from flightedl.adapters.storage import FsspecFiles, open_storage
from flightedl.config import MasterSettings, Resume
from flightedl.coordination.checkpoint_places import job_storage
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.process import ServerProcess, run_server
from flightedl.coordination.records import ServerRecord
from flightedl.domain.retries import BRIEF
from flightedl.errors import FencedError, UnavailableError, UsageError
from flightedl.formats.dataset_spec import moved_folders
from flightedl.master import continuity, resuming
from flightedl.master.flight import MasterFlight
from flightedl.master.metrics import MEASURES, figures
from flightedl.master.page.answers import JobPage
from flightedl.master.recovery import read_state
from flightedl.master.service import MasterService
from flightedl.messages.decoding import from_json
from flightedl.ports import Coordinator, ModifiedAt, Put, Storage
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller, ServerIdentity

_log = logging.getLogger(__name__)

_TICK_S = 0.25


class MasterProcess(ServerProcess[MasterSettings]):
    """A master process."""

    role = "master"
    _service: MasterService

    def _serve(self, coordinator: JobCoordinator) -> int:
        # Before the lock is acquired, because the packages of a store take seconds to import.
        kept = job_storage(self._settings.checkpoint, self._settings.job)
        while (exit_code := self._take_turn(coordinator, kept)) is None:
            coordinator.look_again()
        return exit_code

    def _take_turn(self, coordinator: JobCoordinator, kept: Storage | None) -> int | None:
        """Wait for the lock and lead the job. Return the exit code, or None to get the lock again in a new life."""
        self._say_who_leads(coordinator)
        self._health.waiting("it is on standby", is_ready=True)
        held = HeldKey.claim_when_free(
            coordinator,
            self._clock,
            self._keys.master_lock,
            self._record(),
            self._settings.lease_ttl_s,
            on_lost=lambda reason: self.lost(f"it has lost its lock: {reason}"),
            stop=self._stop,
        )
        if held is None:
            return self._exit_code
        try:
            return self._lead(coordinator, held, kept)
        finally:
            held.release()

    def _say_who_leads(self, coordinator: Coordinator) -> None:
        with contextlib.suppress(UnavailableError):
            if (leader := coordinator.get(self._keys.master_lock)) is not None:
                record = from_json(leader.value, ServerRecord)
                job = self._settings.job
                _log.info("stands by: process %d on %s is the master of job %s", record.pid, record.name, job)
                return
        _log.info("waiting for the lock")

    def _lead(self, coordinator: Coordinator, held: HeldKey, kept: Storage | None) -> int | None:
        _log.info("acquired the lock generation=%d", held.generation)
        self._health.waiting("it is loading its predecessor's state")
        persist = Persistence(BRIEF, self._clock, self._stop)
        checkpoints = None if kept is None else PatientStorage(kept, persist)
        resume = self._settings.resume
        if not continuity.settle(checkpoints, coordinator, held, self._keys, resume=resume is not Resume.NEVER):
            return None
        pserver_count = self._fix_pserver_count(coordinator, held)
        resuming.begin(checkpoints, coordinator, held, self._keys, pserver_count, resume=resume)
        directory = Directory(coordinator, self._keys, self._clock, self.failed).start()
        service = self._service = MasterService(
            self._settings,
            pserver_count=pserver_count,
            held=held,
            coordinator=coordinator,
            directory=directory,
            keys=self._keys,
            files=FsspecFiles(moved_folders(self._settings.data_moved), 10 * self._settings.checkpoint_every_s),
            checkpoints=checkpoints,
            index_storage=(
                PatientStorage(open_storage(self._settings.checkpoint), persist) if self._settings.checkpoint else None
            ),
            clock=self._clock,
            connector=Connector(Caller("master", self._settings.job), Role.SERVER, self._settings.tls_dir),
            step_down=lambda reason: self.lost(f"it steps down: {reason}"),
            stop=self._stop,
            recorder=self._recorder,
            instruments=self._instruments(0, MEASURES),
        )
        server = self._server(MasterFlight(service).routes())
        service.refusals = lambda: server.refusals
        try:
            service.start(read_state(coordinator, self._keys, checkpoints))
            server.start_serving(ServerIdentity(self._settings.job, "master", 0, held.generation))
            self._publish(held, server.port)
            directory.watch_over(lambda: held)
            page = JobPage(service.status, service.journal, self._clock)
            _log.info("master ready generation=%d port=%d", held.generation, server.port)
            with self._pages(0, held, lambda: figures(service.status()), page.answer):
                while not self._stop.wait(_TICK_S):
                    service.tick()
                    if self._settings.metrics_port:
                        page.look()
                    self._health.beat("it leads", is_ready=True)
                    if not held.is_held:
                        self.lost("its lease could not be renewed")
            self._health.waiting("it is shutting down")
            if self._exit_code:
                _log.error("master exits: %s", self._reason)
            else:
                service.drain(self._settings.drain_s)
            return self._exit_code
        finally:
            service.close()
            server.stop(self._settings.drain_s)
            directory.close()

    def _publish(self, held: HeldKey, port: int) -> None:
        is_rollback = self._settings.recovery == "rollback"
        record = self._record(port, held.generation, refuses_standbys=is_rollback)
        result = held.write([held.attached(self._keys.master_address, record)])
        if not result.committed:
            raise FencedError("the lock was lost before the address was published")

    def _fix_pserver_count(self, coordinator: Coordinator, held: HeldKey) -> int:
        """Return the job's number of pservers. The first master writes it, and later masters read it."""
        entry = coordinator.get(self._keys.ps_desired)
        if entry is not None:
            count = int(entry.value)
            if self._settings.pservers > 0 and self._settings.pservers != count:
                _log.warning("the job has %d pservers; ignoring the setting of %d", count, self._settings.pservers)
            return count
        if self._settings.pservers < 0:
            raise UsageError("a new job needs the number of pservers: set --pservers or FLIGHTEDL_PSERVERS")
        held.write(
            [Put(self._keys.ps_desired, str(self._settings.pservers).encode())],
            [ModifiedAt(self._keys.ps_desired, 0)],
        )
        return self._settings.pservers


def run(chosen: MasterSettings) -> int:
    """Run a master in this process. Return the exit code."""
    return run_server(MasterProcess, chosen)
