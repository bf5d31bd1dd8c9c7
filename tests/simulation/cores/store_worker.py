"""A simulated master's work in the store, one operation at a time: writing manifests and deleting old files."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from flightedl.domain.checkpoint import values
from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import checksum, manifest_name
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.messages.base import encode
from tests.simulation.cores.job import with_tasks
from tests.simulation.cores.world import NoAnswerError, Steps

if TYPE_CHECKING:
    from tests.simulation.cores.master import Master


class StoreWorker:
    """Model of the thread that carries out a master's operations in the store."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._store = master.cluster.store
        self._waiting: list[out.StoreWork] = []
        self._is_busy = False

    def do(self, work: out.StoreWork) -> None:
        """Carry out this operation after all earlier ones."""
        self._waiting.append(work)
        if not self._is_busy:
            self._is_busy = True
            self._master.follow(self._work())

    def _work(self) -> Steps:
        while self._waiting:
            work = self._waiting.pop(0)
            yield lambda done, _, work=work: self._master.after_stored(work.revision, lambda: done(None))  # type: ignore[misc]
            match work.work:
                case values.WriteManifest(number) if self._checkpoints.under_way == number:
                    yield from self._write_manifest(number)
                case values.MovePointer(pointer):
                    self._master.apply(events.PointerStored(pointer.number))
                case values.Sweep():
                    yield from self._sweep()
        self._is_busy = False

    @property
    def _checkpoints(self) -> Checkpoints:
        return self._master.core.checkpointing.checkpoints

    def _write_manifest(self, number: int) -> Steps:
        core, queue = self._master.core, self._master.queue
        model = core.declaration.model
        assert model is not None, "a checkpoint is of a model"
        manifest = self._checkpoints.manifest(
            "job",
            model.plan_hash,
            model.cut_for,
            encode(with_tasks(core.declaration, queue.task_count)),
            queue.encode(),
            self._master.world.now,
            core.evaluations.encode_results(),
            self._master.witness.seen,
        )
        data = manifest.encode()
        try:
            yield lambda done, failed: self._store.publish(
                self._master, manifest_name(number), data, len(data), lambda: done(None), failed
            )
        except NoAnswerError:
            self._master.apply(events.ManifestFailed(number, "the store failed"))
        else:
            self._master.apply(events.ManifestWritten(number, checksum(data)))

    def _sweep(self) -> Steps:
        with suppress(NoAnswerError):
            sizes = yield partial(self._store.list, self._master)
            for name in self._checkpoints.deletable(list(sizes)):
                yield lambda done, failed, name=name: self._store.delete(  # type: ignore[misc]
                    self._master, name, lambda: done(None), failed
                )
