"""The model as trainers see it: a mapping of arrays, with methods that push gradients and pull values.

:class:`~flightedl.domain.trainer.steps.Steps` decides what each call sends and requests. This module handles the
arrays: it validates, clips, accumulates and encodes gradients before anything is sent, and passes them to the pservers'
clients, which work in parallel. Received values are copied once, into the arrays that the user reads.
"""

from __future__ import annotations

import logging
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
from flightedl.client.data.slices import Slices
from flightedl.client.model.kept import ErrorFeedback, GradientSums
from flightedl.client.model.layout import ModelLayout, Owners
from flightedl.client.model.lending import Show
from flightedl.client.model.shard_client import ShardClient
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
from flightedl.domain.trainer.membership import Begun
from flightedl.domain.trainer.steps import Added, Done, Effect, Next, PrepareSum, Steps, carried_out
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import FlightedlError, GradientError, UnavailableError, UsageError
from flightedl.ports import Clock
from flightedl.process import tracing
from flightedl.process.fork_guard import GUARD

if TYPE_CHECKING:
    from flightedl.client.participation import Participation
    from flightedl.kernels.compiled import HalfKernels

Array = npt.NDArray[np.generic]
_log = logging.getLogger(__name__)
#: Pause in seconds between two pushes to blocks that are about to move.
_PLACEMENT_PAUSE_S = 0.005
_NO_GRADIENTS: Mapping[str, npt.ArrayLike] = MappingProxyType({})


class Listener(Protocol):
    """Listener that maintains a copy of the values, for example in a deep-learning framework's module."""

    def values_arrived(self, names: Collection[str]) -> None: ...

    def batch_ends(self, current: CurrentBatch) -> None:
        """Record that the user's code has finished the batch. If ``current.is_undone``, the batch will be repeated.

        Raises:
            UsageError: the batch has gradients that were not pushed.
        """
        ...


