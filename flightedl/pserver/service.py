"""A pserver's life: wait for the job's declaration, for first values, then serve; and its view of the members.

States, in order: ``waiting for the model``, ``waiting for first values``, ``serving``. A pserver that finds the
election already done, but has no values, is a replacement without a checkpoint: the values are gone with its
predecessor, and the job has failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.modes import Mode
from flightedl.domain.optimizers import Optimizer
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import plan_shards
from flightedl.errors import NotReadyError
from flightedl.pserver.shard import ShardState
from flightedl.wire.messages import (
    ElectionRecord,
    JobDeclaration,
    ModelReply,
    PserverStatusReply,
    ViewReply,
    ViewRequest,
    decode,
)

_log = logging.getLogger(__name__)


class PserverService:
    """One pserver's state beside its blocks. Thread-safe."""

    def __init__(self, directory: Directory, keys: JobKeys, fail: Callable[[str], None]) -> None:
        #: -1 until one is taken; nothing is served before.
        self._index = -1
        self._directory = directory
        self._keys = keys
        self._fail = fail
        self._lock = threading.Lock()
        #: Held while the shard is built, which compiles kernels; only one is ever built.
        self._building = threading.Lock()
        self._shard: ShardState | None = None
        self._is_serving = False
        #: The newest view, kept for a model that is declared later.
        self._view: ViewRequest | None = None

    def take_index(self, index: int) -> None:
        """This pserver holds ``index`` from now on."""
        self._index = index

    # what the directory tells

    def look_at_job(self) -> None:
        """The ``job`` key may have changed: build the shard when the model is declared."""
        entry = self._directory.entry(self._keys.job)
        declared = None if entry is None else decode(entry.value, JobDeclaration).model
        if declared is None:
            return
        with self._building:
            if self._shard is None:
                self._build(declared)

    def _build(self, declared: ModelReply) -> None:
        specs = [ParameterSpec(p.name, tuple(p.shape), p.dtype) for p in declared.declaration.parameters]
        plan = plan_shards(specs, declared.pservers)
        if plan.hash != declared.plan_hash:
            self._fail("this pserver computes another shard plan: run the same flightedl version everywhere")
            return
        shard = ShardState(
            plan,
            self._index,
            Optimizer.from_json(declared.declaration.optimizer),
            Mode.from_json(declared.declaration.mode),
        )
        with self._lock:
            self._shard = shard
            if self._view is not None:
                shard.set_members(self._view)
        _log.info("model declared blocks=%d size_bytes=%d", shard.block_count, shard.size_bytes_total)

    def look_at_election(self) -> None:
        """The ``init_params`` key may have changed: serve when the first values are complete and final."""
        shard = self._shard
        if shard is None or self._is_serving:
            return
        entry = self._directory.entry(self._keys.init_params)
        if entry is None or not decode(entry.value, ElectionRecord).done:
            return
        if shard.initialized_count(entry.create_revision) == shard.block_count:
            self._is_serving = True
            _log.info("serving election=%d", entry.create_revision)
        else:
            self._fail(
                f"the values of pserver {self._index} are gone with its predecessor and there is no checkpoint: "
                "start the job anew"
            )

    # what trainers ask

    def shard(self, plan_hash: str) -> ShardState:
        """The shard, to push to and pull from."""
        shard = self.shard_for_init(plan_hash)
        if not self._is_serving:
            self.look_at_election()
            if not self._is_serving:
                raise NotReadyError(f"pserver {self._index} waits for the first values of the model")
        return shard

    def shard_for_init(self, plan_hash: str) -> ShardState:
        """The shard, also before it has values."""
        if self._shard is None:
            self.look_at_job()
        shard = self._shard
        if shard is None:
            raise NotReadyError(f"pserver {self._index} has not heard of the model yet")
        shard.require_plan(plan_hash)
        return shard

    # what the master asks

    def take_view(self, view: ViewRequest) -> ViewReply:
        """Adopt a newer view; joins are refused for rounds that have already gone by."""
        with self._lock:
            known = self._view
            if known is not None and (view.master_generation, view.serial) < (known.master_generation, known.serial):
                return ViewReply(serial=view.serial, outdated=True)
            self._view = view
            shard = self._shard
            if shard is None:
                return ViewReply(serial=view.serial)
            verdict = shard.set_members(view)
        shard.announce_changes()
        return ViewReply(
            serial=view.serial,
            refused=list(verdict.refused),
            highest_open_round=shard.highest_open_round(),
            outdated=verdict.is_outdated,
        )

    def status(self) -> PserverStatusReply:
        """What this pserver says of itself."""
        shard = self._shard
        if shard is None:
            waiting, counts, versions = "the model to be declared", None, (0, 0)
        else:
            waiting = "" if self._is_serving else "the first values of the model"
            counts, versions = shard.counts, shard.version_range()
        return PserverStatusReply(
            index=self._index,
            state="serving" if self._is_serving else "waiting",
            blocks=0 if shard is None else shard.block_count,
            lowest_version=versions[0],
            highest_version=versions[1],
            size_bytes=0 if shard is None else shard.size_bytes_total,
            pushes=0 if counts is None else counts.messages,
            rows_accepted=0 if counts is None else counts.accepted,
            rows_repeated=0 if counts is None else counts.repeated,
            rows_refused=0 if counts is None else counts.refused,
            members=[] if self._view is None else [m.member for m in self._view.members],
            waiting_for=waiting,
        )
