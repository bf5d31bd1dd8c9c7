"""Export the model to a file without trainers: the master makes a checkpoint, and reads the model from it.

Repeated requests for the same URL return the progress. The result or error is returned once, and then dropped. The
master holds only one parameter in memory at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from flightedl.adapters.patience import Persistence
from flightedl.coordination.checkpoint_places import export_model, export_table
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.domain.recovery.lives import name_in
from flightedl.domain.retries import PATIENT
from flightedl.errors import FlightedlError, NotFoundError, NotReadyError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints
from flightedl.formats.model_files import format_of
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest, SaveModelReply, SaveModelRequest
from flightedl.ports import Clock, Storage
from flightedl.process.background import Background

_log = logging.getLogger(__name__)

_SLICE_S = 1.0


class ModelExports:
    """The exports in progress. Thread-safe.

    Args:
        storage: Storage of the job's checkpoints.
        job: Name of the job.
        checkpoint: Orders a checkpoint, or waits for an existing order.
        require: Called right before a file is published. Raises an error if another master leads, to keep its file.
        clock: Clock for the delays between retries while a store fails.
    """

    def __init__(
        self,
        storage: Storage | None,
        job: str,
        checkpoint: Callable[[CheckpointRequest], CheckpointReply],
        require: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._storage = storage
        self._job = job
        self._checkpoint = checkpoint
        self._require = require
        self._lock = threading.Lock()
        self._exports: dict[str, Background[SaveModelReply]] = {}
        self._closing = threading.Event()
        self._persist = Persistence(PATIENT, clock, self._closing)

    def close(self) -> None:
        self._closing.set()

    def ask(self, request: SaveModelRequest) -> SaveModelReply:
        """Begin an export, or return the progress of an export that is already in progress.

        Raises:
            UsageError: the job writes no checkpoints, or the format is unknown.
        """
        if self._storage is None:
            if request.table:
                return SaveModelReply(state="live")
            raise UsageError("the model cannot be exported without checkpoints: start the job with --checkpoint URL")
        if not request.table:
            format_of(request.url, request.format)
        key = name_in(request.life, request.url)
        with self._lock:
            export = self._exports.get(key)
            if export is None:
                work = partial(self._write, self._storage, request)
                export = self._exports[key] = Background("export", work)
            try:
                reply = export.result()
            except FlightedlError as error:
                reply = SaveModelReply(state="failed", error=str(error))
            if reply is None:
                return SaveModelReply(state="writing")
            del self._exports[key]
            return reply

    def _write(self, storage: Storage, request: SaveModelRequest) -> SaveModelReply:
        number = self._new_checkpoint(request)
        return self._persist(partial(self._export, storage, request, number))

    def _export(self, storage: Storage, request: SaveModelRequest, number: int) -> SaveModelReply:
        found = found_checkpoints(storage, self._job)
        manifest = next((each for each in found if isinstance(each, Manifest) and each.number >= number), None)
        if manifest is None:
            raise NotFoundError("its checkpoint was already deleted")
        if request.table:
            where = export_table(
                storage, manifest, request.table, request.url, has_slots=request.slots, require=self._require
            )
        else:
            where = export_model(storage, manifest, request.url, request.format, self._require)
        _log.info("%s written where=%s checkpoint=%d", request.table or "model", where, manifest.number)
        return SaveModelReply(state="written", where=where, checkpoint=manifest.number)

    def _new_checkpoint(self, request: SaveModelRequest) -> int:
        ticket: int | None = None
        while not self._closing.is_set():
            reply = self._checkpoint(
                CheckpointRequest(ticket=ticket, reason=f"exporting the model to {request.url}", wait_s=_SLICE_S)
            )
            ticket = reply.ticket
            if reply.complete:
                return ticket
            if reply.trouble:
                raise NotReadyError(f"the checkpoint for exporting the model failed: {reply.trouble}")
        raise NotReadyError("the master is stepping down")
