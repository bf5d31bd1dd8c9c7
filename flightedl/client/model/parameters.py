"""The model as trainers see it: a mapping of arrays, pushed to and pulled from the pservers.

Theory of operation. Received rows are copied once, to the arrays that the user reads. A push goes to all pservers in
parallel, one stream each, which is kept open from step to step, in lock-step: a few messages ahead, then one reply read
for each message written, which keeps the data in cache and cannot deadlock. In synchronous mode a block's fresh values
come when its round has closed; what has not come by the end of a step is asked for again, in slices.

Everything sent is idempotent: a push is known by its batch, so a stream that broke is simply repeated. Every batch gets
an answer from every block: blocks that the user's code did not push to get the batch's *arrival* (weight zero), because
the others' rounds wait for it.

A push that fails may be in some blocks and not in others. Its batch never arrives without its gradient: it is done
again as a whole, whatever the user's code makes of the error. Where trying again cannot help, its task is undone: the
error is raised again when the batch is closed, which ends the loop over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.client.connections import Servers
from flightedl.client.model.accumulation import GradientSums
from flightedl.client.model.feedback import ErrorFeedback
from flightedl.client.model.gradients import GradientCheck
from flightedl.client.model.transfers import Shard, ShardTransfer, at_one_version, forget
from flightedl.client.model.values import ModelValues
from flightedl.client.waiting import Waiting
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.accumulation import lacking_of
from flightedl.domain.model.settings import Limits, checked
from flightedl.domain.model.sharding import ShardPlan, runs_of
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.retries import is_transient
from flightedl.errors import FlightedlError, GradientError, MessageError, UsageError
from flightedl.messages.base import encode
from flightedl.messages.parameters import Outcome, PullTicket, PushHeader
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import LOCK_STEP_LIMIT_BYTES
from flightedl.rpc.reuse import ReusableExchange
from flightedl.wire.parts import (
    PARTS_LIMIT,
    STEP_END,
    STEP_SCHEMA,
    Part,
    attached_to,
    decode_parts,
    encode_parts,
    parts_of,
)
from flightedl.wire.rows import Piece, decode_batch

if TYPE_CHECKING:
    from flightedl.kernels.compiled import HalfKernels

Array = npt.NDArray[np.generic]
_NO_ARRAYS: Mapping[int, npt.NDArray[np.generic]] = MappingProxyType({})

_SLICE_S = 2.0
_STREAM_S = 30.0


class Scope(Protocol):
    """Under whose name, and for which batch, the parameters push now."""

    @property
    def trainer(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def member(self) -> int:
        """The membership in the view; 0: none."""
        ...

    @property
    def current(self) -> CurrentBatch | None: ...

    def lost_membership(self) -> None:
        """A pserver does not know this member any more: join again before the next batch."""
        ...

    def require_final(self, index: int, generation: int) -> None:
        """Outside of a batch: after the job's end, raise unless this process of a pserver has all that was trained."""
        ...


