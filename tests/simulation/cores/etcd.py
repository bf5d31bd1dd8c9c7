"""A model of etcd: keys with revisions, leases, transactions, and watches that lag slightly.

* A lease is renewed, without messages, while etcd is up and the owner is alive, awake and connected. When renewals
  stop, the last one was up to a sixth of the time to live ago. The lease ends one time to live after that last renewal.
* If a lease is not renewed for part of its time to live (see ``domain.tenure``), its owner gives it up permanently.
* While etcd is down or frozen, no lease ends, and a restart extends all leases. A frozen etcd carries out pending
  requests when it wakes. By then, the clients have given up without knowing the outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from flightedl.domain.master.stored_moves import INTENT, PLACEMENT, StoredKey
from flightedl.domain.moving.values import Intent, StoredIntent, placement_in
from flightedl.domain.recovery.store_history import LIFE_REVISIONS, Sighting
from flightedl.domain.tenure import TRUSTED_PART
from flightedl.messages.base import decode
from flightedl.messages.declarations import JobDeclaration, Placement
from tests.simulation.cores.world import Process, Reply, Violation, World

LOCK = "master/lock"
ADDRESS = "master/addr"
#: Prefix of the keys with a master's state. A name from ``MasterCore.encode`` follows.
STATE = "state/"
DECLARATION, POINTER = STATE + "declaration", STATE + "checkpoints"
#: Number of pserver processes that the job needs; absent if it has never changed.
DESIRED = STATE + "desired"
#: Key of the trainer that provides the model's initial values. Its value is ``DONE`` once the model has them.
INIT = "init_params"
DONE = "done"
#: Key of the ``History``.
HISTORY = "history"
#: Maximum number of writes that are missing from a restored backup.
_KEPT = 400
_PSERVER = "ps/"
_STANDBY = "standbys/"


@dataclass(frozen=True, slots=True)
class History:
    """Life of the job, and the cluster on which that life began; an empty name if it is unknown."""

    life: int = 0
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """Current state of a key."""

    value: Any
    created: int
    modified: int
    lease: Lease | None


@dataclass(slots=True, eq=False)
class Lease:
    """A lease, and what its owner knows about it."""

    owner: Process
    ttl_s: float
    keys: set[str] = field(default_factory=set)
    #: Time of the last renewal; None while the lease is being renewed.
    last_s: float | None = None
    is_ended: bool = False
    is_lost: bool = False
    #: Incremented whenever renewals start or stop.
    epoch: int = 0

    def is_held(self) -> bool:
        if self.last_s is not None and self.owner.world.now - self.last_s >= self.ttl_s * TRUSTED_PART:
            self.is_lost = True
        return not self.is_lost


@dataclass(frozen=True, slots=True)
class Transaction:
    """Conditions (key -> revision of its creation or last change; 0 if absent), followed by writes and deletions."""

    created: Mapping[str, int] = field(default_factory=dict)
    modified: Mapping[str, int] = field(default_factory=dict)
    puts: Mapping[str, Any] = field(default_factory=dict)
    deletes: Sequence[str] = ()
    lease: Lease | None = None
    #: Generation of the master that writes its state, for checking the fence.
    writer: int = 0


def state_in(keys: Mapping[str, Key]) -> dict[str, tuple[bytes, int]]:
    """Return a master's stored state: name -> (value, revision of its last write)."""
    return {name.removeprefix(STATE): (key.value, key.modified) for name, key in keys.items() if name.startswith(STATE)}


def pointer_in(keys: Mapping[str, Key | None]) -> bytes | None:
    """Return the stored state of the master's checkpoints, or None."""
    key = keys.get(POINTER)
    return None if key is None else bytes(key.value)


def pservers_in(keys: Mapping[str, Key]) -> dict[int, Key]:
    """Return index -> the key of the pserver that holds it."""
    return {int(name.removeprefix(_PSERVER)): key for name, key in keys.items() if name.startswith(_PSERVER)}


def standbys_in(keys: Mapping[str, Key]) -> dict[int, int]:
    """Return index -> generation of the live standby of the pserver with this index."""
    return {int(name.removeprefix(_STANDBY)): key.created for name, key in keys.items() if name.startswith(_STANDBY)}


def standby_key(index: int) -> str:
    """Return the key of the standby of the pserver with this index."""
    return f"{_STANDBY}{index}"


def desired_in(keys: Mapping[str, Key]) -> int | None:
    """Return the number of pserver processes that the job needs, or None if it has never changed."""
    key = keys.get(DESIRED)
    return None if key is None else int(key.value)


def placement_read(keys: Mapping[str, Key | None]) -> Placement | None:
    """Return the newest placement in the job's keys, or None if no model is declared."""
    declared, stored = keys.get(DECLARATION), keys.get(PLACEMENT)
    return _placement(None if declared is None else declared.value, None if stored is None else stored.value)


