"""Writing the model as one file without any trainer: the master reads it out of a checkpoint made for it.

Asking again for the same URL is asking how far it is, so a request may be repeated; what was written, or failed, is
told once and then forgotten. One parameter at a time is in the master's memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flightedl.coordination.checkpoint_places import export_model, export_table
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.errors import FlightedlError, NotReadyError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints
from flightedl.formats.model_files import format_of
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest, SaveModelReply, SaveModelRequest
from flightedl.ports import Storage

_log = logging.getLogger(__name__)

_SLICE_S = 1.0


class ModelExports:
    """The exports under way. Thread-safe.

    Args:
        storage: Where the job's checkpoints lie.
        job: The job's name.
        checkpoint: Orders a checkpoint, or waits for one.
        require: Asked right before a file appears; raises when another master leads, whose file is not replaced.
    """

    def __init__(
        self,
        storage: Storage | None,
        job: str,
        checkpoint: Callable[[CheckpointRequest], CheckpointReply],
        require: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._job = job
        self._checkpoint = checkpoint
        self._require = require
        self._lock = threading.Lock()
        self._states: dict[str, SaveModelReply] = {}
        self._is_closing = False

    def close(self) -> None:
        """Give up what waits for a checkpoint."""
        self._is_closing = True

    def ask(self, request: SaveModelRequest) -> SaveModelReply:
        """Begin, or say how far it is.

        Raises:
            UsageError: the job keeps no checkpoints, or the format is not known.
        """
        if self._storage is None:
            if request.table:
                return SaveModelReply(state="live")
            raise UsageError("this job keeps no checkpoints to take the model from: start it with --checkpoint URL")
        if not request.table:
            format_of(request.url, request.format)
        with self._lock:
            state = self._states.get(request.url)
            if state is not None and state.state != "writing":
                return self._states.pop(request.url)
            if state is None:
                state = self._states[request.url] = SaveModelReply(state="writing")
                threading.Thread(
                    target=self._write, args=(self._storage, request), name="flightedl-export", daemon=True
                ).start()
            return state

    def _write(self, storage: Storage, request: SaveModelRequest) -> None:
        try:
            number = self._new_checkpoint(request)
            manifest = next(
                found
                for found in found_checkpoints(storage, self._job)
                if isinstance(found, Manifest) and found.number >= number
            )
            if request.table:
                where = export_table(
                    storage, manifest, request.table, request.url, has_slots=request.slots, require=self._require
                )
            else:
                where = export_model(storage, manifest, request.url, request.format, self._require)
            state = SaveModelReply(state="written", where=where, checkpoint=manifest.number)
            _log.info("%s written where=%s checkpoint=%d", request.table or "model", where, manifest.number)
        except (FlightedlError, StopIteration) as error:
            state = SaveModelReply(state="failed", error=str(error) or "its checkpoint is gone already")
        with self._lock:
            self._states[request.url] = state

    def _new_checkpoint(self, request: SaveModelRequest) -> int:
        ticket: int | None = None
        while not self._is_closing:
            reply = self._checkpoint(
                CheckpointRequest(ticket=ticket, reason=f"the model is saved to {request.url}", wait_s=_SLICE_S)
            )
            ticket = reply.ticket
            if reply.complete:
                return ticket
            if reply.trouble:
                raise NotReadyError(f"no checkpoint can be made to take the model from: {reply.trouble}")
        raise NotReadyError("the master is stepping down")
