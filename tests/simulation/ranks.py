"""Groups of ranks: what a launcher such as torchrun, a framework such as DDP, and a training script do around the data.

All ranks of a *start* begin together. After some rounds, they exchange their gradients, here the records of their
batches, so all ranks have the same model: the records of all rounds. Rank 0 saves the model with the position in the
data. If a rank fails or is killed, or if the launcher changes the number of ranks, all ranks of the start end, and the
next start resumes from the last checkpoint. The model of the start that succeeds must have each record once.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.scheduler import Thread, require_running, this_process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Started
    from tests.simulation.scenario import Scenario

#: Epoch of a round, and the records of each rank in it.
Round = tuple[int, tuple[tuple[int, ...], ...]]
_TORCH = "torch.distributed"
#: Exit codes after which ranks are started again, and None after a kill.
_RESTARTED = (1, 75, None)


class PeerError(RuntimeError):
    """Raised by a collective operation whose other ranks have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What the ranks of a group run, and how they are launched.

    Args:
        kind: "indexed", "parquet" or "mixture".
        reading: Arguments of the dataset.
        sizes: Numbers of ranks; each start has one of them.
        resizes_s: Times at which the launcher wants another number of ranks.
        linger_s: Maximum time that ranks survive the end of their start.
        sync_every: Rounds between two exchanges of gradients.
        save_every: Exchanges between two checkpoints.
        save_s: Maximum time that saving takes.
        is_ahead: True if the script fetches a batch before it has trained on the one before, and commits rounds.
        loads_first: True if only rank 0 loads the position.
        has_torch: True if ranks find each other by PyTorch; otherwise, the launcher names each start.
        has_reference: True if a start of one rank reads everything again at the end.
    """

    kind: str
    reading: dict[str, Any]
    sizes: tuple[int, ...]
    resizes_s: tuple[float, ...]
    linger_s: float
    sync_every: int
    save_every: int
    save_s: float
    is_ahead: bool
    loads_first: bool
    has_torch: bool
    has_reference: bool

    def batch(self, size: int) -> int:
        """Return the number of records in the global batches of this number of ranks."""
        return int(self.reading.get("global_batch") or self.reading["batch_size"] * size)

    @property
    def remainder(self) -> str:
        """What happens to the last records of an epoch."""
        return str(self.reading["remainder"])

    def __str__(self) -> str:
        reading = " ".join(f"{name}={value}" for name, value in self.reading.items())
        return f"group {self.kind} {'/'.join(map(str, self.sizes))} {reading}"


def drawn(draw: random.Random, *, is_deadly: bool = False) -> GroupPlan:
    """Draw a plan. If records are deadly, a rank ends only because of them."""
    reading: dict[str, Any] = dict([draw.choice((*[("batch_size", 4)] * 2, ("global_batch", 12), ("global_batch", 8)))])
    reading["remainder"] = draw.choice(("split", "split", "drop", "pad"))
    kind = draw.choice(("indexed", "parquet", "mixture"))
    if kind != "mixture":
        reading["shuffle"] = draw.random() < 0.75
    if draw.random() < 0.3:
        reading["lanes"] = 2
    if draw.random() < 0.5:
        reading["shuffle_block"] = 32
    is_ahead = draw.random() < 0.3
    if is_ahead:
        reading["explicit_commit"] = True
    return GroupPlan(
        kind=kind,
        reading=reading,
        sizes=draw.choice(((2,), (4, 2, 3), (1, 2), (2, 4))),
        resizes_s=tuple(0.5 + 5 * draw.random() for _ in range(0 if is_deadly else draw.choice((0, 1, 2)))),
        linger_s=draw.choice((0.0, 0.5)),
        sync_every=draw.choice((1, 1, 3)),
        save_every=draw.choice((1, 2, 4)),
        save_s=draw.choice((0.0, 0.2)),
        is_ahead=is_ahead,
        loads_first=draw.random() < 0.5,
        has_torch=draw.random() < 0.5,
        has_reference="global_batch" in reading and not is_deadly and draw.random() < 0.5,
    )


class Saved(NamedTuple):
    """A checkpoint of the ranks: their model, and the position in the data."""

    model: tuple[Round, ...] = ()
    state: dict[str, str] | None = None


@dataclass(slots=True, eq=False)
class Start:
    """One start of the ranks, and the collective operations among them.

    Args:
        number: Its number.
        size: Number of ranks.
        saved: The checkpoint from which it resumes.
        has_torch: See ``GroupPlan``.
        is_reference: True if it only reads everything again.
    """

    number: int
    size: int
    saved: Saved
    has_torch: bool
    is_reference: bool = False
    ranks: list[Started] = field(default_factory=list)
    #: What the framework's store has.
    store: dict[str, bytes] = field(default_factory=dict)
    #: Number of an operation -> rank -> its part.
    _parts: dict[int, dict[int, Any]] = field(default_factory=dict)
    _counts: Counter[int] = field(default_factory=Counter)
    _waiting: list[Thread] = field(default_factory=list)

    def gathered(self, rank: int, part: Any) -> list[Any]:
        """Wait until all ranks have called this equally often. Return their parts. Raises PeerError."""
        scheduler = require_running()
        parts = self._parts.setdefault(self._counts[rank], {})
        self._counts[rank] += 1
        parts[rank] = part
        self.wake()
        while len(parts) < self.size:
            for each in self.ranks:
                if each.index not in parts and not each.is_alive:
                    assert each.result != 0, f"rank {each.index} has left before the others"
                    raise PeerError(f"Connection closed by peer: rank {each.index} has ended")
            assert scheduler.current is not None
            self._waiting.append(scheduler.current)
            scheduler.block(None, "a collective operation")
        return [parts[each] for each in range(self.size)]

    def wake(self) -> None:
        """Let waiting ranks look again."""
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            require_running().wake(thread)

    # what the product needs of PyTorch's store

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self.store[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self.store[key]

    def check(self, keys: Sequence[str]) -> bool:
        """True if all of these keys have values."""
        return all(key in self.store for key in keys)


class Launcher:
    """Starts the ranks, and all of them again if one ends.

    Args:
        cluster: The cluster.
        plan: What the ranks run.
    """

    def __init__(self, cluster: Cluster, plan: GroupPlan) -> None:
        self._cluster = cluster
        self.plan = plan
        self.saved = Saved()
        self.start = Start(0, 0, self.saved, plan.has_torch)
        self.is_done = False
        #: The model of the start that has ended well, and that of the reference; empty if there is none.
        self.model: tuple[Round, ...] = ()
        self.reference: tuple[Round, ...] = ()
        #: Summaries of the data that the ranks of the start that has ended well had at their end.
        self.summaries: list[Any] = []
        #: (epoch, number of its records before) -> records of the global batch.
        self._batches: dict[tuple[int, int], frozenset[int]] = {}

    def begin(self, *, is_reference: bool = False) -> None:
        """Start all ranks."""
        number, cluster = self.start.number + 1, self._cluster
        size = 1 if is_reference else cluster.chance(f"start {number}").choice(self.plan.sizes)
        saved = Saved() if is_reference else self.saved
        self.start = Start(number, size, saved, self.plan.has_torch, is_reference)
        if not is_reference:
            self.summaries = []
        cluster.say("START", f"start {number} of {size} ranks after {len(saved.model)} rounds")
        for rank in range(size):
            process = cluster.start("trainer", rank, self.start)
            process.on_death.append(self.start.wake)
            self.start.ranks.append(process)

    def succeeded(self, start: Start, model: Sequence[Round], summary: Any) -> None:
        """Note what a rank has at its end."""
        if start.is_reference:
            self.reference = tuple(model)
        elif start is self.start:
            self.model = tuple(model)
            # A start that resumes at the end of the data has none.
            self.summaries += [] if summary is None else [summary]

    def plan_resizes(self) -> None:
        """Plan the starts with another number of ranks."""
        for at_s in self.plan.resizes_s:
            self._cluster.scheduler.after(at_s, self._resize)

    def _resize(self) -> None:
        if not self.is_done and not self.start.is_reference:
            self._again(self.start)

    def ended(self, process: Started) -> None:
        """Act on the end of a rank. Does nothing if its start is over."""
        start = process.group_start
        if start is not self.start or self.is_done:
            return
        if process.result not in {0, *_RESTARTED}:
            # Ranks that make usage errors would do so again. The process's end is judged.
            self.is_done = True
        elif process.result != 0:
            self._again(start)
        elif all(each.result == 0 for each in start.ranks):
            self.is_done = start.is_reference or not self.plan.has_reference
            if not self.is_done:
                self.begin(is_reference=True)

    def _again(self, start: Start) -> None:
        for each in start.ranks:
            if each.is_alive:
                delay_s = self.plan.linger_s * self._cluster.chance(f"end {each.name}").random()
                self._cluster.scheduler.after(delay_s, partial(self._cluster.scheduler.kill, each))
        self.begin(is_reference=start.is_reference)

    def trained(self, start: Start, before: Sequence[Round], rounds: Sequence[Round]) -> None:
        """Compare the rounds that a start has trained on with those before them, and with those of other starts."""
        plan, scenario = self.plan, self._cluster.scenario
        for number, (epoch, parts) in enumerate(rounds):
            earlier = _records([*before, *rounds[:number]], epoch)
            place, found = (epoch, len(earlier)), frozenset(itertools.chain(*parts))
            is_last = scenario.deadly or place[1] + plan.batch(len(parts)) > scenario.records
            if plan.remainder == "pad" and is_last:
                # The last batch repeats records, which depend on the number of ranks.
                continue
            assert not found & earlier.keys(), f"start {start.number} repeats records at {place}"
            if "global_batch" in plan.reading and not scenario.deadly:
                same = self._batches.setdefault(place, found)
                assert found == same, f"start {start.number} has another global batch at {place}"


class Training:
    """The training of one rank.

    Args:
        launcher: What has started the rank.
        start: The rank's start.
        rank: The rank.
        data: The data of the group.
        chance: Source of chance.
    """

    def __init__(self, launcher: Launcher, start: Start, rank: int, data: Any, chance: random.Random) -> None:
        self._launcher, self._start, self._rank, self._data, self._chance = launcher, start, rank, data, chance
        self.model = list(start.saved.model)
        #: Rounds since the last exchange: epoch, and this rank's records.
        self._pending: list[tuple[int, tuple[int, ...]]] = []
        self._exchanges = 0

    def step(self, epoch: int, records: tuple[int, ...]) -> None:
        """Train on a batch."""
        plan = self._launcher.plan
        self._pending.append((epoch, records))
        if len(self._pending) == plan.sync_every:
            self._exchange()
            self._exchanges += 1
            if self._exchanges % plan.save_every == 0:
                self._save()

    def end(self) -> None:
        """Train on the last batches, and save the model."""
        self._exchange()
        self._save()

    def _exchange(self) -> None:
        """Add the rounds since the last exchange to the models of all ranks."""
        found = self._start.gathered(self._rank, (tuple(self._pending), self._data.state_dict()))
        epochs = [[epoch for epoch, _ in rounds] for rounds, _ in found]
        assert all(each == epochs[0] for each in epochs), f"ranks have other rounds: {epochs}"
        assert all(state == found[0][1] for _, state in found), "ranks are at other positions in the data"
        rounds = [(epoch, tuple(of[number][1] for of, _ in found)) for number, epoch in enumerate(epochs[0])]
        self._launcher.trained(self._start, self.model, rounds)
        self.model.extend(rounds)
        for _ in self._pending if self._launcher.plan.is_ahead else ():
            self._data.commit()
        self._pending.clear()

    def _save(self) -> None:
        if self._rank == 0 and not self._start.is_reference:
            saved = Saved(tuple(self.model), self._data.state_dict())
            require_running().sleep(self._launcher.plan.save_s * self._chance.random())
            self._launcher.saved = saved


def _records(rounds: Sequence[Round], epoch: int) -> Counter[int]:
    """Return how often each record of an epoch is in some rounds."""
    return Counter(itertools.chain(*(itertools.chain(*parts) for each, parts in rounds if each == epoch)))


def batches_of(data: Any, *, is_ahead: bool) -> Iterator[tuple[int, Any]]:
    """Yield the batches of a loop, each with its epoch. With ``is_ahead``, the next one has been fetched by then."""
    found = ((data.epoch, batch) for batch in data)
    if not is_ahead:
        yield from found
        return
    last = None
    for each in found:
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def install() -> None:
    """Offer the part of PyTorch that finds the ranks of the current process."""

    def start() -> Start | None:
        found: Start | None = getattr(this_process(), "group_start", None)
        return found if found is not None and found.has_torch else None

    def rank() -> int:
        return int(getattr(this_process(), "index"))  # noqa: B009 - only processes of a cluster have it

    made = types.ModuleType(_TORCH)
    made.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: start() is not None,
        get_rank=rank,
        get_world_size=lambda: getattr(start(), "size"),  # noqa: B009 - it is initialized
        distributed_c10d=types.SimpleNamespace(_get_default_store=start),
    )
    sys.modules[_TORCH] = made


def problems(launcher: Launcher, scenario: Scenario, stored: bytes) -> Iterator[str]:
    """Describe what is wrong after the ranks have succeeded. ``stored`` is the ``GroupRecord`` in etcd."""
    from flightedl.messages.base import decode
    from flightedl.messages.groups import GroupRecord

    plan, record = launcher.plan, decode(stored, GroupRecord)
    if (record.phase, record.size) != ("done", launcher.start.size):
        yield f"all ranks have ended, but the group of {record.size} is {record.phase}"
    yield from (f"model: {each}" for each in _of_model(launcher.model, plan, scenario))
    if plan.has_reference:
        yield from (f"reference: {each}" for each in _of_model(launcher.reference, plan, scenario))
    if not scenario.stop_at_s:
        counts = _records(launcher.model, scenario.epochs - 1)
        missing, repeated = scenario.records - len(counts), counts.total() - len(counts)
        for each in launcher.summaries:
            told = each.records, each.left_out + each.lost_records, each.repeated
            # All excluded records count as lost, also those of a padded round that an earlier round has had.
            may_differ = scenario.deadly and plan.remainder == "pad" and sum(told[:2]) == scenario.records
            if told != (len(counts), missing, repeated) and not may_differ:
                yield f"the summary is {told}, not {(len(counts), missing, repeated)}"


def _of_model(model: Sequence[Round], plan: GroupPlan, scenario: Scenario) -> Iterator[str]:
    """Each record of each epoch has been trained on once, in global batches of the right size."""
    epochs = [epoch for epoch, _ in model]
    if epochs != sorted(epochs):
        yield "its epochs are not in order"
    for epoch, parts in model:
        sizes, batch = [len(each) for each in parts], plan.batch(len(parts))
        most = -(-batch // len(parts))
        may_be_short = plan.remainder == "split" or scenario.deadly
        may_be_empty = scenario.deadly or batch < 2 * len(parts)
        if max(sizes) > most or (min(sizes) == 0 and not may_be_empty):
            yield f"a round of epoch {epoch} has {sizes} records"
        if not (may_be_short or set(sizes) == {most} or sum(sizes) == batch):
            yield f"a round of epoch {epoch} has {sizes} records"
    last = max(epochs, default=0) if scenario.stop_at_s else scenario.epochs
    for epoch in range(scenario.epochs):
        counts = _records(model, epoch)
        missing, repeated = scenario.records - len(counts), counts.total() - len(counts)
        batch = plan.batch(max(plan.sizes))
        # Excluded are also the records of the rounds since the last commit, and of a round that was fetched ahead.
        excluded = len(scenario.deadly) * batch * (1 + plan.sync_every if plan.is_ahead else 1)
        may_lack = (batch - 1 if plan.remainder == "drop" else 0) + excluded
        if epoch < last and missing > may_lack:
            yield f"{missing} records of epoch {epoch} are missing"
        if repeated > (batch + max(plan.sizes) if plan.remainder == "pad" else 0):
            yield f"{repeated} records of epoch {epoch} are there twice"
        if counts.keys() & set(scenario.deadly):
            yield f"a deadly record is in epoch {epoch}"
