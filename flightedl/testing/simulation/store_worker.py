"""What a simulated master does in the store, one thing after the other: manifests, and sweeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flightedl.domain.checkpoint import values
from flightedl.domain.checkpoint.manifest import checksum, manifest_name
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.messages.base import encode
from flightedl.testing.simulation.job import with_tasks

if TYPE_CHECKING:
    from flightedl.testing.simulation.master import Master


class StoreWorker:
    """As the thread of a master that works in the store."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._waiting: list[out.StoreWork] = []
        self._is_busy = False

    def do(self, work: out.StoreWork) -> None:
        """Carry this out, after all before it."""
        self._waiting.append(work)
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        work = self._waiting.pop(0)
        self._master.after_stored(work.revision, lambda: self._do(work))

    def _done(self) -> None:
        self._is_busy = False
        self._next()

    def _do(self, work: out.StoreWork) -> None:
        match work.work:
            case values.WriteManifest(number):
                self._write_manifest(number)
            case values.MovePointer(pointer):
                self._master.apply(events.PointerStored(pointer.number))
                self._done()
            case values.Sweep():
                self._sweep()

    def _write_manifest(self, number: int) -> None:
        checkpoints = self._master.core.checkpointing.checkpoints
        if checkpoints.under_way != number:
            self._done()
            return
        model = self._master.core.declaration.model
        assert model is not None, "a checkpoint is of a model"
        declaration = encode(with_tasks(self._master.core.declaration, self._master.queue.task_count))
        manifest = checkpoints.manifest(
            "job",
            model.plan_hash,
            model.cut_for,
            declaration,
            self._master.queue.encode(),
            self._master.world.now,
            self._master.core.evaluations.encode_results(),
            self._master.witness.seen,
        )
        data = manifest.encode()

        def done() -> None:
            self._master.apply(events.ManifestWritten(number, checksum(data)))
            self._done()

        def failed() -> None:
            self._master.apply(events.ManifestFailed(number, "the store failed"))
            self._done()

        self._master.cluster.store.publish(self._master, manifest_name(number), data, len(data), done, failed)

    def _sweep(self) -> None:
        def listed(sizes: dict[str, int]) -> None:
            self._delete(self._master.core.checkpointing.checkpoints.deletable(list(sizes)))

        self._master.cluster.store.list(self._master, listed, self._done)

    def _delete(self, names: tuple[str, ...]) -> None:
        if names:
            rest = names[1:]
            self._master.cluster.store.delete(self._master, names[0], lambda: self._delete(rest), self._done)
        else:
            self._done()