class Parameters(Mapping[str, npt.NDArray[np.generic]]):
    """The model's parameters by name, as read-only arrays that ``pull`` and ``step`` update in place.

    Args:
        plan: The shard plan.
        mode: Consistency mode: determines when a step pulls, and if a pull waits for the previous push's round.
        clip_norm: Maximum global norm: gradients with a greater norm are scaled down to it. None for no limit.
        wire: Type in which float32 elements are sent; see ``kernels.half_precision``.
        error_feedback: True to add the rounding error of ``wire`` to the next gradient; see ``kept``.
        servers: Connections to the pservers.
        scope: Current sender and membership.
        waiting: Begins a wait that is reported to the user.
        clock: Clock for the deadlines of streams.
        steps: Creates the state machine; see ``Steps``.
        unclipped: Parameters to which ``clip_norm`` does not apply.
        assigned: Parameters to which new values are pushed instead of gradients.
        tree: The containers with which the model was declared; None for a mapping of arrays.
        probe: Times of the loop's activities; None to create one.
        newest_plan: Called when a pserver lacks some blocks. Returns the plan with the newest known owners. Waits a few
            seconds if there is no newer plan than the given one. None if plans cannot change.
    """

    def __init__(
        self,
        plan: ShardPlan,
        mode: Mode,
        servers: Servers,
        scope: Participation,
        waiting: Callable[[], Waiting],
        clock: Clock,
        clip_norm: float | None = None,
        wire: str = "",
        error_feedback: bool = False,
        steps: Callable[[Sequence[Sequence[int]], Mode, Sequence[range], int], Steps] = Steps,
        unclipped: Collection[str] = (),
        assigned: Collection[str] = (),
        tree: Tree | None = None,
        probe: StepProbe | None = None,
        newest_plan: Callable[[ShardPlan, float], ShardPlan] | None = None,
    ) -> None:
        self._names = [spec.name for spec in plan.parameters]
        self._tables = plan.tables
        self._tree = tree
        self._scope = scope
        halves = _half_kernels(wire) if wire else None
        self._feedback = ErrorFeedback(halves, self._places_of) if error_feedback and halves is not None else None
        self._blocks = {number: plan.block(number) for number in range(plan.block_count)}
        #: Parameter -> its block numbers. Cached, because looking them up takes as long as sending a small parameter.
        self._ranges = {spec.name: plan.block_range(spec.name) for spec in plan.parameters}
        #: Pushes to tables and row lookups; idle if there are no tables.
        self.rows = TableRows(plan)
        self._values = ModelValues(plan, self._blocks, halves)
        owners = Owners.of(plan)
        #: State machine of pushes and pulls.
        self.steps = steps(owners.blocks, mode, owners.buckets, plan.placement)
        shard = partial(ShardClient, values=self._values, servers=servers, sender=scope, waiting=waiting, clock=clock)
        self._shard_client = partial(shard, steps=self.steps, is_newest=self._is_newest)
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
        #: The current operation's wait for the pservers to adopt the placement that this trainer knows.
        self._finding: Waiting | None = None
        self._layout = self._laid_out(plan, owners, None)
        #: The layout that the next operation will use.
        self._next_layout = self._layout
        self._swapping = threading.Lock()
        self._sums = GradientSums(assigned)
        #: Batches whose state has changed since the last report to the loop.
        self._changed: list[BatchState] = []
        self._listener: Listener | None = None
        #: The slices of each batch; None unless the model has local steps.
        self.slices: Slices | None = None
        #: The batch whose local steps began with the job's values.
        self._begun: CurrentBatch | None = None
        self._probe = probe or StepProbe(clock.now)
        self._probe.conversations[:] = [shard.conversation for shard in self._layout.shards]
        #: Reason why the session has ended; empty while it is open.
        self._closed = ""

    # the layout

    @property
    def plan(self) -> ShardPlan:
        return self._next_layout.plan

    def swap(self, plan: ShardPlan) -> None:
        """Use the placement of another plan, starting with the next operation. Any thread may call this method.

        An operation in progress continues to use the owners known when it started.

        Args:
            plan: Plan with the same blocks in another placement.

        Raises:
            UsageError: the plan has different blocks.
        """
        with self._swapping:
            before = self._next_layout
            if plan.hash == before.plan.hash or self._closed:
                return
            if not plan.has_same_cut(before.plan):
                raise UsageError("the new placement belongs to other blocks: run the same flightedl version everywhere")
            self._next_layout = layout = self._laid_out(plan, Owners.of(plan), before)
        for shard in layout.shards[len(before.shards) :]:
            threading.Thread(target=shard.connect, name="flightedl-connect", daemon=True).start()

    def _is_newest(self, plan_hash: str) -> bool:
        return self._next_layout.plan.hash == plan_hash

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

    def _adopt_layout(self) -> None:
        before, layout = self._layout, self._next_layout
        self._layout = layout
        self.steps.place(layout.owners.blocks, layout.owners.buckets, layout.plan.placement)
        self.rows.place(layout.plan)
        self._probe.conversations[:] = [shard.conversation for shard in layout.shards]
        before.close(layout)

    def _find_placement(self, error: FlightedlError, outgoing: Outgoing | None) -> Outgoing | None:
        """Look up the current owners of the blocks. Return the gradients laid out for them."""
        if self._newest_plan is None:
            raise error
        if self._finding is None:
            self._finding = self._waiting()
        self._finding.because(error)
        # A block may also be about to move, or on its way to its new owner.
        if self._next_layout is self._layout:
            self.swap(self._newest_plan(self.plan, _PLACEMENT_PAUSE_S))
        if self._next_layout is self._layout:
            return outgoing
        self._adopt_layout()
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
        """The values in the structure in which the model was declared: dicts, lists, tuples, or JAX pytrees."""
        self._require_kept()
        return dict(self) if self._tree is None else self._tree.restored(self._values.views)

    @property
    def versions(self) -> dict[str, int]:
        """Version of each parameter's values in this trainer: the lowest version of its blocks."""
        oldest: dict[str, int] = {}
        for number in self._blocks:
            version = self.steps.versions[number]
            name = self._names[self._blocks[number].parameter]
            oldest[name] = min(version, oldest.get(name, version))
        return oldest

    def _require_kept(self) -> None:
        if self._values.is_lent:
            raise UsageError("model.lend_to only shows values when they arrive, so they cannot be read here")

    # for the user

    def step(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Push the current batch's gradients, then pull. When this returns, ``model[name]`` is up to date.

        With ``Async(push_every=n, pull_every=m)``, only every n-th step pushes, and only every m-th step pulls. The
        optimizer's ``clip_norm`` limits the norm of all gradients in a push together.

        Args:
            gradients: Name -> array of the parameter's shape, or the containers with which the model was declared.
                Other float types are converted to the parameter's. Omitted parameters get no gradient.

        Raises:
            GradientError: a name is unknown, or a gradient has a wrong shape or type, or is not finite. Nothing was
                sent. The loop repeats the batch, unless the script first calls ``step`` with other gradients.
            UsageError: no batch is current, or it has already been pushed.
            UnavailableError: a pserver was unavailable for longer than ``give_up_s``. The loop repeats the batch.
        """
        if tracing.tracer is None:
            self._push(gradients, is_complete=True)
        else:
            with tracing.span("step"):
                self._push(gradients, is_complete=True)

    def local_values(self, values: Any = None) -> Any:
        """Return the values from which the next of this trainer's local steps begins.

        Args:
            values: This trainer's values after its previous local step; None before the first one.

        Returns:
            ``values``; before the first step on a batch, copies of the job's values, in the structure in which the
            model was declared.

        Raises:
            UsageError: no batch is current, or the model was declared without ``local_steps``.
        """
        slices, current = self._require_slices(), self._require_current()
        if slices.number:
            return values
        self._begun = current
        copies = {name: np.array(value) for name, value in self.items()}
        return copies if self._tree is None else self._tree.restored(copies)

    def local_step(self, values: Any) -> None:
        """Record a local step. After the last one on a batch, push the difference to the job's values, then pull.

        The gradient is the job's values minus the given ones, so the optimizer ``SGD(lr=1.0)`` takes their mean.

        Args:
            values: This trainer's values after the step, like the ``gradients`` of ``step``. A name that was omitted
                gets no gradient.

        Raises:
            UsageError: for the same reasons as ``local_values``, or the batch did not begin with it.
            GradientError, UnavailableError: for the same reasons as ``step``. The loop repeats all slices of the batch.
        """
        slices, current = self._require_slices(), self._require_current()
        if slices.are_open:
            return
        if self._begun is not current:
            raise UsageError("begin each local step with `values = model.local_values(values)`, or values would be old")
        flat = values if self._tree is None else self._tree.flattened(values)
        is_mapping = isinstance(flat, Mapping)
        self.step({name: self._difference(name, value) for name, value in flat.items()} if is_mapping else flat)

    def _require_slices(self) -> Slices:
        if self.slices is None:
            raise UsageError("this model has no local steps: declare them, as in job.parameters(..., local_steps=50)")
        return self.slices

    def _difference(self, name: str, value: Any) -> Any:
        """Return the job's values minus these. Values that ``step`` will reject are returned as they are."""
        known = self._values.views.get(name)
        if known is None or np.shape(value) != known.shape:
            return value
        try:
            return np.subtract(known, value)
        except TypeError:
            return value

    def step_rows(self) -> None:
        """Push only gradients of table rows, like a ``step`` without dense gradients."""
        with tracing.span("step"):
            self._push(_NO_GRADIENTS, is_complete=True)

    def push(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Push gradients of some parameters for the current batch. Raises the same errors as ``step``."""
        self._push(gradients, is_complete=False)

    def pull(self, names: Iterable[str] | None = None, *, min_version: int = 0) -> None:
        """Pull values. In synchronous mode, after a push, wait until the current batch's round has closed.

        A partial push is completed first if other trainers wait for this one (``Sync``, ``Bounded``).

        Args:
            names: Names of the parameters; None for all.
            min_version: Minimum number of updates of each block (in synchronous mode, of rounds) for which to wait.

        Raises:
            UsageError: a parameter does not exist.
            UnavailableError: a pserver was unavailable for longer than ``give_up_s``.
            BegunAnewError: the job has ended, and then a pserver was lost, together with some batches.
        """
        self._require_open()
        if self.slices is not None and self.slices.count and not self._require_current().has_gradient:
            raise UsageError("a pull between local steps would drop them: pull before the loop or after it")
        checked("min_version", min_version, int, Limits(at_least=0))
        wanted = self._blocks if names is None else self._blocks_of(names)
        self.run(self.steps.pull(list(wanted), min_version))

    def lend_to(self, show: Show) -> None:
        """Show values to a function in place, without a copy: the current values now, later values as they arrive.

        This method is for scripts that keep the model elsewhere, for example on a device. From then on, this process
        stores no values, and ``model[name]`` raises an error. On a pserver's host, the function reads values in the
        pserver's own memory.

        Args:
            show: Called as ``show(name, start, values)`` with a part of a parameter: the index of its first element in
                the flat parameter, and a read-only (n,) array that is valid until ``show`` returns. Any thread may call
                it, but only one at a time, and a part may be shown again. When ``step`` or ``pull`` returns, the last
                values of each part are valid, and each block in it has a single version.

        Raises:
            UsageError: ``show`` kept a reference to the memory, or a module uses these values. ``step`` and ``pull``
                raise this error, too, and any error of ``show``, after the batch has been counted. In this case, call
                ``pull`` again.
        """
        self._require_open()
        if self._listener is not None:
            raise UsageError("an optimizer of fe.torch keeps this model's values, so they cannot be lent as well")
        self._values.lend_to(show)

    def _blocks_of(self, names: Iterable[str]) -> list[int]:
        if not isinstance(names, Iterable):
            raise UsageError(f"names is {names!r:.80}, but must be names of parameters")
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in self._ranges:
                raise UsageError(self._layout.plans.unknown(name))
        return [number for name in chosen for number in self._ranges[name]]

    # for listeners that keep a copy of the values

    def listen(self, listener: Listener) -> None:
        """Report new values to the listener, which already has the current ones. Runs on the user's thread."""
        self._require_kept()
        self._listener = listener
        self._values.stored = set()

    def gradient_memory(self) -> Mapping[str, Array]:
        """Return an array for each parameter's gradient. ``step`` sends gradients in these arrays without a copy.

        Only ``step`` sends the arrays. The dict is empty if gradients must be encoded, or if memory cannot be shared.
        """
        if self._layout.plans.encodes or self._values.shortens:
            return {}
        try:
            memory = self._values.gradient_memory()
        except UnavailableError as error:
            _log.info("gradients are not staged: %s", error)
            return {}
        for shard in self._layout.shards:
            # Streams that were opened earlier do not share this memory.
            shard.close()
        return memory

    # for the session

    def batch_ends(self, current: CurrentBatch) -> None:
        """Record that the user's code has finished the batch and pushes no more gradients for it."""
        if self._listener is not None:
            self._listener.batch_ends(current)

    def look_up(self, ids: Mapping[int, DistinctIds]) -> Lookup:
        """Look up rows by table number, at the version of the current batch's round.

        If no batch is current, rows of any version are accepted.

        Raises:
            UnavailableError: a pserver was unavailable for longer than ``give_up_s``.
        """
        self._require_open()
        rows, steps = self.rows, self.steps
        if (known := rows.prefetched(ids, steps.versions if steps.is_synchronous else None)) is not None:
            return known
        lookup = Lookup(self._layout.plan, ids)
        if steps.current is not None and not steps.current.must_repeat:
            self._read_rows(lookup, as_reader=False)
        while lookup.missing():
            # Rows of any version are acceptable, because the membership has ended and the batch will be repeated.
            self._read_rows(lookup, as_reader=True)
        return lookup

    def _read_rows(self, lookup: Lookup, *, as_reader: bool) -> None:
        keys = [self._layout.plan.buckets_of(pserver).start for pserver in lookup.missing()]
        with self.rows.looking_up(lookup):
            self.run(self.steps.pull(keys, as_reader=as_reader))

    def where(self) -> str:
        """Return a description of the current batch for use in messages."""
        return f"{self.steps.current or 'no batch'}"

    @property
    def current_batch(self) -> CurrentBatch | None:
        """The batch on which the user's code is working."""
        return self.steps.current

    def push_rows(self, table: int, ids: Ids, gradients: npt.NDArray[np.float32]) -> None:
        """Add gradients of rows with distinct ids, which the current batch's step will push.

        Raises:
            UsageError: no batch is current, or its rows have already been pushed.
        """
        self._require_open()
        current = self._require_current()
        current.has_gradient = True
        name = self._tables[table].name
        if self.rows.is_sent(current):
            raise UsageError(f"rows of table {name!r} were already pushed for this batch ({current}): push before step")
        self.rows.pending.add(table, ids, gradients)

    def forget_rows(self) -> None:
        self.rows.forget()

    def open_batch(self, batch: Batch, begun: Begun) -> None:
        if self._next_layout is not self._layout:
            self._adopt_layout()
        step = self.steps.open_batch(batch, begun.member, begun.step)
        if not isinstance(step, Done):
            self.run(step)

    def joined(self, member: int, mode: Mode | None) -> None:
        """Pull values as a new member of the view."""
        self.run(self.steps.joined(member, mode))

    def close_batch(self) -> Sequence[BatchState]:
        try:
            if self.steps.sums is not None:
                current = self._require_current()
                if not current.is_undone and not current.waits:
                    self._add_rows()
            self.run(self.steps.close_batch())
        finally:
            if self._tables:
                self.rows.forget()
        return self._changed_batches()

    def push_sum(self) -> Sequence[BatchState]:
        """Push the accumulated sum. Return the batches whose state has changed."""
        self.run(self.steps.push_sum())
        return self._changed_batches()

    def give_up_sum(self) -> Sequence[BatchState]:
        """Drop the accumulated sum. Return the batches whose state has changed."""
        self.run(self.steps.give_up_sum())
        return self._changed_batches()

    def abandon_batch(self) -> None:
        """Abandon the current batch, because the script left the loop."""
        self.rows.forget()
        self.run(self.steps.abandon_batch())
        # The next loop numbers its readings from 0.
        self._changed.clear()

    def refresh(self) -> None:
        """Pull all blocks. A member requires at least its first round's version; others accept any version."""
        self.run(self.steps.refresh(self._scope.membership.member))

    def _changed_batches(self) -> Sequence[BatchState]:
        changed, self._changed = self._changed, []
        return changed

    def run(self, step: Next, outgoing: Outgoing | None = None) -> None:
        """Carry out an operation of ``Steps`` that begins with ``step`` and pushes the ``outgoing`` gradients.

        Raises:
            BaseException: the error that ended the operation.
        """

        def carry_out(effect: Effect) -> None:
            nonlocal outgoing
            if isinstance(effect, Transfer):
                self._transfer(effect, outgoing or self._layout.plans.nothing)
            elif isinstance(effect, PrepareSum):
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
        """Stop threads and close streams. Values stay readable; later calls raise an error with the text ``why``."""
        self._closed = why
        self._layout.close()
        if self._next_layout is not self._layout:
            self._next_layout.close()

    # one batch to all pservers

    def _require_open(self) -> None:
        GUARD.check()
        if self._closed:
            raise UsageError(self._closed)
        if self._next_layout is not self._layout:
            self._adopt_layout()

    def rejected(self, error: GradientError) -> None:
        """Record that a gradient of the current batch was rejected, so that the loop repeats the batch."""
        self.steps.rejected(error)

    def _push(self, gradients: Mapping[str, npt.ArrayLike], *, is_complete: bool) -> None:
        if self._closed or GUARD.is_forked or self._next_layout is not self._layout:
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
                "there is no current batch: call push and step inside `for batch in job.dataset(...)`, before the next "
                "batch is requested"
            )
        return current

    def _add_rows(self) -> None:
        pending = self.rows.pending
        if pending:
            added = self._added([self.rows.name_in_sums(table) for table in pending.tables])
            self.rows.sums.add(added.identity, pending.take(), added.weight)
            pending.clear()

    def _added(self, names: Collection[str]) -> Added:
        """Add to the accumulated sum. Raises the same errors as ``Steps.add``."""
        if self.steps.sums is not None and (name := self.steps.sums.repeated(self._require_current(), names)):
            raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({self.where()})")
        return self.steps.add(list(names))

    def _require_first(self, names: Iterable[str], current: CurrentBatch) -> None:
        """Raise UsageError if the current batch already has a gradient for any of these parameters."""
        for name in names:
            if not current.answered.keys().isdisjoint(self._ranges[name]):
                raise UsageError(
                    f"the gradient of {name!r} was already pushed for this batch ({current}); for several steps, "
                    "declare them: job.dataset(..., steps_per_batch=2)"
                )

    def _sum(self, prepared: PrepareSum) -> Outgoing:
        """Return the gradients of the sum, laid out for sending."""
        arrays = self._layout.plans.clipped(self._sums.take(prepared.identity, prepared.divisors))
        outgoing = self._layout.plans.sound(arrays, f"the sum of {1 + len(prepared.batch.others)} batches")
        rows = self.rows.of_sum(prepared.identity, prepared.divisors)
        return replace(self._layout.plans.encoded(outgoing, is_clipped=True), rows=rows)

    def _transfer(self, transfer: Transfer, outgoing: Outgoing) -> None:
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
                self._announce_values()
            self._probe.transferred(before)

    def _ask_all(self, transfer: Transfer, outgoing: Outgoing) -> None:
        futures = [
            self._layout.pool.submit(tracing.bound(shard.carry_out, call, transfer, outgoing))
            for shard, call in zip(self._layout.shards, transfer.calls, strict=True)
        ]
        try:
            errors = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:
            # After Ctrl-C, late answers must not be mistaken for answers to the next batch.
            self.steps.give_up_transfer()
            wait(futures)
            raise
        if errors:
            raise errors[0]

    def _announce_values(self) -> None:
        stored = self._values.stored
        if self._listener is not None and stored:
            self._values.stored = set()
            self._listener.values_arrived([self._names[number] for number in sorted(stored)])


def _half_kernels(kind: str) -> HalfKernels:
    """Return the compiled conversions. NumPy's are so slow that there would be no point in sending 16-bit values."""
    from flightedl.kernels.compiled import half_kernels

    return half_kernels(kind)