class Parameters(Mapping[str, npt.NDArray[np.generic]]):
    """The model's parameters by name: read-only views that ``pull`` and ``step`` refresh in place.

    Args:
        plan: Where every block lies.
        mode: Whether a pull waits for the round of the push before it, and when a step pulls.
        clip_norm: Gradients whose global norm is above it are scaled down to it; None: never.
        wire: How float32 elements travel, see ``kernels.half_precision``.
        error_feedback: Whether what ``wire`` rounds off a gradient is added to the next one, see ``feedback``.
        servers: Connections to the pservers.
        scope: Gives the present sender, member and batch.
        waiting: Makes a wait that the user sees.
        clock: For the time of streams.
    """

    def __init__(
        self,
        plan: ShardPlan,
        mode: Mode,
        servers: Servers,
        scope: Scope,
        waiting: Callable[[], Waiting],
        clock: Clock,
        clip_norm: float | None = None,
        wire: str = "",
        error_feedback: bool = False,
    ) -> None:
        self._plan = plan
        self._set_mode(mode)
        halves = _half_kernels(wire) if wire else None
        self._feedback = ErrorFeedback(halves) if error_feedback and halves is not None else None
        self._servers = servers
        self._scope = scope
        self._waiting = waiting
        self._specs = {spec.name: spec for spec in plan.parameters}
        self._blocks = {number: plan.block(number) for number in range(plan.block_count)}
        #: Searching the plan costs as much as sending a small parameter does.
        self._ranges = {name: plan.block_range(name) for name in self._specs}
        self._values = ModelValues(plan, self._blocks, halves)
        runs = [runs_of(plan, index) for index in range(plan.pserver_count)]
        largest = max(self._values.sent_bytes(run) for shard_runs in runs for run in shard_runs)
        #: Messages written ahead of the answers read: two at least.
        self._window = max(2, LOCK_STEP_LIMIT_BYTES // max(largest, 1))
        self._shards = [Shard.of(index, runs[index]) for index in range(plan.pserver_count)]
        #: Of each pserver; steps follow each other on it.
        self._streams = [ReusableExchange("step", STEP_SCHEMA, clock) for _ in self._shards]
        self._pool = ThreadPoolExecutor(plan.pserver_count, "flightedl-parameters")
        #: Why the session is over; empty: it is not.
        self._closed = ""
        self._check = GradientCheck(plan, runs, self._values.dtypes, wire, clip_norm, self._pool)

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        self._is_synchronous = isinstance(mode, Sync)
        #: All blocks are pushed with one base, see ``domain.consistency.rounds``.
        self._has_one_base = isinstance(mode, Sync) and mode.backup > 0
        self._pull_every = mode.pull_every if isinstance(mode, Async) else 1
        self._steps_since_pull = 0
        #: None where every batch is pushed for itself.
        self._sums = GradientSums(mode) if isinstance(mode, Async) and mode.push_every > 1 else None

    # Mapping

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        try:
            return self._values.views[name]
        except KeyError:
            raise KeyError(self._check.unknown(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.views)

    def __len__(self) -> int:
        return len(self._values.views)

    @property
    def versions(self) -> dict[str, int]:
        """Version of each parameter's values held here (of its oldest block)."""
        oldest: dict[str, int] = {}
        for number, version in self._values.versions.items():
            name = self._plan.parameters[self._blocks[number].parameter].name
            oldest[name] = min(version, oldest.get(name, version))
        return oldest

    # what the user calls

    def step(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Push the current batch's gradients, then pull: ``model[name]`` is fresh when this returns.

        With ``Async(push_every=n, pull_every=m)`` only every n-th step pushes, and only every m-th pulls. The
        optimizer's ``clip_norm`` is that of all gradients of one push.

        Args:
            gradients: name -> array of the parameter's shape and dtype. Parameters that are left out get none.

        Raises:
            GradientError: unknown name, wrong shape or dtype, or not finite; nothing was sent.
            UsageError: no batch is current, or it was already pushed.
            UnavailableError: a pserver stayed away for longer than ``give_up_s``. Others may have the gradients: a loop
                that goes on all the same gets this batch again.
        """
        self._steps_since_pull += 1
        pull = self._steps_since_pull >= self._pull_every
        self._push(gradients, pull=pull, complete=True)
        if pull:
            self._steps_since_pull = 0

    def push(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Push the current batch's gradients of some parameters. Errors as ``step``."""
        self._push(gradients, pull=False, complete=False)

    def pull(self, names: Iterable[str] | None = None, *, min_version: int = 0) -> None:
        """Refresh values. In synchronous mode after a push this waits for the round of the current batch.

        Args:
            names: Of the parameters wanted; None: all.
            min_version: Wait until each of their blocks has had so many updates (rounds, in synchronous mode).

        Raises:
            UsageError: there is no such parameter.
            UnavailableError: a pserver stayed away for longer than ``give_up_s``.
            BegunAnewError: after the job's end: a pserver was lost with some of what was trained.
        """
        self._require_open()
        checked("min_version", min_version, int, Limits(at_least=0))
        current = self._scope.current
        if current is not None and current.answered and self._is_synchronous and not current.must_repeat:
            self._send(current, {}, self._unanswered(current), pull=False)
        wanted = dict.fromkeys(self._blocks if names is None else self._blocks_of(names), min_version)
        if current is not None and self._is_synchronous and not current.must_repeat:
            after = self._mode.version_after
            wanted |= {n: max(after(base), min_version) for n, base in current.answered.items() if n in wanted}
        member = 0 if current is None else current.member
        # A batch that waits in a sum is not done again for a membership that ended.
        self._transfer(None if current is None or current.waits else current, {}, [], wanted, pull=True, member=member)

    def _blocks_of(self, names: Iterable[str]) -> list[int]:
        if not isinstance(names, Iterable):
            raise UsageError(f"names is {names!r:.80}, but must be names of parameters")
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in self._specs:
                raise UsageError(self._check.unknown(name))
        return [number for name in chosen for number in self._ranges[name]]

    # what the session calls

    def refresh(self) -> None:
        """Pull all blocks: as a member at or above its first round, else at whatever version they are."""
        self._transfer(None, {}, [], dict.fromkeys(self._blocks, 0), pull=True, member=self._scope.member)

    def push_sum(self) -> None:
        """Push what was added up, of however many batches."""
        if self._sums is not None and self._sums.has_batches:
            self._push_sum(self._sums, pull=False)

    def give_up_sum(self) -> None:
        """Forget what was added up: its batches are somebody else's."""
        if self._sums is not None:
            self._sums.give_up()

    def leave_out(self, current: CurrentBatch) -> None:
        """The batch is done again: nothing that it has pushed so far may be in a sum.

        Raises:
            BaseException: what ended its push, where doing it again cannot help.
        """
        if self._sums is not None and self._sums.is_at(current):
            self._sums.give_up()
        if current.failure is not None:
            raise current.failure

    def change_mode(self, mode: Mode) -> None:
        """The job has another mode, from the next batch on; what was added up under the old one is done again."""
        if self._sums is not None:
            self._sums.give_up()
        self._set_mode(mode)

    def arrive(self, current: CurrentBatch) -> None:
        """Make the batch arrive at the blocks that it was not pushed to, and have the values that follow it.

        Never one that is done again: its gradient could not follow.
        """
        if current.must_repeat:
            return
        if self._sums is not None:
            if not current.waits and not self._sums.is_pushed(current):
                self._add_batch(self._sums, current, pull=self._pull_every == 1)
            return
        self._send(current, {}, self._unanswered(current), pull=self._pull_every == 1)
        if self._is_synchronous and not current.must_repeat:
            versions, after = self._values.versions, self._mode.version_after
            behind = {n: after(base) for n, base in current.answered.items() if versions[n] < after(base)}
            if behind:
                self._transfer(current, {}, [], behind, pull=True, member=current.member)

    def close(self, why: str = "this session is over") -> None:
        """Stop the threads, and let go of the streams; the values stay. ``why`` is told to whoever still asks."""
        self._closed = why
        self._pool.shutdown(wait=True, cancel_futures=True)
        for kept in self._streams:
            kept.close_idle()

    # one batch to all pservers

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(self._closed)

    def _push(self, gradients: Mapping[str, npt.ArrayLike], *, pull: bool, complete: bool) -> None:
        self._require_open()
        current = self._scope.current
        if current is None:
            raise UsageError("there is no current batch: push and step belong inside `for batch in job.dataset(...)`")
        checked = self._check.flattened(gradients)
        together: Mapping[int, Array] = self._check.require_sound(checked, current)
        current.has_gradient = True
        if self._sums is not None:
            if current.must_repeat:
                return
            self._sums.add(current, checked)
            if complete:
                self._add_batch(self._sums, current, pull=pull)
            return
        arrays = self._check.clipped(checked)
        if arrays is not checked:
            together = {}
        if current.must_repeat:
            return
        if current.answered:
            for name in arrays:
                if not current.answered.keys().isdisjoint(self._ranges[name]):
                    raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({current})")
        pushes, together = self._as_sent(self._by_block(arrays), together)
        has_rest = complete and len(pushes) < len(self._blocks)
        arrivals = [n for n in self._unanswered(current) if n not in pushes] if has_rest else []
        self._send(current, pushes, arrivals, together, pull=pull)

    def _add_batch(self, sums: GradientSums, current: CurrentBatch, *, pull: bool) -> None:
        """All gradients of a batch are in the sum: push it, if it is time."""
        sums.complete(current)
        if sums.is_full:
            self._push_sum(sums, pull=pull)
        elif pull:
            self._transfer(None, {}, [], dict.fromkeys(self._blocks, 0), pull=True, member=current.member)

    def _push_sum(self, sums: GradientSums, *, pull: bool) -> None:
        """One push for several batches: each block takes all of them, or none."""
        together, gradients = sums.take_all()
        clipped = self._check.clipped(gradients)
        try:
            joined: Mapping[int, Array] = self._check.require_sound(
                clipped, f"the sum of {1 + len(together.further)} batches"
            )
            pushes, joined = self._as_sent(self._by_block(clipped), joined)
        except GradientError:
            sums.split()
            raise
        arrivals = [number for number in self._blocks if number not in pushes]
        try:
            refusals = self._send(together, pushes, arrivals, joined, pull=pull)
        except BaseException as error:
            sums.push_failed(error)
            raise
        sums.settle(together, refusals)

    def _by_block(self, arrays: Mapping[str, Array]) -> dict[int, Array]:
        """Block -> the (n,) gradient of its whole parameter."""
        pushes: dict[int, Array] = {}
        for name, array in arrays.items():
            for number in self._ranges[name]:
                pushes[number] = array
        return pushes

    def _as_sent(
        self, pushes: dict[int, Array], together: Mapping[int, Array]
    ) -> tuple[dict[int, Array], Mapping[int, Array]]:
        """What is sent of the gradients. Encoded once: whatever is sent again is the same bytes.

        Raises:
            GradientError: beyond what 16 bits can say; nothing was sent.
        """
        if self._feedback is None:
            return pushes, together
        return self._feedback.encode(pushes, self._blocks), _NO_ARRAYS

    def _unanswered(self, current: CurrentBatch) -> list[int]:
        return [number for number in self._blocks if number not in current.answered]

    def _send(
        self,
        current: CurrentBatch,
        pushes: Mapping[int, Array],
        arrivals: Sequence[int],
        together: Mapping[int, Array] = _NO_ARRAYS,
        *,
        pull: bool,
    ) -> set[tuple[int, ...]]:
        try:
            return self._transfer(current, pushes, arrivals, {}, together, pull=pull, member=current.member)
        except BaseException as error:
            if not current.answered.keys() >= {*pushes, *arrivals}:
                current.push_failed(error)
            raise
        finally:
            if self._feedback is not None:
                self._feedback.settle(current.answered)

    def _transfer(
        self,
        current: CurrentBatch | None,
        pushes: Mapping[int, Array],
        arrivals: Sequence[int],
        pulls: Mapping[int, int],
        together: Mapping[int, Array] = _NO_ARRAYS,
        *,
        pull: bool,
        member: int,
    ) -> set[tuple[int, ...]]:
        """All pservers in parallel. Returns what blocks lack of a sum that they did not take."""
        if current is not None and self._has_one_base and not current.answered:
            current.base_version = min(self._values.versions.values())
        answers: dict[int, Array | None] = {**pushes, **dict.fromkeys(arrivals)}
        transfers = [
            ShardTransfer(dict(shard.own(answers)), dict(shard.own(pulls)), pull, member, together=together)
            for shard in self._shards
        ]
        if len(self._shards) == 1:
            self._finish(self._shards[0], transfers[0], current)
        else:
            futures = [
                self._pool.submit(self._finish, shard, transfer, current)
                for shard, transfer in zip(self._shards, transfers, strict=True)
            ]
            try:
                errors = [error for future in futures if (error := future.exception()) is not None]
            except BaseException:
                # Ctrl-C: what arrived later would be taken for values of the batch that comes next.
                for transfer in transfers:
                    transfer.is_given_up = True
                wait(futures)
                raise
            if errors:
                raise errors[0]
        if any(transfer.must_repeat for transfer in transfers):
            self._scope.lost_membership()
            if current is not None:
                current.must_repeat = True
        return set().union(*(transfer.refusals for transfer in transfers))

    def _finish(self, shard: Shard, transfer: ShardTransfer, current: CurrentBatch | None) -> None:
        """One pserver, until everything is answered or has to be repeated."""
        waiting = self._waiting()
        for _ in waiting.steps():
            try:
                transfer.generation, connection = self._servers.pserver(shard.index)
                if current is None:
                    self._scope.require_final(shard.index, transfer.generation)
                if transfer.pushes and current is not None:
                    self._stream(shard, transfer, current, connection)
                elif transfer.pulls:
                    self._pull(shard, transfer, connection)
                reason = f"pserver {shard.index}: the other trainers' gradients of this round"
            except FlightedlError as error:
                if not is_transient(error):
                    waiting.over()
                    raise
                if not transfer.is_given_up:
                    waiting.because(error)
                    continue
            if transfer.is_given_up or transfer.must_repeat or not (transfer.pushes or transfer.pulls):
                break
            waiting.patiently(reason)
        waiting.over()

    def _stream(self, shard: Shard, transfer: ShardTransfer, current: CurrentBatch, connection: Connection) -> None:
        """One step of a lock-step DoExchange: rows up, outcomes and values down."""
        numbers = sorted(transfer.pushes)
        header = PushHeader(
            trainer=self._scope.trainer,
            generation=self._scope.generation,
            plan_hash=self._plan.hash,
            member=transfer.member,
            identity=current.identity,
            further=list(current.further),
            step=current.step,
            weight=float(current.record_count),
            rows=len(numbers),
            pull=transfer.pull_after_push,
            wait_s=_SLICE_S,
        )
        base = self._bases(numbers, current)
        pieces = (found for run in shard.by_run(numbers) for found in self._messages(run, base, transfer))
        with self._streams[shard.index].use(connection, timeout_s=_STREAM_S) as exchange:
            for batch, packed in exchange.lock_step(_encoded(pieces, encode(header)), ahead=self._window):
                said = packed
                if batch is not None:
                    self._take(decode_parts(batch, packed, exchange.columns), shard, transfer, current)
                    said = attached_to(packed)
                    # The next answer is to come into this one's memory, while that is in the processor's cache.
                    del batch
                if said == STEP_END:
                    return

    def _messages(
        self, numbers: Sequence[int], base: Mapping[int, int], transfer: ShardTransfer
    ) -> Iterator[Sequence[Piece]]:
        """Some blocks of a run, by message. What lies in one piece of memory is sent as it lies there."""
        pieces: list[Piece] = []
        for start, stop in at_one_version(numbers, base, transfer.pushes):
            blocks = range(numbers[start], numbers[stop - 1] + 1)
            for part, gradient in self._joined(blocks, transfer):
                if len(pieces) == PARTS_LIMIT:
                    yield pieces
                    pieces = []
                pieces.append(Piece(part, base[part.start], Outcome.NONE, gradient, ()))
        yield pieces

    def _joined(self, blocks: range, transfer: ShardTransfer) -> Iterator[tuple[range, Array | None]]:
        """The gradients of neighbouring blocks, of as many as possible together."""
        first, last = self._blocks[blocks[0]], self._blocks[blocks[-1]]
        gradient = transfer.pushes[first.number]
        if gradient is None:
            yield blocks, None
        elif first.parameter == last.parameter:
            yield blocks, self._values.outgoing(gradient[first.start : last.stop])
        elif (joined := transfer.together.get(first.number)) is not None and joined.nbytes == self._values.nbytes(
            blocks
        ):
            yield blocks, self._values.outgoing(joined)
        else:
            for number in blocks:
                block, gradient = self._blocks[number], transfer.pushes[number]
                assert gradient is not None, "blocks without and with a gradient are apart"
                yield range(number, number + 1), self._values.outgoing(gradient[block.start : block.stop])

    def _take(self, parts: Iterable[Part], shard: Shard, transfer: ShardTransfer, current: CurrentBatch | None) -> None:
        run_of = shard.run_of
        for blocks, version, outcome, data in parts:
            run = run_of.get(blocks[0])
            if run is None or run_of.get(blocks[-1]) != run:
                raise MessageError(f"pserver {shard.index} sent {blocks}, which are not its own")
            if outcome in _TOO_LATE:
                transfer.must_repeat = True
                forget(transfer.pushes, blocks)
                forget(transfer.pulls, blocks)
            elif outcome == Outcome.PARTLY_APPLIED and current is not None:
                forget(transfer.pushes, blocks)
                bits = data[: len(data) // len(blocks)].tobytes()
                transfer.refusals.add(lacking_of(bits, 1 + len(current.further)))
                current.note_answers({}, shard.index, transfer.generation)
                continue
            elif outcome != Outcome.NONE:
                self._note_answers(shard, blocks, transfer, current, has_values=bool(data))
            if data:
                self._values.store(blocks, data, version)
                forget(transfer.pulls, blocks)

    def _note_answers(
        self, shard: Shard, blocks: range, transfer: ShardTransfer, current: CurrentBatch | None, *, has_values: bool
    ) -> None:
        """Neighbouring blocks have the batch; their values have come with the answer, or are to be pulled."""
        forget(transfer.pushes, blocks)
        base = self._bases(blocks, current)
        versions = {block: base[block] for block in blocks}
        if current is not None:
            current.note_answers(versions, shard.index, transfer.generation)
        if transfer.pull_after_push and not has_values:
            after = self._mode.version_after
            transfer.pulls.update((block, after(versions[block])) for block in blocks)

    def _bases(self, blocks: Iterable[int], current: CurrentBatch | None) -> Mapping[int, int]:
        """At least these blocks -> the version that the current batch's gradient was computed at.

        Of each block until newer values of it are stored.
        """
        if current is not None and current.base_version is not None:
            return dict.fromkeys(blocks, current.base_version)
        return self._values.versions

    def _pull(self, shard: Shard, transfer: ShardTransfer, connection: Connection) -> None:
        blocks = list(transfer.pulls)
        versions = [transfer.pulls[n] for n in blocks]
        everything = len(blocks) == len(shard.run_of) and len(set(versions)) == 1
        ticket = PullTicket(
            plan_hash=self._plan.hash,
            member=transfer.member,
            blocks=None if everything else blocks,
            min_versions=versions[:1] if everything else versions,
            wait_s=_SLICE_S,
        )
        with connection.get(encode(ticket), timeout_s=_STREAM_S) as stream:
            for batch, _ in stream:
                if batch is not None:
                    rows = decode_batch(batch)
                    self._take(parts_of(rows, shard.run_of), shard, transfer, None)


def _encoded(messages: Iterable[Sequence[Piece]], request: bytes) -> Iterator[tuple[pa.RecordBatch, bytes, int]]:
    """The messages of a step, the first of which brings its request."""
    for pieces in messages:
        yield *encode_parts(pieces, request), sum(piece.size_bytes for piece in pieces)
        request = b""


_TOO_LATE = frozenset({Outcome.STALE, Outcome.NOT_MEMBER})


def _half_kernels(kind: str) -> HalfKernels:
    """NumPy takes three times as long, longer than what 16 bits save. Others need no compiler, and do not load it."""
    from flightedl.kernels.compiled import half_kernels

    return half_kernels(kind)
