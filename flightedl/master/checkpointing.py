"""Carries out the core's decisions about checkpoint files: writing manifests, moving the pointer, deleting files.

One thread carries out the operations in order. Each operation waits until the state that led to it has been stored in
etcd. The pointer is part of that state, so the same fenced transaction writes it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from msgspec.structs import replace

from flightedl.domain.checkpoint import manifest as manifests
from flightedl.domain.checkpoint.manifest import WRITER, Manifest, manifest_name
from flightedl.domain.checkpoint.values import MovePointer, Sweep, WriteManifest
from flightedl.domain.master.effects import Kind, StoreWork
from flightedl.domain.master.events import ManifestFailed, ManifestWritten, PointerStored
from flightedl.errors import NotFoundError, NotReadyError
from flightedl.master.state import JobState
from flightedl.messages.base import encode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import JobDeclaration
from flightedl.ports import Storage
from flightedl.process import machine, tracing

_log = logging.getLogger(__name__)

_DRAIN_SLICE_S = 0.25


class CheckpointStore:
    """Checkpoint files of one job. Thread-safe."""

    def __init__(self, storage: Storage | None, state: JobState, job: str) -> None:
        self._storage = storage
        self._state = state
        self._job = job
        self._work: queue.SimpleQueue[StoreWork | None] = queue.SimpleQueue()
        self._is_stopping = False
        #: Clusters of etcd whose jobs write here, as far as known: this job's, and those of which users were warned.
        self._known: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="flightedl-checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_stopping = True
        self._work.put(None)
        self._thread.join(5.0)

    def do(self, work: StoreWork) -> None:
        self._work.put(work)

    def drain(self, timeout_s: float, may_go_on: Callable[[], bool]) -> None:
        """Make a last checkpoint before this master exits. Keep trying as long as ``may_go_on`` returns True."""
        state = self._state
        deadline = state.clock.now() + timeout_s
        with state.lock:
            core = state.core
            ticket = core.ending.final_ticket
            is_saved = ticket is not None and core.checkpointing.checkpoints.is_satisfied(ticket)
            if not core.checkpointing.is_kept or core.members is None or core.has_former_model or is_saved:
                return
        ticket = None
        while (remaining := deadline - state.clock.now()) > 0 and may_go_on():
            wait_s = min(remaining, _DRAIN_SLICE_S)
            request = CheckpointRequest(ticket=ticket, reason="the master is shutting down", wait_s=wait_s)
            try:
                reply = state.ask(request, is_last=True)
            except NotReadyError:
                return
            ticket = reply.ticket
            with state.lock:
                if state.core.checkpointing.checkpoints.is_over(ticket):
                    return

    # the thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._is_stopping:
            if self._state.becomes_durable(lambda: self._is_stopping, work.revision):
                self._carry_out(work)

    def _carry_out(self, work: StoreWork) -> None:
        match work.work:
            case WriteManifest(number):
                self._write_manifest(number)
            case MovePointer(pointer):
                self._state.apply(PointerStored(pointer.number))
            case Sweep():
                self._sweep()

    def _write_manifest(self, number: int) -> None:
        storage, state = self._storage, self._state
        assert storage is not None, "checkpoints need a storage"
        with state.lock:
            if state.core.checkpointing.checkpoints.under_way != number:
                return
        try:
            with state.lock:
                manifest = self._manifest()
                data = manifest.encode()
            self._sign(storage)
            missing = _missing_file(storage, manifest)
            if not missing:
                with tracing.lasting("checkpoint", number), tracing.span("checkpoint.publish"):
                    storage.publish(manifest_name(number), [data])
        except Exception as error:  # noqa: BLE001 - the core must learn of any failure of a store
            state.apply(ManifestFailed(number, str(error) or type(error).__name__))
        else:
            if missing:
                text = f"{storage.url} lacks {missing}: mount one store on all machines"
                state.apply(ManifestFailed(number, text, lacks_file=True))
            else:
                state.apply(ManifestWritten(number, manifests.checksum(data)))
        finally:
            tracing.over("checkpoint", number)

    def _sign(self, storage: Storage) -> None:
        """Store which job writes here. Warn if another job has written since this master's previous checkpoint."""
        seen, at = self._state.sighting(), datetime.fromtimestamp(self._state.clock.wall_time(), UTC)
        if seen is None:
            return
        with suppress(NotFoundError):
            cluster, _, place = storage.read(WRITER).decode(errors="replace").partition(" ")
            # A successor of this master uses the same cluster. At the first checkpoint, the other job may have ended.
            if self._known and cluster not in self._known:
                self._known.add(cluster)
                text = f"another job also writes to {storage.url}: {place}. Stop it, or let it write to another URL"
                _log.warning("checkpoints: %s", text)
                self._state.journal.add(Kind.CHECKPOINT_TROUBLE, "", f"checkpoints: {text}", is_warning=True)
        mark = f"{seen.cluster} on host {machine.host_name()} at {at:%Y-%m-%d %H:%M:%S} UTC"
        storage.publish(WRITER, [mark.encode()])
        self._known.add(seen.cluster)

    def _manifest(self) -> Manifest:
        core = self._state.core
        model = core.declaration.model
        assert model is not None, "a checkpoint needs a model"
        return core.checkpointing.checkpoints.manifest(
            self._job,
            model.plan_hash,
            model.cut_for or model.pservers,
            encode(self._full_declaration()),
            None if core.work is None else core.work.queue.encode(),
            self._state.clock.wall_time(),
            core.evaluations.encode_results(),
            self._state.sighting(),
        )

    def _full_declaration(self) -> JobDeclaration:
        """Return the declaration and the files added later, which have keys in etcd that a resumed job lacks."""
        state = self._state
        arrivals = [] if state.dataset is None else list(state.dataset.arrivals)
        return replace(state.core.declaration, arrivals=arrivals)

    def _sweep(self) -> None:
        storage, state = self._storage, self._state
        assert storage is not None, "checkpoints need a storage"
        try:
            names = [file.name for file in storage.list("")]
            with state.lock:
                going = state.core.checkpointing.checkpoints.deletable(names)
            for name in going:
                storage.delete(name)
        except Exception as error:  # noqa: BLE001 - nothing waits for deletions, and the next sweep repeats them
            _log.warning("cannot delete old checkpoints now; they are deleted later: %s", error)


def _missing_file(storage: Storage, manifest: Manifest) -> str:
    """Return the name of a pserver's file that the store lacks, for example because a mount is missing; or empty."""
    seen = {(file.name, file.size_bytes) for file in storage.list("")}
    files = (file for shard in manifest.shards for file in shard.chain)
    return next((file.name for file in files if (file.name, file.size_bytes) not in seen), "")