@lru_cache(maxsize=64)
def _placement(declared: bytes | None, stored: bytes | None) -> Placement | None:
    return placement_in(None if declared is None else decode(declared, JobDeclaration).model, stored)


def intent_in(keys: Mapping[str, Key | None]) -> StoredIntent | None:
    """Return the stored intent to move blocks, or None."""
    key = keys.get(INTENT)
    return None if key is None else StoredIntent(key.created, decode(key.value, Intent))


def stored_moves_in(keys: Mapping[str, Key]) -> tuple[StoredKey | None, StoredKey | None]:
    """Return the keys of the placement and of the intent, or None for those that are absent."""
    placed, intent = (
        None if (key := keys.get(name)) is None else StoredKey(key.value, key.created, key.modified)
        for name in (PLACEMENT, INTENT)
    )
    return placed, intent


def claimed(result: Any, key: str, value: Any) -> int:
    """Return the revision at which this (possibly repeated) claim created ``key``, or 0 if another process holds it."""
    committed, revision, found = result
    if committed:
        return int(revision)
    entry = found[key]
    return entry.created if entry is not None and entry.value is value else 0


class Etcd(Process):
    """The simulated etcd. Processes call it, and ``review`` updates the leases."""

    is_asked_twice = False

    def __init__(self, world: World, cluster_number: int) -> None:
        super().__init__(world, "etcd")
        self.revision = 1
        self.keys: dict[str, Key] = {}
        self.is_down = False
        #: Number of the etcd cluster, which is also its id.
        self.cluster_number = cluster_number
        #: Life of the job to which the keys belong (see ``store_history``).
        self.life = 0
        #: True if etcd was restored from a backup and no master has continued from it yet.
        self.has_gone_back = False
        #: Index -> generations of the processes that have held it.
        self.holders: dict[int, list[int]] = {}
        #: (revision, keys) after each of the last writes.
        self.history: deque[tuple[int, dict[str, Key]]] = deque(maxlen=_KEPT)
        self._leases: list[Lease] = []
        self._watchers: dict[Process, Callable[[], None]] = {}

    # going back

    def sighting(self) -> Sighting:
        return Sighting(f"{self.cluster_number:016x}", self.revision)

    def restore(self, backup: tuple[int, dict[str, Key]], cluster_number: int) -> None:
        """Restore a backup with the leases that existed then. Leases without an owner end some time later."""
        self.revision, self.keys = backup[0], dict(backup[1])
        self.cluster_number = cluster_number
        record = self.keys.get(HISTORY)
        self.life = 0 if record is None else record.value.life
        self.has_gone_back = True
        self.holders.clear()
        self.history.clear()
        # A dict, because the order of a set would differ between runs of the same seed.
        kept = dict.fromkeys(key.lease for key in self.keys.values() if key.lease is not None)
        for lease in [lease for lease in self._leases if lease.keys and lease not in kept]:
            lease.is_ended = lease.is_lost = True
            self._leases.remove(lease)
        for lease in kept:
            lease.keys = {name for name, key in self.keys.items() if key.lease is lease}
            if lease.is_ended:
                lease.is_ended = False
                self._leases.append(lease)
                lease.epoch += 1
                self._end_later(lease, lease.ttl_s)
        self.review()
        self._changed("")

    def _begin_life(self, life: int) -> None:
        """Continue with the revisions of another life, which are higher than all earlier ones."""
        base = (life - self.life) * LIFE_REVISIONS
        self.life, self.has_gone_back = life, False
        self.revision += base
        self.holders.clear()
        self.history.clear()
        for name, key in self.keys.items():
            self.keys[name] = replace(key, created=key.created + base, modified=key.modified + base)

    def reply_for(self, source: Process, done: Reply) -> Reply:
        before = source.witness.seen
        return lambda value: done(value) if self._is_the_same(source, before) else None

    def _is_the_same(self, source: Process, before: Sighting | None) -> bool:
        """True if etcd has the same history as when the process last saw it. Otherwise end the process."""
        why = source.witness.saw(before, self.sighting())
        if not why and source.etcd_life not in {None, self.life}:
            why = "the job has begun another life"
        source.etcd_life = self.life
        if why and source.is_alive:
            source.end(why)
        return not why

    # requests

    def grant(self, owner: Process, ttl_s: float) -> Lease:
        """Return a new lease. The first transaction that uses it creates it."""
        lease = Lease(owner, ttl_s)
        self._leases.append(lease)
        return lease

    def transact(self, transaction: Transaction, reply: Reply) -> None:
        """Reply with (committed, revision, keys in the conditions)."""
        if self.is_down:
            return
        about = (*transaction.created, *transaction.modified)
        lease = transaction.lease
        committed = (
            all(self._created(key) == revision for key, revision in transaction.created.items())
            and all(self._modified(key) == revision for key, revision in transaction.modified.items())
            and (lease is None or not lease.is_ended)
        )
        if committed:
            self.revision += 1
            for key, value in transaction.puts.items():
                self._put(key, value, transaction)
            for key in transaction.deletes:
                self._remove(key)
            for key in transaction.puts:
                self._note_holder(key)
            if (record := transaction.puts.get(HISTORY)) is not None and record.life != self.life:
                self._begin_life(record.life)
            self.history.append((self.revision, dict(self.keys)))
        reply((committed, self.revision, {key: self.keys.get(key) for key in about}))

    def read(self, names: Sequence[str], reply: Reply) -> None:
        if not self.is_down:
            reply({name: self.keys.get(name) for name in names})

    def read_all(self, prefix: str, reply: Reply) -> None:
        if not self.is_down:
            reply({name: key for name, key in self.keys.items() if name.startswith(prefix)})

    def read_moves(self, _: None, reply: Reply) -> None:
        """Reply with (key of the placement, key of the intent, revision)."""
        if not self.is_down:
            reply((*stored_moves_in(self.keys), self.revision))

    def _created(self, key: str) -> int:
        found = self.keys.get(key)
        return 0 if found is None else found.created

    def _modified(self, key: str) -> int:
        found = self.keys.get(key)
        return 0 if found is None else found.modified

    def _put(self, key: str, value: Any, transaction: Transaction) -> None:
        if key.startswith(STATE) and transaction.writer != self._created(LOCK):
            raise Violation(f"master {transaction.writer} wrote its state after it was deposed")
        before = self.keys.get(key)
        created = self.revision if before is None else before.created
        if before is not None and before.lease is not None:
            before.lease.keys.discard(key)
        self.keys[key] = Key(value, created, self.revision, transaction.lease)
        if transaction.lease is not None:
            transaction.lease.keys.add(key)
        self._changed(key)

    def _note_holder(self, key: str) -> None:
        """Record the new holder of an index. Raise Violation if the index has a standby that did not claim it."""
        if key.startswith(_PSERVER):
            index = int(key.removeprefix(_PSERVER))
            self.holders.setdefault(index, []).append(self.keys[key].created)
            if standby_key(index) in self.keys:
                raise Violation(f"{self.keys[key].value} has claimed index {index}, whose standby is alive")

    def _delete(self, key: str) -> None:
        if key in self.keys:
            self.revision += 1
            self._remove(key)

    def _remove(self, key: str) -> None:
        found = self.keys.pop(key, None)
        if found is not None:
            if found.lease is not None:
                found.lease.keys.discard(key)
            self._changed(key)

    def steal(self, key: str) -> None:
        """Delete a key as an operator would, while its owner is alive."""
        self._delete(key)

    # leases

    def review(self) -> None:
        """Start or stop renewals after a change that affects leases."""
        is_up = not self.is_down and not self.is_frozen
        for lease in self._leases:
            owner = lease.owner
            renews = is_up and owner.is_alive and not owner.is_frozen and self.world.is_connected(owner, self)
            if renews and lease.last_s is not None and not lease.is_lost:
                lease.is_held()
                if not lease.is_lost:
                    lease.last_s = None
                    lease.epoch += 1
            elif not renews and lease.last_s is None:
                lease.last_s = self.world.now - self.world.random.random() * lease.ttl_s / 6
                lease.epoch += 1
                self._end_later(lease, lease.last_s + lease.ttl_s - self.world.now)

    def _end_later(self, lease: Lease, delay_s: float) -> None:
        epoch = lease.epoch

        def end() -> None:
            if lease.epoch != epoch or lease.is_ended:
                return
            if self.is_down or self.is_frozen:
                self._end_later(lease, lease.ttl_s)
            else:
                self.revoke(lease)

        self.world.after(max(delay_s, 0.0), end)

    def revoke(self, lease: Lease) -> None:
        lease.is_ended = True
        lease.is_lost = True
        for key in sorted(lease.keys):
            self._delete(key)
        if lease in self._leases:
            self._leases.remove(lease)

    # what processes see

    def watch(self, process: Process, changed: Callable[[], None]) -> None:
        """Call ``changed`` a little after each change, when the process sees the new ``directory``."""
        self._watchers[process] = changed
        self._notify(process)

    def _changed(self, key: str) -> None:
        if not key.startswith(STATE) or key == DESIRED:
            for process in tuple(self._watchers):
                if process.is_alive:
                    self._notify(process)
                else:
                    del self._watchers[process]

    def _notify(self, process: Process) -> None:
        def look() -> None:
            if self.is_down or self.is_frozen or not self.world.is_connected(process, self):
                self.world.after(0.5, lambda: process.deliver(look))
            elif self._is_the_same(process, process.witness.seen):
                process.directory, process.directory_revision = dict(self.keys), self.revision
                self._watchers[process]()

        latency_s = 0.002 + 0.02 * self.world.random.random()
        self.world.after(latency_s, lambda: process.deliver(look))
