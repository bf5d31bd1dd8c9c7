"""Model of a pserver, its standby and a spare process: etcd, pushes, copies, and the reports of finished batches.

Each possible step is an event. ``domain.moving.standby`` makes the decisions, as in production. The values of a block
are a number for each batch: how often it was applied. As in production, the last part of a copy contains the applied
batches of all blocks, and the other parts contain only values. A copy's stream may break at any moment.
"""

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from flightedl.domain.moving.standby import Claim, CopyId, CopySource, Sent, StandbyCopy, claims
from flightedl.domain.recovery.replacements import Replacements

BLOCKS, BATCHES = 2, 2
#: Position of the process that is the standby.
STANDBY = 1

Counts = tuple[int, ...]


class Content(msgspec.Struct, frozen=True, array_like=True):
    """A block: how often its values contain each batch, and the set of applied batches as bits."""

    counts: Counts = (0,) * BATCHES
    applied: int = 0

    def push(self, batch: int) -> "Content":
        if self.applied & (1 << batch):
            return self
        counts = tuple(count + (number == batch) for number, count in enumerate(self.counts))
        return Content(counts, self.applied | (1 << batch))

    @property
    def is_consistent(self) -> bool:
        return all(count == (self.applied >> batch & 1) for batch, count in enumerate(self.counts))


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """A copy being sent: the blocks that are still to be copied, the parts in flight, and the parts kept back."""

    copy: CopyId
    due: tuple[int, ...]
    applied: tuple[int, ...] = ()
    flying: tuple[tuple[int, Counts], ...] = ()
    kept: tuple[tuple[int, Counts], ...] = ()


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process; ``generation`` is 0 while it has no index."""

    generation: int = 0
    #: Election of its values; 0 until it serves.
    election: int = 0
    blocks: tuple[Content, ...] = (Content(),) * BLOCKS
    newest: Sent | None = None
    #: Blocks that have changed since they were last copied.
    dirty: frozenset[int] = frozenset()
    #: Claim that it has decided on, based on what it knew at the time.
    claim: Claim | None = None


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of events that could repeat forever."""

    batches: int = BATCHES
    copies: int = 2
    breaks: int = 1
    crashes: int = 1
    #: Leases that expire although their process continues.
    freezes: int = 0
    #: Initializations of the model from scratch.
    elections: int = 0


class World(msgspec.Struct, frozen=True, array_like=True):
    """State of the cluster."""

    revision: int
    #: Generations of the keys in etcd; 0 without a key.
    index: int
    standby: int
    election: int
    processes: tuple[Process | None, ...]
    left: Limits
    #: The standby's copy.
    has: CopyId | None = None
    stream: Stream | None = None
    done: int = 0
    #: (batch, generation) of batches that all blocks of a process have acknowledged.
    acknowledged: frozenset[tuple[int, int]] = frozenset()
    known: Replacements = Replacements()
    settled: int = 0


def first_world(left: Limits) -> World:
    """Return a world with a pserver, a standby without a copy, and a spare."""
    processes = (Process(2, 1), Process(), Process())
    return World(3, 2, 3, 1, processes, left, known=Replacements().seen(0, 2, 1), settled=2)


def wrong(world: World) -> str | None:
    """Return what is wrong with a state, or None."""
    for number, process in enumerate(world.processes):
        if process is None or not process.election:
            continue
        if not all(block.is_consistent for block in process.blocks):
            return f"process {number} has values that are not those of its applied batches"
        if process.generation == world.index:
            if process.election != world.election:
                return "values of an earlier election are served"
            if world.settled == world.index and world.done & ~_in_all(process):
                return "a settled process lacks a batch that is done"
        if number != STANDBY and process.generation == world.index and world.standby:
            return "an index is held by a process that was not entitled to it" if process.generation != 2 else None
    return None


def is_end(world: World) -> bool:
    """True if all batches are done and settled."""
    return world.done == (1 << world.left.batches) - 1 and world.settled == world.index != 0


def steps(world: World) -> Iterator[tuple[str, World]]:
    """Yield every possible next event."""
    for number, process in enumerate(world.processes):
        if process is not None:
            yield from _pushes(world, number, process)
            yield from _claims(world, number, process)
    yield from _reports(world)
    yield from _copies(world)
    yield from _faults(world)


def _in_all(process: Process) -> int:
    found = (1 << BATCHES) - 1
    for block in process.blocks:
        found &= block.applied
    return found


def _with(world: World, number: int, process: Process | None) -> World:
    processes = list(world.processes)
    processes[number] = process
    return replace(world, processes=tuple(processes))


def _pushes(world: World, number: int, process: Process) -> Iterator[tuple[str, World]]:
    for batch in range(world.left.batches) if process.election else ():
        for place, block in enumerate(process.blocks):
            if (after := block.push(batch)) != block:
                blocks = tuple(after if each == place else old for each, old in enumerate(process.blocks))
                pushed = replace(process, blocks=blocks, dirty=process.dirty | {place})
                yield f"push {number} {batch} {place}", _with(world, number, pushed)
        pair = batch, process.generation
        if _in_all(process) >> batch & 1 and pair not in world.acknowledged:
            yield f"acknowledge {number} {batch}", replace(world, acknowledged=world.acknowledged | {pair})


def _reports(world: World) -> Iterator[tuple[str, World]]:
    for batch, generation in sorted(world.acknowledged):
        if not world.done >> batch & 1 and world.known.accepts([generation], 1):
            yield f"report {batch} {generation}", replace(world, done=world.done | (1 << batch))
    holder = _holder(world)
    if holder is not None and holder.election and world.settled != world.index:
        known = world.known.seen(0, world.index, 1)
        done = world.done & _in_all(holder)
        yield "announce", replace(world, known=known, settled=world.index, done=done)


