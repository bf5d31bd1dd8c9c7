"""How a simulated master takes over that has the lock: from what etcd says, or from a checkpoint, or from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flightedl.domain.checkpoint.chains import files_of
from flightedl.domain.checkpoint.checkpoints import Checkpoints, next_number_after
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, candidates, examine, manifest_name
from flightedl.domain.checkpoint.pointer import decode_pointer, latest_of
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.master.stored import Found, values_of_checkpoint
from flightedl.domain.master.stored import state_in as stored_state
from flightedl.domain.recovery.store_history import BeginLife, Refuse, Sighting, judge
from flightedl.errors import CorruptError, FencedError
from flightedl.messages.base import decode
from flightedl.messages.declarations import JobDeclaration
from flightedl.recording.recorded import recorded
from flightedl.testing.simulation.etcd import (
    DECLARATION,
    DONE,
    HISTORY,
    INIT,
    LOCK,
    STATE,
    History,
    Key,
    Transaction,
    state_in,
)
from flightedl.testing.simulation.job import declaration_of, tasks_of
from flightedl.testing.simulation.world import Action

if TYPE_CHECKING:
    from flightedl.testing.simulation.master import Master


class TakingOver:
    """Until there is a core, with which the master leads, or it ends."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._cluster, self._world = master.cluster, master.world
        self._etcd, self._store = master.cluster.etcd, master.cluster.store

    def begin(self) -> None:
        """Look for the newest checkpoint, and then at what etcd says."""
        self._find_newest(self._read)

    def _read(self, number: int, newest: Sighting | None) -> None:
        def read(found: dict[str, Key]) -> None:
            self._judge(state_in(found), found.get(HISTORY), number, newest)

        def failed() -> None:
            self._master.later(0.2, self.begin)

        self._world.call(self._master, self._etcd, self._etcd.read_all, "", read, failed)

    def _find_newest(self, done: Callable[[int, Sighting | None], None]) -> None:
        """The newest checkpoint, and etcd as it was then; 0: there is none, or it cannot be told."""
        store = self._store

        def unreachable() -> None:
            # That a store cannot be read while etcd goes back is what nobody promises to notice.
            self._master.later(0.2, self.begin) if self._etcd.has_gone_back else done(0, None)

        def look(numbers: Sequence[int]) -> None:
            def read(found: tuple[bytes, bool] | None) -> None:
                try:
                    manifest = None if found is None else Manifest.decode(found[0])
                except CorruptError:
                    manifest = None
                done(numbers[0], manifest.etcd) if manifest is not None else look(numbers[1:])

            if numbers:
                store.read(self._master, manifest_name(numbers[0]), read, unreachable)
            else:
                done(0, None)

        store.list(self._master, lambda sizes: look(candidates(sizes)), unreachable)

    def _judge(self, state: Found, history: Any, number: int, newest: Sighting | None) -> None:
        """Whether to go on from what etcd says, which may have gone back."""
        present = self._master.witness.seen
        assert present is not None, "etcd was asked a moment ago"
        record = History() if history is None else history.value
        next_number = _next_number(state)
        resume, fence = self._cluster.is_resumed, {LOCK: self._master.generation}
        match judge(present, record.life, record.cluster, next_number, number, newest, resume=resume):
            case Refuse(why):
                self._cluster.refused(self._master, why)
            case BeginLife(life, _):
                election = self._master.directory.get(INIT)
                going = (
                    *(STATE + name for name in state),
                    *((INIT,) if election is not None and election.lease is None else ()),
                )
                begun = Transaction(fence, {}, {HISTORY: History(life, present.cluster)}, going)
                self._write_first(begun, lambda: self._master.end(f"it has begun life {life} of the job"))
            case _ if not record.cluster:
                known = Transaction(fence, {}, {HISTORY: History(record.life, present.cluster)})
                self._write_first(known, lambda: self._go_on(state))
            case _:
                self._go_on(state)

    def _write_first(self, transaction: Transaction, then: Action) -> None:
        def answered(result: Any) -> None:
            then() if result[0] else self._master.end("it lost the lock before it led")

        def failed() -> None:
            self._master.end("etcd does not answer")

        self._world.call(self._master, self._etcd, self._etcd.transact, transaction, answered, failed)

    def _go_on(self, state: Found) -> None:
        if state:
            self._begin(state)
        else:
            self._begin_from_store()

    def _settings(self) -> CoreSettings:
        return CoreSettings(
            generation=self._master.generation,
            pserver_count=self._cluster.pserver_count,
            trainer_count=self._cluster.scenario.trainer_count,
            recovery=self._cluster.shape.recovery,  # type: ignore[arg-type]
            checkpoints=self._cluster.scenario.checkpoints,
            keeps_checkpoints=self._cluster.scenario.keeps_checkpoints,
        )

    def _begin(self, stored: Found) -> None:
        latest = latest_of(stored["checkpoints"][0]) if "checkpoints" in stored else None
        if latest is None or not self._cluster.shape.has_rows:
            self._begin_with(stored, ())
            return

        def read(found: tuple[bytes, bool] | None) -> None:
            self._begin_with(stored, () if found is None else files_of(latest, found[0]))

        self._store.read(self._master, manifest_name(latest.number), read, lambda: self._begin_with(stored, ()))

    def _begin_with(self, stored: Found, files: tuple[ShardFile, ...]) -> None:
        state = stored_state(stored, files)
        task_count = int(stored["tasks"][0]) if "tasks" in stored else tasks_of(state.declaration)
        self._take_over(state, task_count, stored)

    def _take_over(self, stored: StoredState, task_count: int, found: Found) -> None:
        tasks = self._cluster.shape.queue_settings(task_count)
        try:
            core = recorded(self._master.recorder, {}, MasterCore, self._settings(), self._world.now, stored, tasks)
        except FencedError:
            self._master.end("it heard late that it has the lock; a newer one had it since")
        else:
            self._master.lead(core, found)

    def _begin_from_store(self) -> None:
        """The job's etcd is new: go on from the newest checkpoint that there is."""

        def listed(sizes: dict[str, int]) -> None:
            self._choose(candidates(sizes), sizes, [])

        self._store.list(self._master, listed, self._begin_from_store_later)

    def _begin_from_store_later(self) -> None:
        self._master.later(0.2, self._begin_from_store)

    def _choose(self, numbers: tuple[int, ...], sizes: dict[str, int], rejected: list[int]) -> None:
        if not numbers:
            self._begin_new(None, sizes, rejected)
            return

        def read(found: tuple[bytes, bool] | None) -> None:
            result = None if found is None else examine(numbers[0], found[0], sizes, "job")
            if isinstance(result, Manifest):
                self._begin_new(result, sizes, rejected)
            else:
                self._choose(numbers[1:], sizes, [*rejected, numbers[0]])

        self._store.read(
            self._master, manifest_name(numbers[0]), read, lambda: self._master.later(0.2, self._begin_from_store)
        )

    def _begin_new(self, manifest: Manifest | None, sizes: dict[str, int], rejected: list[int]) -> None:
        shape, count, generation = self._cluster.shape, self._cluster.pserver_count, self._master.generation
        if manifest is None:
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
            self._take_over(new, shape.first_count, {})
            return
        saved = decode(bytes(manifest.declaration), JobDeclaration)
        assert saved.model is not None, "a checkpoint has a model"
        declaration = declaration_of(Mode.from_json(saved.model.present_mode), count, shape.cut_for)
        values = values_of_checkpoint(manifest, manifest.encode(), declaration, generation, count, sizes, rejected)
        values["tasks"] = str(tasks_of(saved)).encode()
        puts = {STATE + name: value for name, value in values.items()} | {INIT: DONE}
        begun = Transaction({LOCK: generation}, {DECLARATION: 0}, puts, writer=generation)
        self._write_first(begun, self.begin)


def _next_number(stored: Found) -> int | None:
    """The number of the next checkpoint, by what is stored; None: nothing is."""
    if "checkpoints" in stored:
        return decode_pointer(stored["checkpoints"][0]).next_number
    return 1 if stored else None
