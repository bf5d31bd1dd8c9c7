"""The master's side of checkpoints, which orders, completes and aborts them.

**States.** A checkpoint goes through the states below. It enters a state only once the previous one is known to be
finished:

* State 1, *ordered*: The checkpoint gets a number, which is stored under the master's fence before it is used, so no
  two masters use the same number. Each pserver is asked to copy its blocks: in sync mode at an agreed round, in other
  modes at once.
* A pserver that has passed the round refuses. The master then proposes a later round to all, with a margin that
  doubles. If the round is not reached within ``patience_s``, for example because training pauses, the master proposes
  "now". If no member is left to reach it, the master proposes the highest open round, and half a second later "now".
  Both proposals have numbers of their own.
  If a pserver has been lost since it wrote its file, another checkpoint is ordered instead of another round.
* State 2, *publishing*: All files have been written and reported. The master writes the manifest.
* State 3, *pointing*: The master moves ``checkpoint/latest`` in a transaction under its fence.
* State 4, *complete*: The master deletes the files that retention allows to be deleted.

A failure before state 3 leaves the previous checkpoint unchanged, and another checkpoint is ordered with a new number.
If writing the manifest fails, it is retried, because a manifest does not become outdated. Training never waits for a
checkpoint.

**Correctness.** A checkpoint contains one state of each block: its values, slots and version, and the set of exactly
those batches that its values include. Batches in an accumulator are not included. Therefore, a block may be restored
from any earlier state and receive the same pushes again: it applies the batches that it lacks, and answers "already
applied" to the others.

For each restored pserver p, the master calls ``reopen(done - applied(p))`` on the task queue. Then

    done ⊆ applied(p) for every p, and every task that is not done will be assigned.

So every block applies every batch exactly once. This holds for *any* state of the queue, provided that it belongs to
the same dataset. If the queue's state is older than the blocks, the queue repeats done tasks, whose batches are
answered "already applied". If it is newer, the missing tasks are reopened.

The applied sets are authoritative; the queue in the manifest only saves work. Blocks need not be copied at the same
round either. Only readers of the model need a common round, and so does ``recovery="rollback"``.

Pending tasks in the stored queue belong to trainers that are gone. A master that restores the queue takes them back:
``for trainer in queue.holders(): queue.trainer_departed(trainer, now, is_graceful=True)``.

**After a crash of the master** its successor continues from ``encode``. The successor keeps the numbers and the
pointer, and abandons an unfinished checkpoint, whose files stay in the storage until retention deletes them. It
continues the chains if it can read the manifest of the newest checkpoint (``chains``).

**The last checkpoint** of a job (``request_last``) must be complete before the job ends, because nothing else preserves
the final values. If a pserver dies or takes too long, another checkpoint is ordered. The job ends without its last
checkpoint only if the store fails repeatedly.

A checkpoint may never complete while the store fails or pservers keep dying; see ``trouble`` and ``age_s``. Two jobs
that share a name and a storage, but not an etcd, overwrite each other's files.
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
from flightedl.marks import sometimes
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest

_MARGIN_LIMIT = 1024
_REJECTED_LIMIT = 64
#: Maximum number of times that the highest known open round is proposed for a checkpoint that a requester waits for.
#: That round may be outdated.
_OPEN_PROPOSALS = 3
#: Seconds after which every pserver should know the highest round and the members that have left.
_PATIENCE_WITHOUT_MEMBERS_S = 0.5
#: Number of consecutive failures of the store after which the job no longer waits for its last checkpoint.
_STORE_FAILURES_LIMIT = 3
#: Number of times that a file of a checkpoint must be missing before the checkpoint is given up.
_MISSES_LIMIT = 3


@dataclass(slots=True)
class _Ordered:
    """A checkpoint in state 1."""

    number: int
    serial: int
    round: int | None
    since_s: float
    #: Pserver index -> generation of the pserver's process to which the order was sent.
    generations: dict[int, int]
    reason: str
    #: Numbers of checkpoints that turned out to be unusable.
    rejected: tuple[int, ...]
    #: True if a requester is waiting for this checkpoint. The next round may then need that requester.
    is_waited_for: bool
    copied: set[int] = field(default_factory=set)
    files: dict[int, ShardFile] = field(default_factory=dict)


@dataclass(slots=True)
class _Publishing:
    """A checkpoint whose manifest (state 2) or pointer (state 3) is being written."""

    number: int
    round: int | None
    files: tuple[ShardFile, ...]
    reason: str
    #: Time at which to write the manifest again; None if it is being written or has been written.
    retry_at_s: float | None = None
    is_pointing: bool = False
    #: Number of attempts that found a pserver's file missing.
    misses: int = 0


class Checkpoints:
    """State machine of a job's checkpoints. Not thread-safe.

    Args:
        settings: Intervals, retention and timeouts.
        master_generation: Generation of this master.
        pserver_count: Number of pservers, all of which take part.
        now: The time; intervals begin here.
        next_number: A number above all those in the storage, for a job whose etcd is new.
        latest: The checkpoint from which such a job was resumed.
        rejected: Numbers of checkpoints that could not be loaded.
        first: Number of the first checkpoint to which the pointer has pointed. Lower ones were never completed, and the
            model may have been initialized again since.
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
        #: Reason for making a checkpoint before the interval has passed; empty if there is none.
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
        #: Number of consecutive failures of the store.
        self._store_failures = 0
        #: True if the store has failed since ``request_last`` was called.
        self._has_store_failed_at_last = False

    # state

    @property
    def latest(self) -> Pointer | None:
        return self._stored_latest

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def trouble(self) -> str:
        """Reason why the last attempt failed; empty if it succeeded."""
        return self._trouble

    @property
    def may_be_saved(self) -> bool:
        """True if a complete checkpoint exists, or may exist because the writing of its manifest has begun."""
        return self._latest is not None or isinstance(self._work, _Publishing)

    @property
    def under_way(self) -> int | None:
        return None if self._work is None else self._work.number

    def age_s(self, now: float) -> float:
        """Return the number of seconds since the last checkpoint was completed, or since this master started."""
        return now - self._last_complete_s

    def is_satisfied(self, ticket: int) -> bool:
        """True if a checkpoint that began after ``request`` returned this ticket is complete."""
        return self._stored_latest is not None and self._stored_latest.number >= ticket

    def is_over(self, ticket: int) -> bool:
        """True if the job may stop waiting for the ``request_last`` with this ticket.

        The wait is over when the checkpoint is complete, or when the store has failed several times in a row, at least
        once since the request.
        """
        is_hopeless = self._has_store_failed_at_last and self._store_failures >= _STORE_FAILURES_LIMIT
        return self.is_satisfied(ticket) or is_hopeless

    # events

    def resize(self, pserver_count: int) -> None:
        """Change the number of pservers. Call this only while no checkpoint is in progress."""
        assert self.under_way is None, "the number of pservers changes during a checkpoint"
        self._pserver_count = pserver_count
        self._pservers = {index: each for index, each in self._pservers.items() if index < pserver_count}

    def pserver_up(self, index: int, generation: int, now: float) -> Effects:
        """Record that a pserver is serving its blocks and will not be replaced. Repeated calls change nothing."""
        known = self._pservers.get(index)
        if known == generation:
            return ()
        self._pservers[index] = generation
        return self._replaced(index, now)

    def pserver_down(self, index: int, now: float) -> Effects:
        """Record that a pserver's lease has ended. No checkpoint is ordered until all pservers are up again."""
        if self._pservers.pop(index, None) is None:
            return ()
        return self._replaced(index, now)

    def _replaced(self, index: int, now: float) -> Effects:
        work = self._work
        if isinstance(work, _Ordered) and index not in work.files:
            return self._give_up(now, f"pserver {index} was lost before it had written checkpoint {work.number}")
        return ()

    def rejected(self, numbers: Collection[int]) -> None:
        """Record checkpoints that a pserver could not load. Retention does not count them."""
        self._rejected = sorted({*self._rejected, *numbers})[-_REJECTED_LIMIT:]

    def request(self, reason: str, *, is_waited_for: bool = False) -> int:
        """Request a checkpoint of the current state. Return a ticket for ``is_satisfied``.

        ``is_waited_for`` is True if the requester waits for the checkpoint. In that case the open round is proposed
        first, because a later round might never open if the requester had to reach it.
        """
        self._wanted = reason
        self._is_waited_for = self._is_waited_for or is_waited_for
        return self._next_number

    def request_last(self, reason: str) -> int:
        """Request the last checkpoint of a job. It is ordered immediately, even after a failure."""
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
        """Check timeouts and intervals. Call this about once per second.

        Args:
            now: The time.
            rounds: State of the rounds; None if the mode has no rounds, so blocks are copied at once.
        """
        if rounds is not None:
            self._highest_round = max(self._highest_round, rounds.highest)
        match self._work:
            case None:
                return self._begin(now, rounds) if self._is_due(now) else ()
            case _Publishing(retry_at_s=retry_at_s) as work:
                if retry_at_s is None or now < retry_at_s:
                    return ()
                sometimes("a manifest was written again")
                work.retry_at_s = None
                return (WriteManifest(work.number),)
            case _Ordered() as work:
                return self._next_action(work, now, rounds)

    def _next_action(self, work: _Ordered, now: float, rounds: OpenRounds | None) -> Effects:
        """Propose another round if the ordered one was not reached in time; abort a checkpoint that timed out."""
        waited_s, patience_s = now - work.since_s, self._settings.patience_s
        is_left = rounds is not None and not rounds.has_members
        if is_left:
            # When a trainer leaves during a round, the next round may open on some pservers only.
            patience_s = min(patience_s, _PATIENCE_WITHOUT_MEMBERS_S)
        if work.round is not None and waited_s > patience_s and len(work.copied) < self._pserver_count:
            return self._propose_renumbered(work, None, now)
        if is_left and work.round is not None and work.round > self._highest_round:
            # All members have left, as they do at the end of a job, so the round will never be reached.
            return self._propose_renumbered(work, self._highest_round, now)
        if waited_s <= self._settings.give_up_s:
            return ()
        late = [index for index in range(self._pserver_count) if index not in work.files]
        if work.copied.issuperset(late):
            # All late pservers have made their copies, so the store must be slow.
            self._store_failed()
        return self._give_up(now, f"pserver {', '.join(map(str, late))} did not write checkpoint {work.number} in time")

    def progressed(self, index: int, generation: int, progress: SnapshotReply, now: float) -> Effects:
        """Handle a pserver's progress report; reports about other orders are ignored."""
        work = self._work
        if not isinstance(work, _Ordered) or work.generations.get(index) != generation:
            return ()
        if progress.order != self._order(work):
            return ()
        self._highest_round = max(self._highest_round, progress.highest_open_round)
        if progress.state == "refused" and work.is_waited_for and work.serial < _OPEN_PROPOSALS:
            return self._propose(work, self._highest_round, now)
        if progress.state == "refused":
            sometimes("the round of a checkpoint had already passed")
            self._margin = min(2 * self._margin, _MARGIN_LIMIT)
            return self._propose(work, self._highest_round + self._margin, now)
        if progress.state == "failed":
            self._store_failed()
            return self._give_up(now, f"pserver {index} could not write checkpoint {work.number}: {progress.reason}")
        if progress.state in {"taken", "written"}:
            work.copied.add(index)
        if progress.file is not None:
            file = ShardFile.of(index, generation, progress.file)
            linked = self._chains.linked(file, self._offer(work, index))
            if linked is None:
                return self._give_up(now, f"pserver {index} based checkpoint {work.number} on a file not offered to it")
            work.files[index] = linked
            if len(work.files) == self._pserver_count:
                files = tuple(work.files[i] for i in range(self._pserver_count))
                self._work = _Publishing(work.number, work.round, files, work.reason)
                return (WriteManifest(work.number),)
        return ()

    def send_failed(self, index: int, generation: int, order: OrderNumber) -> Effects:
        """Send an order again, because it may not have arrived. The caller pauses between failures."""
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
        """Return the manifest that ``WriteManifest`` asks for. ``queue`` is the current state of the queue."""
        work = self._work
        assert isinstance(work, _Publishing), "no manifest is due"
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
        return number if self._latest is None else self._first

    def manifest_failed(self, number: int, reason: str, now: float, *, lacks_file: bool = False) -> Effects:
        """Schedule another attempt to write the manifest, because the last attempt may have failed.

        If the store has repeatedly lacked a pserver's file (``lacks_file``), the checkpoint is abandoned. Otherwise, a
        pserver that loses its values would wait for it forever. Even if an earlier attempt has written the manifest, no
        pserver loads a checkpoint without its files.
        """
        work = self._work
        if not isinstance(work, _Publishing) or work.number != number or work.is_pointing:
            return ()
        self._store_failed()
        work.misses += lacks_file
        if work.misses == _MISSES_LIMIT:
            return self._give_up(now, f"checkpoint {number} is given up, because its files are not complete: {reason}")
        work.retry_at_s = now + self._pause_s()
        return self._alarm(f"the manifest of checkpoint {number} could not be written: {reason}")

    def pointer_moved(self, number: int, now: float) -> Effects:
        """Record that the pointer to this checkpoint has been stored. The checkpoint is then complete."""
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
        latest = self._stored_latest
        if latest is None:
            return ()
        keep, keep_every = self._settings.keep, self._settings.keep_every
        return manifests.deletable(names, latest.number, keep, keep_every, self._rejected)

    # orders

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
            # No round closes while there are no members.
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

    def _propose_renumbered(self, work: _Ordered, at_round: int | None, now: float) -> Effects:
        """Propose another round under a new number, because a number must name a single state.

        Pservers may have copied their blocks without the master's knowledge, and followers may have stopped there.
        """
        work.number, self._next_number = self._next_number, self._next_number + 1
        return (Persist(), *self._propose(work, at_round, now))

    def _propose(self, work: _Ordered, at_round: int | None, now: float) -> Effects:
        lost = sorted(index for index in work.generations if self._pservers.get(index) != work.generations[index])
        if lost:
            # Pservers that were lost after they had written their files cannot write them for another round.
            sometimes("a pserver was lost between its file and another proposal")
            names = ", ".join(map(str, lost))
            return self._give_up(now, f"pserver {names} was lost, and checkpoint {work.number} needs another round")
        work.serial += 1
        work.round = at_round
        work.since_s = now
        work.copied.clear()
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
        return self._chains.offer(index, work.generations[index], work.number, work.rejected)

    def _give_up(self, now: float, reason: str) -> Effects:
        work = self._work
        assert work is not None, "no checkpoint is under way"
        sometimes("a checkpoint was abandoned")
        self._work = None
        self._wanted = self._wanted or work.reason
        self._is_waited_for = self._is_waited_for or (isinstance(work, _Ordered) and work.is_waited_for)
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
        """Return the state for a successor, including the pointer to the newest checkpoint. The size is bounded."""
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
        """Restore the state that a previous master stored.

        ``files`` are the files of the newest checkpoint, as returned by ``chains.files_of``.

        Raises:
            CorruptError: ``encoded`` is not an output of ``encode``.
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
        assert work is None or 0 < work.number < self._next_number, "a number may be used again"
        assert self._latest is None or self._latest.number < self._next_number, "the latest number is too high"
        assert self._stored_latest is None or self._latest is not None, "the pointer was lost"
        if isinstance(work, _Ordered):
            assert work.files.keys() <= work.generations.keys(), "a file has no order"
            assert len(work.files) < self._pserver_count, "all files are written, but the manifest is not"
            assert self._latest == self._stored_latest, "the pointer is ahead of the manifest"
        if isinstance(work, _Publishing):
            assert len(work.files) == self._pserver_count, "a manifest lacks files"
            assert work.is_pointing == (self._latest != self._stored_latest), "the pointer moved without a manifest"


def next_number_after(names: Sequence[str]) -> int:
    """Return a number above those of all checkpoint files in the storage, for a job that is not in etcd."""
    found = (manifests.number_of(name) for name in names)
    return 1 + max((number for number in found if number is not None), default=0)