def _holder(world: World) -> Process | None:
    found = (each for each in world.processes if each is not None and each.generation == world.index)
    return next(found, None) if world.index else None


def _claims(world: World, number: int, process: Process) -> Iterator[tuple[str, World]]:
    if process.generation:
        return
    if process.claim is None:
        own = (0, world.standby) if number == STANDBY and world.standby else None
        for claim in claims(1, [0] if world.index else [], {0: world.standby} if world.standby else {}, own):
            yield f"decide {number}", _with(world, number, replace(process, claim=claim))
    elif world.index or world.standby != process.claim.standby:
        yield f"fail {number}", _with(world, number, replace(process, claim=None))
    else:
        revision = world.revision + 1
        stream = None if number == STANDBY else world.stream
        standby = 0 if number == STANDBY else world.standby
        claimed = replace(world, revision=revision, index=revision, standby=standby, stream=stream)
        started = Process(revision, world.election)
        if number == STANDBY and world.has is not None and StandbyCopy(world.has).is_usable(world.election, None):
            started = Process(revision, world.has.election, process.blocks)
        # A process without a copy loads the checkpoint, which contains nothing.
        yield f"claim {number}", _with(claimed, number, started)


def _copies(world: World) -> Iterator[tuple[str, World]]:
    standby, stream = world.processes[STANDBY], world.stream
    if standby is None or standby.generation or not world.standby:
        return
    if stream is None:
        for number, process in enumerate(world.processes):
            if process is not None and process.election and world.left.copies:
                yield f"ask {number}", _asked(world, number, process)
        return
    number = next((n for n, p in enumerate(world.processes) if p and p.generation == stream.copy.source), None)
    source = None if number is None else world.processes[number]
    if number is not None and source is not None and stream.due:
        yield "copy", _copied(world, stream, number, source)
    if stream.flying:
        yield "part", _part(world, standby, stream)
    elif not stream.due:
        yield "complete", _completed(world, standby, stream)
    if world.left.breaks or source is None:
        breaks = world.left.breaks - (source is not None)
        yield "break", replace(world, stream=None, left=replace(world.left, breaks=breaks))


def _asked(world: World, number: int, process: Process) -> World:
    source = CopySource(process.generation, process.newest)
    copy = source.begin(world.standby, world.has, process.election, knows_changes=True)
    due = tuple(sorted(process.dirty)) if copy.after else tuple(range(BLOCKS))
    left = replace(world.left, copies=world.left.copies - 1)
    world = _with(replace(world, left=left), number, replace(process, newest=source.newest))
    standby = StandbyCopy(world.has)
    applied = tuple(block.applied for block in process.blocks)
    return replace(world, has=standby.has, stream=Stream(copy, due, applied)) if standby.begin(copy) else world


def _copied(world: World, stream: Stream, number: int, source: Process) -> World:
    place, *due = stream.due
    block = source.blocks[place]
    applied = tuple(block.applied if each == place else old for each, old in enumerate(stream.applied))
    stream = replace(stream, due=tuple(due), applied=applied, flying=(*stream.flying, (place, block.counts)))
    return _with(replace(world, stream=stream), number, replace(source, dirty=source.dirty - {place}))


def _part(world: World, standby: Process, stream: Stream) -> World:
    part, *flying = stream.flying
    if StandbyCopy(world.has, stream.copy).is_kept_back:
        return replace(world, stream=replace(stream, flying=tuple(flying), kept=(*stream.kept, part)))
    world = replace(world, stream=replace(stream, flying=tuple(flying)))
    return _with(world, STANDBY, replace(standby, blocks=_filled(standby.blocks, [part])))


def _filled(blocks: tuple[Content, ...], parts: list[tuple[int, Counts]]) -> tuple[Content, ...]:
    values = dict(parts)
    return tuple(replace(block, counts=values.get(place, block.counts)) for place, block in enumerate(blocks))


def _completed(world: World, standby: Process, stream: Stream) -> World:
    copy = StandbyCopy(world.has, stream.copy)
    copy.end((), ())
    blocks = _filled(standby.blocks, list(stream.kept))
    blocks = tuple(replace(block, applied=applied) for block, applied in zip(blocks, stream.applied, strict=True))
    return _with(replace(world, has=copy.has, stream=None), STANDBY, replace(standby, blocks=blocks))


def _faults(world: World) -> Iterator[tuple[str, World]]:
    holder = next((n for n, p in enumerate(world.processes) if p and p.generation == world.index != 0), None)
    if holder is None:
        if not world.index and world.left.elections:
            left = replace(world.left, elections=world.left.elections - 1)
            begun = replace(world, election=world.election + 1, done=0, left=left, acknowledged=frozenset())
            yield (
                "initialize",
                replace(begun, known=world.known.seen(0, world.revision + 1, 1), revision=begun.revision + 1),
            )
        return
    if world.left.crashes:
        left = replace(world.left, crashes=world.left.crashes - 1)
        yield f"crash {holder}", _with(replace(world, index=0, left=left), holder, None)
    if world.left.freezes:
        left = replace(world.left, freezes=world.left.freezes - 1)
        yield f"freeze {holder}", replace(world, index=0, left=left)
    if world.standby and world.left.crashes:
        left = replace(world.left, crashes=world.left.crashes - 1)
        yield "crash standby", _with(replace(world, standby=0, stream=None, left=left), STANDBY, None)
