"""Takeover by a simulated master that has the lock: from etcd's state, from a checkpoint, or from scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flightedl.domain.checkpoint.chains import files_of
from flightedl.domain.checkpoint.checkpoints import Checkpoints, next_number_after
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, candidates, examine, manifest_name
from flightedl.domain.checkpoint.pointer import decode_pointer, latest_of
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.master.stored import Found, values_of_checkpoint
from flightedl.domain.master.stored import state_in as stored_state
from flightedl.domain.master.stored_moves import INTENT, PLACEMENT, moves_in
from flightedl.domain.recovery.store_history import BeginLife, Refuse, judge
from flightedl.errors import CorruptError, FencedError
from flightedl.messages.base import decode
from flightedl.messages.declarations import JobDeclaration
from flightedl.recording.recorded import recorded
from tests.simulation.cores.etcd import (
    DECLARATION,
    DESIRED,
    DONE,
    HISTORY,
    INIT,
    LOCK,
    STATE,
    History,
    Key,
    Transaction,
    state_in,
    stored_moves_in,
)
from tests.simulation.cores.job import declaration_of, tasks_of
from tests.simulation.cores.world import Ask, NoAnswerError, Steps

if TYPE_CHECKING:
    from tests.simulation.cores.master import Master


class TakingOver:
    """The steps after which a master either leads with a core or exits."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._cluster, self._world = master.cluster, master.world
        self._etcd, self._store = master.cluster.etcd, master.cluster.store

    def steps(self) -> Steps:
        """Look for the newest checkpoint, then look at etcd's state, which may come from an older backup."""
        found, number, newest = yield from self._until_answered(self._look)
        state, history = state_in(found), found.get(HISTORY)
        present = self._master.witness.seen
        assert present is not None, "etcd has answered just now"
        record = History() if history is None else history.value
        resume, fence = self._cluster.is_resumed, {LOCK: self._master.generation}
        match judge(present, record.life, record.cluster, _next_number(state), number, newest, resume=resume):
            case Refuse(why):
                self._cluster.refused(self._master, why)
            case BeginLife(life, _):
                election = self._master.directory.get(INIT)
                going = (
                    *(STATE + name for name in state if STATE + name != DESIRED),
                    *(name for name in (PLACEMENT, INTENT) if name in found),
                    *((INIT,) if election is not None and election.lease is None else ()),
                )
                begun = Transaction(fence, {}, {HISTORY: History(life, present.cluster)}, going)
                if (yield from self._is_written(begun)):
                    self._master.end(f"it has begun life {life} of the job")
            case _:
                known = Transaction(fence, {}, {HISTORY: History(record.life, present.cluster)})
                if record.cluster or (yield from self._is_written(known)):
                    is_begun, begin = DECLARATION in found, partial(self._begin_from_store, state)
                    yield from self._go_on(state, found) if is_begun else self._until_answered(begin)

    def _until_answered(self, steps: Callable[[], Steps]) -> Steps:
        while True:
            try:
                return (yield from steps())
            except NoAnswerError:
                yield self._master.pauses(0.2)

    def _read(self, name: str) -> Ask:
        return partial(self._store.read, self._master, name)

    def _list(self) -> Ask:
        return partial(self._store.list, self._master)

    def _look(self) -> Steps:
        number, newest = yield from self._newest()
        return (yield self._master.asks(self._etcd, self._etcd.read_all, "")), number, newest

    def _newest(self) -> Steps:
        """Return the newest readable checkpoint's number and its record of etcd's state; 0 if there is none."""
        try:
            for number in candidates((yield self._list())):
                found = yield self._read(manifest_name(number))
                with suppress(CorruptError):
                    if found is not None:
                        return number, Manifest.decode(found[0]).etcd
        except NoAnswerError:
            # While the store is unreadable, detection of an older etcd is not guaranteed.
            if self._etcd.has_gone_back:
                raise
        return 0, None

    def _is_written(self, transaction: Transaction) -> Steps:
        """True if the transaction is committed. Otherwise end the master."""
        try:
            committed, *_ = yield self._master.asks(self._etcd, self._etcd.transact, transaction)
        except NoAnswerError:
            self._master.end("etcd does not answer")
            return False
        if not committed:
            self._master.end("it lost the lock before it led")
        return committed

    def _go_on(self, stored: Found, keys: Mapping[str, Key]) -> Steps:
        latest = latest_of(stored["checkpoints"][0]) if "checkpoints" in stored else None
        files: tuple[ShardFile, ...] = ()
        if latest is not None and self._cluster.shape.has_rows:
            with suppress(NoAnswerError):
                found = yield self._read(manifest_name(latest.number))
                files = () if found is None else files_of(latest, found[0])
        placed, intent = stored_moves_in(keys)
        moves = moves_in(placed, intent, 0)
        state = replace(stored_state(stored, files), placement=moves.placement, intent=moves.stored)
        task_count = int(stored["tasks"][0]) if "tasks" in stored else tasks_of(state.declaration)
        self._lead(state, task_count, stored, 0 if placed is None else placed.modified)

    def _lead(self, stored: StoredState, task_count: int, found: Found, placed_at: int = 0) -> None:
        settings = CoreSettings(
            generation=self._master.generation,
            pserver_count=self._cluster.desired,
            trainer_count=self._cluster.scenario.trainer_count,
            recovery=self._cluster.shape.recovery,  # type: ignore[arg-type]
            checkpoints=self._cluster.scenario.checkpoints,
            keeps_checkpoints=self._cluster.scenario.keeps_checkpoints,
            rebalance_s=self._cluster.scenario.rebalance_s,
        )
        tasks = self._cluster.shape.queue_settings(task_count)
        try:
            core = recorded(self._master.recorder, {}, MasterCore, settings, self._world.now, stored, tasks)
        except FencedError:
            self._master.end("it learned too late that it had the lock; a newer master has had it since")
        else:
            self._master.lead(core, found, placed_at)

    def _begin_from_store(self, stored: Found) -> Steps:
        """Start from a new etcd, with the newest checkpoint if there is one."""
        shape, count, generation = self._cluster.shape, self._cluster.desired, self._master.generation
        sizes: dict[str, int] = yield self._list()
        rejected: list[int] = []
        for number in candidates(sizes):
            found = yield self._read(manifest_name(number))
            manifest = None if found is None else examine(number, found[0], sizes, "job")
            if isinstance(manifest, Manifest):
                break
            rejected.append(number)
        else:
            checkpoints = Checkpoints(
                self._cluster.scenario.checkpoints,
                generation,
                count,
                self._world.now,
                next_number=next_number_after(list(sizes)),
                rejected=rejected,
            )
            declaration = declaration_of(shape.mode, count, shape.cut_for)
            new = StoredState(declaration=declaration, checkpoints=checkpoints.encode(), is_resumed=True)
            self._lead(new, shape.first_count, stored)
            return
        saved = decode(bytes(manifest.declaration), JobDeclaration)
        assert saved.model is not None, "a checkpoint belongs to a model"
        mode, before = Mode.from_json(saved.model.present_mode), saved.model.placement
        declaration = declaration_of(mode, count, shape.cut_for, 1 + (0 if before is None else before.version))
        values = values_of_checkpoint(manifest, manifest.encode(), declaration, generation, count, sizes, rejected)
        values["tasks"] = str(tasks_of(saved)).encode()
        puts = {STATE + name: value for name, value in values.items()} | {INIT: DONE}
        if (yield from self._is_written(Transaction({LOCK: generation}, {DECLARATION: 0}, puts, writer=generation))):
            yield from self.steps()


def _next_number(stored: Found) -> int | None:
    """Return the next checkpoint's number according to the stored state, or None if no state is stored."""
    if "checkpoints" in stored:
        return decode_pointer(stored["checkpoints"][0]).next_number
    return 1 if "declaration" in stored else None
