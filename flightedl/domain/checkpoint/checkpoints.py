"""The master's side of checkpoints: when one is ordered, and how it becomes complete or is given up.

**One checkpoint** goes through these states; a step is taken only when the one before it is known to be done:

1. *ordered*: it gets a number, which is stored under the master's fence before anybody hears of it. So no two masters
   ever share a number, whatever a deposed one still does. Each pserver is asked to copy its blocks: in sync mode at
   one round, "now" in the other modes. A pserver that is past the round refuses, and a later round is proposed to all,
   with a margin that doubles. A round that is not reached in ``patience_s``, as when training pauses, is given up for
   "now". If no member is left to reach it, the highest round that was reached is proposed, and half a second later
   "now".
2. *publishing*: all files are written and reported; the manifest is written.
3. *pointing*: ``checkpoint/latest`` is moved, in a transaction under the master's fence.
4. *complete*: what retention allows is deleted.

Whatever goes wrong before 3 leaves the last checkpoint as it was; another is ordered, under another number. A manifest
that cannot be written is tried again, for it holds nothing that grows old. Training never waits for any of this.

**Why it is exact.** What a checkpoint has of a block is one state of it: values, slots, version, and the batches that
are in those values, no more and no fewer. Batches that wait in an accumulator are not in it. So each block may be
restored from any state that it ever had, and pushed to again: what it has is answered "already applied", what it lacks
is applied. The task queue is then made to fit: for every pserver p that comes back, ``reopen(done - applied(p))``.
After that

    done ⊆ applied(p) for every p, and every task that is not done is going to be dispatched.

So every batch gets everywhere, once. This holds with *any* state of the queue of the same dataset: one that is older
than the blocks says too little is done, which is dispatched again and answered "already applied"; one that is newer
says too much, which is reopened. The applied sets are the truth, and the queue's state in the manifest only saves work.
It is taken when the last pserver has reported. That all blocks are at one round in sync mode is not needed for it
either: it is for those who read the model, and for ``recovery="rollback"``.

Tasks that are out in the queue's stored state belong to trainers which are gone; a master that restores it gives them
back: ``for trainer in queue.holders(): queue.trainer_gone(trainer, now, is_graceful=True)``.

**After a crash of the master** its successor goes on from ``encode``: numbers go on, the pointer is where it was, and
whatever was under way is forgotten. Files of it stay until retention passes their number. Chains go on, too, where the
manifest of the newest checkpoint can be read (``chains``).

**The last checkpoint** of a job is waited for (``request_last``): what it has is nowhere else. A pserver that goes away
or is late is no reason to do without it, for its successor makes another one; a store that has refused it several
times is.

Not guaranteed: that a checkpoint is ever complete while the store fails or pservers keep dying; ``trouble`` and
``age_s`` tell. Two jobs of one name that write to one place with different etcds are not kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from flightedl.domain.checkpoint import manifest as manifests
from flightedl.domain.checkpoint.chains import Chains, Offer
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, shard_name
from flightedl.domain.checkpoint.pointer import FORMAT, PointerRecord, decode_pointer
from flightedl.domain.checkpoint.values import (
    Alarm,
    CheckpointSettings,
    Effects,
    MovePointer,
    OpenRounds,
    OrderSnapshot,
    Persist,
    Pointer,
    Sweep,
    WriteManifest,
)
from flightedl.domain.recovery.store_history import Sighting
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest

_MARGIN_LIMIT = 1024
_REJECTED_LIMIT = 64
#: So often the open round is proposed where a checkpoint is waited for: what is known of it may be old.
_OPEN_PROPOSALS = 3
#: Time in which pservers hear of the highest round, and of the members that have left it.
_PATIENCE_WITHOUT_MEMBERS_S = 0.5
#: A last checkpoint that the store has refused so often in a row is not waited for any longer.
_STORE_FAILURES_LIMIT = 3


@dataclass(slots=True)
class _Ordered:
    """State 1."""

    number: int
    serial: int
    round: int | None
    since_s: float
    #: Members of the generations that it was sent to.
    generations: dict[int, int]
    reason: str
    #: Checkpoints that were known to be unusable.
    rejected: tuple[int, ...]
    #: Maybe by who would have to reach the next round.
    is_waited_for: bool
    taken: set[int] = field(default_factory=set)
    files: dict[int, ShardFile] = field(default_factory=dict)


@dataclass(slots=True)
class _Publishing:
    """States 2 and 3."""

    number: int
    round: int | None
    files: tuple[ShardFile, ...]
    reason: str
    #: When to try the manifest again; None: it is being written, or done.
    retry_at_s: float | None = None
    is_pointing: bool = False


class Checkpoints:
    """Orders checkpoints and sees them through. Not thread-safe.

    Args:
        settings: When, and how many.
        master_generation: Of this master.
        pserver_count: Pservers, all of which take part.
        now: The instant; intervals begin here.
        next_number: Above every number in the storage: for a job whose etcd is new.
        latest: The checkpoint that such a job was restored from.
        rejected: Checkpoints that could not be loaded.
        first: The first one that the pointer named. Lower ones were never pointed to: their masters died on the way,
            and the model may have got other first values since.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        master_generation: int,
        pserver_count: int,
        now: float,
        *,
        next_number: int = 1,
        latest: Pointer | None = None,
        rejected: Collection[int] = (),
        first: int = 0,
    ) -> None:
        self._settings = settings
        self._master_generation = master_generation
        self._pserver_count = pserver_count
        self._next_number = next_number
        self._latest = latest
        self._first = first
        #: The newest pointer that is known to be stored.
        self._stored_latest = latest
        self._rejected = sorted(rejected)[-_REJECTED_LIMIT:]
        self._chains = Chains(settings.increments, settings.keep_every)
        self._pservers: dict[int, int] = {}
        self._work: _Ordered | _Publishing | None = None
        #: Why a checkpoint is wanted beside the interval; empty: nobody asked.
        self._wanted = ""
        self._is_waited_for = False
        self._last_begun_s = now
        self._last_complete_s = now
        self._tasks_since = 0
        self._margin = 1
        self._highest_round = 0
        self._not_before_s = now
        self._failures = 0
        self._trouble = ""
        #: Attempts in a row that the store made fail, and whether one of them ended after ``request_last``.
        self._store_failures = 0
        self._has_store_failed_at_last = False

    # what is known

    @property
    def latest(self) -> Pointer | None:
        """The newest complete checkpoint whose pointer is stored."""
        return self._stored_latest

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def trouble(self) -> str:
        """What keeps checkpoints from being completed; empty: nothing."""
        return self._trouble

    @property
    def may_be_saved(self) -> bool:
        """Whether there is a complete checkpoint, or one whose manifest may be in the store already."""
        return self._latest is not None or isinstance(self._work, _Publishing)

    @property
    def under_way(self) -> int | None:
        return None if self._work is None else self._work.number

    def age_s(self, now: float) -> float:
        """Since the last checkpoint was complete, or since the start of this master."""
        return now - self._last_complete_s

    def is_satisfied(self, ticket: int) -> bool:
        """Whether a checkpoint that was begun after ``request`` gave this ticket is complete."""
        return self._stored_latest is not None and self._stored_latest.number >= ticket

    def is_over(self, ticket: int) -> bool:
        """Whether ``request_last``, which gave this ticket, need not be waited for any longer.

        Either the checkpoint is complete, or the store, and nothing else, has failed again and again, also since.
        """
        is_hopeless = self._has_store_failed_at_last and self._store_failures >= _STORE_FAILURES_LIMIT
        return self.is_satisfied(ticket) or is_hopeless

    # what happens

    def pserver_up(self, index: int, generation: int, now: float) -> Effects:
        """A pserver serves, and what it has was taken into the queue's account. Told again: nothing changes."""
        known = self._pservers.get(index)
        if known == generation:
            return ()
        self._pservers[index] = generation
        return self._replaced(index, now)

    def pserver_down(self, index: int, now: float) -> Effects:
        """A pserver's lease ended; nothing is ordered before all are up."""
        if self._pservers.pop(index, None) is None:
            return ()
        return self._replaced(index, now)

    def _replaced(self, index: int, now: float) -> Effects:
        work = self._work
        if isinstance(work, _Ordered) and index not in work.files:
            return self._give_up(now, f"pserver {index} went away while it made checkpoint {work.number}")
        return ()

    def rejected(self, numbers: Collection[int]) -> None:
        """A pserver could not load these: they do not count among those that are kept. Stored with ``encode``."""
        self._rejected = sorted({*self._rejected, *numbers})[-_REJECTED_LIMIT:]

    def request(self, reason: str, *, is_waited_for: bool = False) -> int:
        """Somebody wants a checkpoint of what there is now; returns a ticket for ``is_satisfied``.

        ``is_waited_for``: maybe by who would have to reach the next round, so the open one is proposed first.
        """
        self._wanted = reason
        self._is_waited_for = self._is_waited_for or is_waited_for
        return self._next_number

    def request_last(self, reason: str) -> int:
        """As ``request``, for a checkpoint that somebody waits for: no pause after a failure delays its first try."""
        self._not_before_s = -math.inf
        self._has_store_failed_at_last = False
        if isinstance(self._work, _Publishing) and self._work.retry_at_s is not None:
            self._work.retry_at_s = -math.inf
        return self.request(reason)

    def epoch_finished(self, epoch: int) -> None:
        if self._settings.at_epoch_end:
            self.request(f"the end of epoch {epoch + 1}")

    def tasks_finished(self, count: int = 1) -> None:
        self._tasks_since += count

    def tick(self, now: float, rounds: OpenRounds | None) -> Effects:
        """Time passes: call it every second or so.

        Args:
            now: The instant.
            rounds: None: there are no rounds in this mode, copies are taken at once.
        """
        if rounds is not None:
            self._highest_round = max(self._highest_round, rounds.highest)
        match self._work:
            case None:
                return self._begin(now, rounds) if self._is_due(now) else ()
            case _Publishing(retry_at_s=retry_at_s) as work:
                if retry_at_s is None or now < retry_at_s:
                    return ()
                work.retry_at_s = None
                return (WriteManifest(work.number),)
            case _Ordered() as work:
                return self._next_action(work, now, rounds)

    def _next_action(self, work: _Ordered, now: float, rounds: OpenRounds | None) -> Effects:
        """Propose another round for an order whose own is not reached, or give the order up."""
        waited_s, patience_s = now - work.since_s, self._settings.patience_s
        is_left = rounds is not None and not rounds.has_members
        if is_left:
            # A trainer that left within a round may have opened the next one on some pservers only.
            patience_s = min(patience_s, _PATIENCE_WITHOUT_MEMBERS_S)
        if work.round is not None and waited_s > patience_s and len(work.taken) < self._pserver_count:
            return self._propose(work, None, now)
        if is_left and work.round is not None and work.round > self._highest_round:
            # Those who were to reach it have left, as at the end of a job.
            return self._propose(work, self._highest_round, now)
        if waited_s <= self._settings.give_up_s:
            return ()
        late = [index for index in range(self._pserver_count) if index not in work.files]
        if work.taken.issuperset(late):
            # All have their copies: what takes so long is the store.
            self._store_failed()
        return self._give_up(now, f"pserver {', '.join(map(str, late))} did not write checkpoint {work.number} in time")

    def progressed(self, index: int, generation: int, progress: SnapshotReply, now: float) -> Effects:
        """A pserver told how far it is. What is not about the present order is ignored."""
        work = self._work
        if not isinstance(work, _Ordered) or work.generations.get(index) != generation:
            return ()
        if progress.order != self._order(work):
            return ()
        self._highest_round = max(self._highest_round, progress.highest_open_round)
        if progress.state == "refused" and work.is_waited_for and work.serial < _OPEN_PROPOSALS:
            return self._propose(work, self._highest_round, now)
        if progress.state == "refused":
            self._margin = min(2 * self._margin, _MARGIN_LIMIT)
            return self._propose(work, self._highest_round + self._margin, now)
        if progress.state == "failed":
            self._store_failed()
            return self._give_up(now, f"pserver {index} could not write checkpoint {work.number}: {progress.reason}")
        if progress.state in {"taken", "written"}:
            work.taken.add(index)
        if progress.file is not None:
            file = ShardFile.of(index, generation, progress.file)
            linked = self._chains.linked(file, self._offer(work, index))
            if linked is None:
                return self._give_up(now, f"pserver {index} built checkpoint {work.number} on what it was not offered")
            work.files[index] = linked
            if len(work.files) == self._pserver_count:
                files = tuple(work.files[i] for i in range(self._pserver_count))
                self._work = _Publishing(work.number, work.round, files, work.reason)
                return (WriteManifest(work.number),)
        return ()

    def send_failed(self, index: int, generation: int, order: OrderNumber) -> Effects:
        """An order may not have arrived: it is sent again (the caller waits a little between failures)."""
        work = self._work
        if not isinstance(work, _Ordered) or work.generations.get(index) != generation or order != self._order(work):
            return ()
        return () if index in work.files else (self._order_to(work, index),)

    def manifest(
        self,
        job: str,
        plan_hash: str,
        cut_for: int,
        declaration: bytes,
        queue: bytes | None,
        created_s: float,
        evaluations: bytes | None = None,
        etcd: Sighting | None = None,
    ) -> Manifest:
        """What ``WriteManifest`` asks to write; ``queue`` is the queue's state as it is now."""
        work = self._work
        assert isinstance(work, _Publishing), "no manifest is to be written"
        return Manifest(
            job=job,
            number=work.number,
            plan_hash=plan_hash,
            pserver_count=self._pserver_count,
            cut_for=cut_for,
            round=work.round,
            created_s=created_s,
            shards=work.files,
            first=self._first_with(work.number),
            declaration=msgspec.Raw(declaration),
            queue=msgspec.Raw(queue or b"null"),
            evaluations=msgspec.Raw(evaluations or b"null"),
            etcd=etcd,
        )

    def manifest_written(self, number: int, manifest_checksum: str) -> Effects:
        work = self._work
        if not isinstance(work, _Publishing) or work.number != number or work.is_pointing:
            return ()
        work.is_pointing = True
        work.retry_at_s = None
        self._first = self._first_with(number)
        self._latest = Pointer(number, manifest_checksum)
        return (Persist(), MovePointer(self._latest))

    def _first_with(self, number: int) -> int:
        """``first``, once this checkpoint is the latest."""
        return number if self._latest is None else self._first

    def manifest_failed(self, number: int, reason: str, now: float) -> Effects:
        """The manifest may not be there; it is written again later."""
        work = self._work
        if not isinstance(work, _Publishing) or work.number != number or work.is_pointing:
            return ()
        work.retry_at_s = now + self._pause_s()
        self._store_failed()
        return self._alarm(f"the manifest of checkpoint {number} could not be written: {reason}")

    def pointer_moved(self, number: int, now: float) -> Effects:
        """``encode()`` with this checkpoint as the latest is stored."""
        work = self._work
        if not isinstance(work, _Publishing) or work.number != number or not work.is_pointing:
            return ()
        self._work = None
        self._chains.completed(number, work.files)
        self._stored_latest = self._latest
        self._last_complete_s = now
        self._failures = 0
        self._store_failures = 0
        self._trouble = ""
        return (Sweep(),)

    def deletable(self, names: Collection[str]) -> tuple[str, ...]:
        """Which of all files of the storage may be deleted, in this order; see ``manifest.deletable``."""
        latest = self._stored_latest
        if latest is None:
            return ()
        keep, keep_every = self._settings.keep, self._settings.keep_every
        return manifests.deletable(names, latest.number, keep, keep_every, self._rejected)

    # how it comes about

    def _is_due(self, now: float) -> bool:
        if now < self._not_before_s or len(self._pservers) < self._pserver_count:
            return False
        by_time, by_tasks = self._settings.interval_s, self._settings.interval_tasks
        return (
            bool(self._wanted)
            or (by_time is not None and now - self._last_begun_s >= by_time)
            or (by_tasks is not None and self._tasks_since >= by_tasks)
        )

    def _begin(self, now: float, rounds: OpenRounds | None) -> Effects:
        number = self._next_number
        self._next_number += 1
        self._last_begun_s = now
        self._tasks_since = 0
        at_round = None
        if rounds is not None:
            # Where nobody trains, the rounds that are open stay open.
            at_round = self._highest_round + (self._margin if rounds.has_members and not self._is_waited_for else 0)
            self._margin = max(1, self._margin // 2)
        work = _Ordered(
            number,
            0,
            at_round,
            now,
            dict(self._pservers),
            self._wanted or "the interval",
            tuple(self._rejected),
            self._is_waited_for,
        )
        self._wanted, self._is_waited_for = "", False
        self._work = work
        return (Persist(), *self._propose(work, at_round, now))

    def _propose(self, work: _Ordered, at_round: int | None, now: float) -> Effects:
        work.serial += 1
        work.round = at_round
        work.since_s = now
        work.taken.clear()
        work.files.clear()
        return tuple(self._order_to(work, index) for index in sorted(work.generations))

    def _order(self, work: _Ordered) -> OrderNumber:
        return OrderNumber(self._master_generation, work.number, work.serial)

    def _order_to(self, work: _Ordered, index: int) -> OrderSnapshot:
        generation, offer = work.generations[index], self._offer(work, index)
        name = shard_name(work.number, index, self._pserver_count, generation, work.serial, offer.since)
        command = SnapshotRequest(self._order(work), work.round, name, offer.after, offer.is_base, plan_hash="")
        return OrderSnapshot(index, generation, command)

    def _offer(self, work: _Ordered, index: int) -> Offer:
        """The same for as long as a checkpoint is ordered."""
        return self._chains.offer(index, work.generations[index], work.number, work.rejected)

    def _give_up(self, now: float, reason: str) -> Effects:
        work = self._work
        assert isinstance(work, _Ordered), "what is published is not given up"
        self._work = None
        self._wanted = self._wanted or work.reason
        self._not_before_s = now + self._pause_s()
        return self._alarm(reason)

    def _store_failed(self) -> None:
        self._store_failures += 1
        self._has_store_failed_at_last = True

    def _pause_s(self) -> float:
        pause_s = self._settings.retry_floor_s * 2.0 ** min(self._failures, 30)
        self._failures += 1
        return min(pause_s, self._settings.retry_ceiling_s)

    def _alarm(self, reason: str) -> Effects:
        is_new = reason != self._trouble
        self._trouble = reason
        return (Alarm(reason),) if is_new else ()

    # storage

    def encode(self) -> bytes:
        """What a later master goes on from, and where everybody finds the newest checkpoint. Constant size."""
        latest = None if self._latest is None else (self._latest.number, self._latest.manifest_checksum)
        return msgspec.json.encode(PointerRecord(FORMAT, self._next_number, latest, list(self._rejected), self._first))

    @classmethod
    def restore(
        cls,
        encoded: bytes,
        settings: CheckpointSettings,
        master_generation: int,
        pserver_count: int,
        now: float,
        files: Sequence[ShardFile] = (),
    ) -> Checkpoints:
        """Go on from what an earlier master stored.

        ``files``: of the newest checkpoint, see ``chains.files_of``.

        Raises:
            CorruptError: not what ``encode`` writes.
        """
        record = decode_pointer(encoded)
        found = cls(
            settings,
            master_generation,
            pserver_count,
            now,
            next_number=record.next_number,
            latest=None if record.latest is None else Pointer(*record.latest),
            rejected=record.rejected,
            first=record.first,
        )
        if record.latest is not None and len(files) == pserver_count:
            found._chains.completed(record.latest[0], files)
        return found

    def check(self) -> None:
        work = self._work
        assert work is None or 0 < work.number < self._next_number, "a number that may be given out again"
        assert self._latest is None or self._latest.number < self._next_number, "the latest is of the future"
        assert self._stored_latest is None or self._latest is not None, "the pointer went away"
        if isinstance(work, _Ordered):
            assert work.files.keys() <= work.generations.keys(), "a file of nobody"
            assert len(work.files) < self._pserver_count, "all files are there"
            assert self._latest == self._stored_latest, "the pointer is ahead of the manifest"
        if isinstance(work, _Publishing):
            assert len(work.files) == self._pserver_count, "a manifest without all files"
            assert work.is_pointing == (self._latest != self._stored_latest), "the pointer moves by itself"


def next_number_after(names: Sequence[str]) -> int:
    """Above every number that any file in the storage has: for a job whose etcd is new."""
    found = (manifests.number_of(name) for name in names)
    return 1 + max((number for number in found if number is not None), default=0)
