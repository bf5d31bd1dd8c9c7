"""The model as trainers see it: a mapping of arrays, pushed to and pulled from the pservers.

What a call sends and asks for is decided by :class:`~flightedl.domain.trainer.steps.Steps`. Here are the arrays: they
are checked before anything of them is sent, clipped, added up, encoded, and handed to the clients of the pservers, all
of which work in parallel. Received rows are copied once, to the arrays that the user reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flightedl.client.connections import Servers
from flightedl.client.model.kept import ErrorFeedback, GradientSums
from flightedl.client.model.layout import ModelLayout, Owners
from flightedl.client.model.lending import Show
from flightedl.client.model.shard_client import Sender, ShardClient
from flightedl.client.model.step_plan import Outgoing, StepPlans
from flightedl.client.model.trees import Tree
from flightedl.client.model.values import ModelValues
from flightedl.client.probe import PUSH, StepProbe
from flightedl.client.tables.requests import DistinctIds, Ids
from flightedl.client.tables.rows import TableRows
from flightedl.client.tables.traffic import Lookup
from flightedl.client.waiting import Waiting
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.settings import Limits, checked
from flightedl.domain.model.sharding import Block, ShardPlan
from flightedl.domain.trainer.batches import Batch, BatchState, CurrentBatch
from flightedl.domain.trainer.membership import Begun, TrainerMembership
from flightedl.domain.trainer.steps import Added, Done, Effect, Next, Steps, TakeSum, carried_out
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import FlightedlError, GradientError, UsageError
from flightedl.ports import Clock
from flightedl.process import tracing

if TYPE_CHECKING:
    from flightedl.kernels.compiled import HalfKernels

Array = npt.NDArray[np.generic]
_NO_GRADIENTS: Mapping[str, npt.ArrayLike] = MappingProxyType({})


class Scope(Sender, Protocol):
    """Under whose name the parameters push now."""

    @property
    def membership(self) -> TrainerMembership: ...


class Listener(Protocol):
    """Who keeps a copy of the values, such as the module of a deep-learning framework."""

    def values_arrived(self, names: Collection[str]) -> None:
        """These parameters have other values than before."""
        ...

    def batch_ends(self, current: CurrentBatch) -> None:
        """The user's code is through with the batch, whatever it pushed of it; ``current.is_undone``: for now.

        Raises:
            UsageError: it has something for the batch that it did not push.
        """
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
        steps: Makes what decides, see ``Steps``.
        unclipped: Parameters to which ``clip_norm`` does not apply.
        tree: The containers that the model was declared with; None: a mapping of arrays.
        probe: Notes where the time of the loop goes; None: one of its own.
        newest_plan: Looks up who owns the blocks now, when a pserver lacks some; None: nobody says.
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
        steps: Callable[[Sequence[Sequence[int]], Mode, Sequence[range]], Steps] = Steps,
        unclipped: Collection[str] = (),
        tree: Tree | None = None,
        probe: StepProbe | None = None,
        newest_plan: Callable[[], ShardPlan] | None = None,
    ) -> None:
        self._names = [spec.name for spec in plan.parameters]
        self._tables = plan.tables
        self._tree = tree
        self._scope = scope
        halves = _half_kernels(wire) if wire else None
        self._feedback = ErrorFeedback(halves, self._places_of) if error_feedback and halves is not None else None
        self._blocks = {number: plan.block(number) for number in range(plan.block_count)}
        #: Searching the plan costs as much as sending a small parameter does.
        self._ranges = {spec.name: plan.block_range(spec.name) for spec in plan.parameters}
        #: What is pushed to tables, and looked up; of a job without tables, nothing ever.
        self.rows = TableRows(plan)
        self._values = ModelValues(plan, self._blocks, halves)
        owners = Owners.of(plan)
        #: What is pushed when, and what is pulled.
        self.steps = steps(owners.blocks, mode, owners.buckets)
        shard = partial(ShardClient, values=self._values, servers=servers, sender=scope, waiting=waiting, clock=clock)
        self._shard_client = partial(shard, steps=self.steps)
        self._step_plans = partial(
            StepPlans,
            dtypes=self._values.dtypes,
            wire=wire,
            clip_norm=clip_norm,
            unclipped=unclipped,
            feedback=self._feedback,
        )
        self._waiting = waiting
        self._newest_plan = newest_plan
        #: Placements that a pserver did not have yet, or not any more, in the present operation.
        self._finding: Waiting | None = None
        self._layout = self._laid_out(plan, owners, None)
        #: That the next operation uses.
        self._next_layout = self._layout
        self._swapping = threading.Lock()
        self._sums = GradientSums()
        #: Batches that have changed since the loop was told of any.
        self._changed: list[BatchState] = []
        self._listener: Listener | None = None
        self._probe = probe or StepProbe(clock.now)
        self._probe.conversations[:] = [shard.conversation for shard in self._layout.shards]
        #: Why the session is over; empty: it is not.
        self._closed = ""

    # the layout

    @property
    def plan(self) -> ShardPlan:
        """The newest plan."""
        return self._next_layout.plan

    def swap(self, plan: ShardPlan) -> None:
        """Use the placement of another plan from the next operation on. Any thread may call it.

        An operation that is in progress keeps the owners that it started with.

        Args:
            plan: Plan with the same blocks and another placement.

        Raises:
            UsageError: the plan has other blocks.
        """
        with self._swapping:
            before = self._next_layout
            if not plan.has_same_cut(before.plan):
                raise UsageError("the new placement is of other blocks: run the same flightedl version everywhere")
            self._next_layout = self._laid_out(plan, Owners.of(plan), before)

    def _laid_out(self, plan: ShardPlan, owners: Owners, before: ModelLayout | None) -> ModelLayout:
        known = () if before is None else before.shards
        shards = [
            self._shard_client(index, runs, plan, before=known[index] if index < len(known) else None)
            for index, runs in enumerate(owners.runs)
        ]
        if before is not None and len(known) >= plan.pserver_count:
            pool = before.pool
        else:
            pool = ThreadPoolExecutor(plan.pserver_count, "flightedl-parameters")
        return ModelLayout(plan, owners, shards, self._step_plans(plan, owners.runs, pool=pool), pool)

    def _take_layout(self) -> None:
        """Begin to use the newest layout; no operation is under way."""
        before, layout = self._layout, self._next_layout
        self._layout = layout
        self.steps.place(layout.owners.blocks, layout.owners.buckets)
        self.rows.place(layout.plan)
        self._probe.conversations[:] = [shard.conversation for shard in layout.shards]
        before.close(layout)

    def _find_placement(self, error: FlightedlError, outgoing: Outgoing | None) -> Outgoing | None:
        """Learn who owns the blocks now; return the gradients on their way there."""
        if self._newest_plan is None:
            raise error
        if self._finding is None:
            self._finding = self._waiting()
        self._finding.because(error)
        if self._next_layout is self._layout and (plan := self._newest_plan()).hash != self.plan.hash:
            self.swap(plan)
        if self._next_layout is self._layout:
            self._finding.pause()
            return outgoing
        self._take_layout()
        return None if outgoing is None else self._layout.plans.placed(outgoing, self._layout.plan)

    # Mapping

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        try:
            return self._values.views[name]
        except KeyError:
            if name in self._ranges:
                self._require_kept()
            raise KeyError(self._layout.plans.unknown(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __contains__(self, name: object) -> bool:
        return name in self._ranges

    @property
    def tree(self) -> Any:
        """The values in the containers that the model was declared with: dicts, lists, tuples, or JAX's pytrees."""
        self._require_kept()
        return dict(self) if self._tree is None else self._tree.restored(self._values.views)

    @property
    def versions(self) -> dict[str, int]:
        """Version of each parameter's values held here (of its oldest block)."""
        oldest: dict[str, int] = {}
        for number in self._blocks:
            version = self.steps.versions[number]
            name = self._names[self._blocks[number].parameter]
            oldest[name] = min(version, oldest.get(name, version))
        return oldest

    def _require_kept(self) -> None:
        if self._values.is_lent:
            raise UsageError("values are only shown when they come, as model.lend_to asked for: there are none here")

    # what the user calls

    def step(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Push the current batch's gradients, then pull: ``model[name]`` is fresh when this returns.

        With ``Async(push_every=n, pull_every=m)`` only every n-th step pushes, and only every m-th pulls. The
        optimizer's ``clip_norm`` is that of all gradients of one push.

        Args:
            gradients: name -> array of the parameter's shape. Floats of another type are converted to the parameter's.
                Parameters that are left out get no gradient. Or the containers that the model was declared with.

        Raises:
            GradientError: unknown name, wrong shape, no floats, or not finite; nothing was sent. A loop that goes on
                gets this batch again, unless it calls ``step`` with other gradients before.
            UsageError: no batch is current, or it was already pushed.
            UnavailableError: a pserver stayed away for longer than ``give_up_s``. Others may have the gradients: a loop
                that goes on all the same gets this batch again.
        """
        if tracing.tracer is None:
            self._push(gradients, is_complete=True)
        else:
            with tracing.span("step"):
                self._push(gradients, is_complete=True)

    def step_rows(self) -> None:
        """``step`` of rows alone: the parameters get no gradient."""
        with tracing.span("step"):
            self._push(_NO_GRADIENTS, is_complete=True)

    def push(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Push the current batch's gradients of some parameters. Errors as ``step``."""
        self._push(gradients, is_complete=False)

    def pull(self, names: Iterable[str] | None = None, *, min_version: int = 0) -> None:
        """Refresh values. In synchronous mode after a push this waits for the round of the current batch.

        Where others wait for this trainer (``Sync``, ``Bounded``), a batch that was pushed in part is complete with it.

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
        wanted = self._blocks if names is None else self._blocks_of(names)
        self.run(self.steps.pull(list(wanted), min_version))

    def lend_to(self, show: Show) -> None:
        """Zero copy: have values shown where they lie, the present ones now, and others whenever some come.

        For who has the model elsewhere, such as on a device. From then on it is not in this process's memory: there is
        no ``model[name]``. Where trainer and pserver are on one host, what is shown lies in the pserver's own memory.

        Args:
            show: Called as ``show(name, start, values)`` with a part of a parameter: the place of its first element in
                the flat parameter, and a read-only (n,) array, lent until ``show`` returns. It may come again, on any
                thread, one call at a time; what came last counts when ``step`` or ``pull`` returns, and each of its
                blocks is of one version then.

        Raises:
            UsageError: ``show`` kept what it was lent, or a module keeps these values. ``step`` and ``pull`` raise it,
                too, and whatever ``show`` raises, when they are through: the batch counts then. ``pull`` again.
        """
        self._require_open()
        if self._listener is not None:
            raise UsageError("an optimizer of fe.torch keeps this model's values: they cannot be lent as well")
        self._values.lend_to(show)

    def _blocks_of(self, names: Iterable[str]) -> list[int]:
        if not isinstance(names, Iterable):
            raise UsageError(f"names is {names!r:.80}, but must be names of parameters")
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in self._ranges:
                raise UsageError(self._layout.plans.unknown(name))
        return [number for name in chosen for number in self._ranges[name]]

    # what whoever keeps a copy of the values calls

    def listen(self, listener: Listener) -> None:
        """Tell this one, on the user's thread, whenever values came; it has the present ones."""
        self._require_kept()
        self._listener = listener
        self._values.stored = set()

    # what the session calls

    def batch_ends(self, current: CurrentBatch) -> None:
        """The user's code is through with the batch, and nothing more will be pushed of it."""
        if self._listener is not None:
            self._listener.batch_ends(current)

    def look_up(self, ids: Mapping[int, DistinctIds]) -> Lookup:
        """Rows of tables, by table number: as they are for the current batch, or at whatever version without one.

        Raises:
            UnavailableError: a pserver stayed away for longer than ``give_up_s``.
        """
        self._require_open()
        rows, steps = self.rows, self.steps
        if (known := rows.prefetched(ids, steps.versions if steps.is_synchronous else None)) is not None:
            return known
        lookup = Lookup(self._layout.plan, ids)
        if steps.current is not None and not steps.current.must_repeat:
            self._read_rows(lookup, as_reader=False)
        while lookup.missing():
            # The membership ended: the batch is done again, and what is read is of no consequence.
            self._read_rows(lookup, as_reader=True)
        return lookup

    def _read_rows(self, lookup: Lookup, *, as_reader: bool) -> None:
        keys = [self._layout.plan.buckets_of(pserver).start for pserver in lookup.missing()]
        with self.rows.looking_up(lookup):
            self.run(self.steps.pull(keys, as_reader=as_reader))

    def where(self) -> str:
        """The current batch, for people."""
        return f"{self.steps.current or 'no batch'}"

    @property
    def current_batch(self) -> CurrentBatch | None:
        """What the user's code is at."""
        return self.steps.current

    def push_rows(self, table: int, ids: Ids, gradients: npt.NDArray[np.float32]) -> None:
        """Gradients of the rows of distinct ids, which leave with the current batch's step.

        Raises:
            UsageError: no batch is current, or its rows were pushed.
        """
        self._require_open()
        current = self._require_current()
        current.has_gradient = True
        name = self._tables[table].name
        if self.rows.is_sent(current):
            raise UsageError(f"rows of table {name!r} were already pushed for this batch ({current}): push before step")
        self.rows.pending.add(table, ids, gradients)

    def forget_rows(self) -> None:
        """Nothing of what waits for the current batch's step is pushed."""
        self.rows.forget()

    def open_batch(self, batch: Batch, begun: Begun) -> None:
        """The user's code is about to get a batch."""
        if self._next_layout is not self._layout:
            self._take_layout()
        step = self.steps.open_batch(batch, begun.member, begun.step)
        if not isinstance(step, Done):
            self.run(step)

    def joined(self, member: int, mode: Mode | None) -> None:
        """The trainer is a member now: have values that a member may have."""
        self.run(self.steps.joined(member, mode))

    def close_batch(self) -> Sequence[BatchState]:
        """Answer for what the user's code did not push of the batch; return the batches that have changed."""
        try:
            if self.steps.sums is not None:
                current = self._require_current()
                if not current.is_undone and not current.waits:
                    self._add_rows()
            self.run(self.steps.close_batch())
        finally:
            if self._tables:
                self.rows.forget()
        return self._told()

    def push_sum(self) -> Sequence[BatchState]:
        """Push what was added up and not pushed yet; return the batches that have changed."""
        self.run(self.steps.push_sum())
        return self._told()

    def give_up_sum(self) -> Sequence[BatchState]:
        """Forget what was added up and not pushed yet; return the batches that have changed."""
        self.run(self.steps.give_up_sum())
        return self._told()

    def abandon_batch(self) -> None:
        """The loop was left at a batch: nothing of it goes on."""
        self.rows.forget()
        self.run(self.steps.abandon_batch())
        # Another loop counts its readings anew.
        self._changed.clear()

    def refresh(self) -> None:
        """Pull all blocks: as a member at or above its first round, else at whatever version they are."""
        self.run(self.steps.refresh(self._scope.membership.member))

    def _told(self) -> Sequence[BatchState]:
        changed, self._changed = self._changed, []
        return changed

    def run(self, step: Next, outgoing: Outgoing | None = None) -> None:
        """Carry out an operation of the steps from ``step`` on; ``outgoing``: the gradients that it pushes.

        Raises:
            BaseException: the operation ended with it.
        """

        def carry_out(effect: Effect) -> None:
            nonlocal outgoing
            if isinstance(effect, Transfer):
                self._transfer(effect, outgoing or self._layout.plans.nothing)
            elif isinstance(effect, TakeSum):
                outgoing = self._sum(effect)
            else:
                outgoing = self._find_placement(effect.error, outgoing)

        done = step if isinstance(step, Done) else carried_out(self.steps, step, carry_out)
        if self._finding is not None:
            self._finding.over()
            self._finding = None
        if done.batches:
            self._changed += done.batches
        if done.is_member_lost:
            self._scope.membership.lost()
        if done.error is not None:
            raise done.error
        if self._values.lending is not None:
            self._values.lending.require()

    def close(self, why: str = "this session is over") -> None:
        """Stop the threads, and let go of the streams; the values stay. ``why`` is told to whoever still asks."""
        self._closed = why
        self._layout.close()
        if self._next_layout is not self._layout:
            self._next_layout.close()

    # one batch to all pservers

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(self._closed)
        if self._next_layout is not self._layout:
            self._take_layout()

    def rejected(self, error: GradientError) -> None:
        """Note that a gradient of the current batch was rejected: the batch is handed out again."""
        self.steps.rejected(error)

    def _push(self, gradients: Mapping[str, npt.ArrayLike], *, is_complete: bool) -> None:
        if self._closed or self._next_layout is not self._layout:
            self._require_open()
        steps, current = self.steps, self.steps.current or self._require_current()
        if self._tree is not None and gradients is not _NO_GRADIENTS:
            gradients = self._tree.flattened(gradients)
        try:
            outgoing = self._layout.plans.sound(gradients, current)
            current.has_gradient = True
            if current.must_repeat:
                return
            if steps.sums is not None:
                self._add(outgoing, is_complete=is_complete)
                return
            if current.answered:
                self._require_first(gradients, current)
            if self._layout.plans.encodes:
                outgoing = self._layout.plans.encoded(outgoing)
            self.run(steps.step() if is_complete else steps.push(self._blocks_of(gradients)), outgoing)
        except GradientError as error:
            steps.rejected(error)
            raise

    def _add(self, outgoing: Outgoing, *, is_complete: bool) -> None:
        """Add the batch's gradients to the sum that is pushed next."""
        names = outgoing.plan.names
        added = self._added(names)
        self._sums.add(added.identity, dict(zip(names, outgoing.arrays, strict=True)), added.weight)
        if is_complete:
            self._add_rows()
            self.run(self.steps.step())

    def _places_of(self, name: str) -> list[Block]:
        return [self._blocks[number] for number in self._ranges[name]]

    def _require_current(self) -> CurrentBatch:
        current = self.steps.current
        if current is None:
            raise UsageError(
                "there is no current batch: push and step belong inside `for batch in job.dataset(...)`, before the "
                "next one is asked for"
            )
        return current

    def _add_rows(self) -> None:
        """The batch's rows go into the sum that is pushed next."""
        pending = self.rows.pending
        if pending:
            added = self._added([self.rows.name_in_sums(table) for table in pending.tables])
            self.rows.sums.add(added.identity, pending.take(), added.weight)
            pending.clear()

    def _added(self, names: Collection[str]) -> Added:
        """Errors as of ``Steps.add``."""
        if self.steps.sums is not None and (name := self.steps.sums.repeated(self._require_current(), names)):
            raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({self.where()})")
        return self.steps.add(list(names))

    def _require_first(self, names: Iterable[str], current: CurrentBatch) -> None:
        """UsageError if the batch has had a gradient for one of these parameters."""
        for name in names:
            if not current.answered.keys().isdisjoint(self._ranges[name]):
                raise UsageError(
                    f"the gradient of {name!r} was already pushed for this batch ({current}); for several steps, "
                    "declare them: job.dataset(..., steps_per_batch=2)"
                )

    def _sum(self, taken: TakeSum) -> Outgoing:
        """The gradients of a sum, ready to be sent."""
        arrays = self._layout.plans.clipped(self._sums.take(taken.identity, taken.divisors))
        outgoing = self._layout.plans.sound(arrays, f"the sum of {1 + len(taken.batch.further)} batches")
        rows = self.rows.of_sum(taken.identity, taken.divisors)
        return replace(self._layout.plans.encoded(outgoing, is_clipped=True), rows=rows)

    def _transfer(self, transfer: Transfer, outgoing: Outgoing) -> None:
        """Ask all pservers in parallel."""
        before = self._probe.turn(PUSH)
        try:
            if self._tables and outgoing.rows is None:
                outgoing = replace(outgoing, rows=self.rows.of(transfer))
            shards = self._layout.shards
            if len(shards) == 1:
                shards[0].carry_out(transfer.calls[0], transfer, outgoing)
            else:
                self._ask_all(transfer, outgoing)
        finally:
            if self._feedback is not None and self.steps.pushing is not None:
                self._feedback.settle(self.steps.pushing.answered, is_over=not self.steps.is_misplaced)
            if self._values.stored:
                self._tell_values()
            self._probe.transferred(before)

    def _ask_all(self, transfer: Transfer, outgoing: Outgoing) -> None:
        futures = [
            self._layout.pool.submit(tracing.bound(shard.carry_out, call, transfer, outgoing))
            for shard, call in zip(self._layout.shards, transfer.calls, strict=True)
        ]
        try:
            errors = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:
            # Ctrl-C: what arrived later would be taken for values of the batch that comes next.
            self.steps.give_up_transfer()
            wait(futures)
            raise
        if errors:
            raise errors[0]

    def _tell_values(self) -> None:
        stored = self._values.stored
        if self._listener is not None and stored:
            self._values.stored = set()
            self._listener.values_arrived([self._names[number] for number in sorted(stored)])


def _half_kernels(kind: str) -> HalfKernels:
    """NumPy takes three times as long, longer than what 16 bits save. Others need no compiler, and do not load it."""
    from flightedl.kernels.compiled import half_kernels

    return half_kernels(kind)
