"""Model of a small cluster in which blocks move: etcd, masters, pserver processes, trainers' pushes and reports.

Each possible step is an event. A message may arrive at any time, repeatedly, or never. A transaction may be executed at
any time. Processes crash and lose their leases, within limits. ``domain.moving`` makes the decisions, as in production.
A block's content is its applied batches, as bits.
"""

from collections.abc import Iterator
from itertools import product

import msgspec
from msgspec.structs import replace

from flightedl.domain.moving.director import Director
from flightedl.domain.moving.server import MovingBlocks, Serves, State
from flightedl.domain.moving.values import (
    Acknowledged,
    Adopt,
    Append,
    Copy,
    Discard,
    Effect,
    End,
    Last,
    Move,
    Release,
    Stage,
    StoredIntent,
    Thaw,
    Transaction,
    Update,
)
from flightedl.domain.recovery.replacements import Replacements
from flightedl.errors import NotReadyError
from flightedl.messages.declarations import Placement, runs_of_equal

#: Process that acknowledged a batch: its index, its generation, and the placement known to the trainer.
Ack = tuple[int, int, int]
#: Generation in a report that names no process of a pserver.
_NOTHING = 1 << 62


class Content(msgspec.Struct, frozen=True, array_like=True):
    """Content of a block: its applied batches as bits."""

    block: int
    applied: int

    @property
    def digest(self) -> bytes:
        return bytes([self.applied])


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A pserver process. It claims its index, reads the placement, and loads its blocks, in this order."""

    index: int
    generation: int
    moves: State | None = None
    contents: tuple[Content, ...] = ()
    staged: tuple[Content, ...] = ()

    def content(self, block: int) -> Content | None:
        return next((each for each in self.contents if each.block == block), None)


class Master(msgspec.Struct, frozen=True, array_like=True):
    """A master that holds the lock, or believes that it does."""

    generation: int
    #: Placement and intent in its last read.
    placement: Placement
    stored: StoredIntent | None
    #: Index -> generation that it has seen; 0 if none.
    seen: tuple[int, ...]
    #: Transaction whose outcome it waits for.
    pending: Transaction | None = None
    #: Index -> (blocks, batches applied in all of them) from an answer; empty if no audit is open.
    audit: tuple[tuple[tuple[int, ...], int] | None, ...] = ()


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of events that could repeat forever."""

    crashes: int = 1
    #: Leases that expire although their process runs.
    freezes: int = 0
    masters: int = 0
    attempts: int = 1
    give_ups: int = 1
    checkpoints: int = 0
    #: Replies of etcd that the master does not receive, so that it repeats the transaction.
    lost_replies: int = 0


class World(msgspec.Struct, frozen=True, array_like=True):
    """State of the cluster: first the contents of etcd, then everything else."""

    #: Last revision of etcd, the source of generations and attempts.
    revision: int
    #: Index -> generation of the key; 0 without a key.
    keys: tuple[int, ...]
    lock: int
    placement: Placement
    stored: StoredIntent | None
    #: Index -> generation of the last settled process.
    settled: tuple[int, ...]
    replaced: Replacements
    done: int
    has_order: bool
    #: Block -> its batches in the newest checkpoint.
    checkpoint: tuple[int, ...]
    has_ended: bool
    # outside of etcd
    processes: tuple[Process, ...]
    master: Master
    left: Limits
    #: Files of the ordered checkpoint: (index, block, batches).
    files: frozenset[tuple[int, int, int]] = frozenset()
    saved: frozenset[int] = frozenset()
    #: Transactions sent by processes that no longer wait for the outcome.
    in_flight: frozenset[Transaction] = frozenset()
    messages: frozenset[tuple[Copy | Update | Last | Acknowledged, Content | int]] = frozenset()
    #: Block -> batch -> its acknowledgements.
    acknowledged: tuple[tuple[frozenset[Ack], ...], ...] = ()


def first_world(blocks: int, batches: int, pservers: int, owners: tuple[int, ...], left: Limits) -> World:
    """Return a world in which every process is settled, and nothing has been pushed."""
    keys = tuple(range(2, 2 + pservers))
    placed = Placement(version=1, pservers=pservers, blocks=runs_of_equal(owners))
    replaced = Replacements()
    processes = []
    for index, generation in enumerate(keys):
        replaced = replaced.seen(index, generation, placed.version)
        own = placed.blocks_of(index)
        contents = tuple(Content(block, 0) for block in own)
        processes.append(Process(index, generation, State(tuple(own), version=placed.version), contents))
    return World(
        revision=1 + pservers,
        keys=keys,
        lock=1,
        placement=placed,
        stored=None,
        settled=keys,
        replaced=replaced,
        done=0,
        has_order=False,
        checkpoint=(0,) * blocks,
        has_ended=False,
        processes=tuple(processes),
        master=Master(1, placed, None, keys),
        left=left,
        acknowledged=((frozenset[Ack](),) * batches,) * blocks,
    )


# the state of one process


def _with_process(world: World, process: Process) -> World:
    others = [each for each in world.processes if each.generation != process.generation]
    return replace(world, processes=tuple(sorted([*others, process], key=_generation)))


def _without(world: World, process: Process) -> World:
    others = tuple(each for each in world.processes if each.generation != process.generation)
    return replace(world, processes=others)


def _generation(process: Process) -> int:
    return process.generation


def _put(contents: tuple[Content, ...], block: int, content: Content | None) -> tuple[Content, ...]:
    others = [each for each in contents if each.block != block]
    return tuple(sorted([*others, *([content] if content else ())], key=_block))


def _block(content: Content) -> int:
    return content.block


def _core(process: Process) -> MovingBlocks:
    assert process.moves is not None
    return MovingBlocks(process.index, process.generation, process.moves)


def _send(world: World, message: Copy | Update | Last | Acknowledged, content: Content | int) -> World:
    return replace(world, messages=world.messages | {(message, content)})


def _carry_out(world: World, process: Process, effects: list[Effect]) -> World:
    """Carry out the effects of a read."""
    for effect in effects:
        if isinstance(effect, Adopt):
            staged = next(each for each in process.staged if each.block == effect.block)
            process = replace(
                process,
                contents=_put(process.contents, effect.block, staged),
                staged=_put(process.staged, effect.block, None),
            )
        elif isinstance(effect, Release):
            for block in range(effect.block, effect.block + effect.count):
                process = replace(process, contents=_put(process.contents, block, None))
        elif isinstance(effect, Discard):
            process = replace(process, staged=_put(process.staged, effect.block, None))
        elif isinstance(effect, Copy):
            content = process.content(effect.block)
            assert content is not None
            world = _send(world, effect, content)
        elif isinstance(effect, End):
            is_present = world.keys[process.index] == process.generation
            assert not is_present, f"pserver {process.index} owns a block that it does not have"
            return _without(world, process)
        else:
            assert isinstance(effect, Thaw)
    return _with_process(world, process)


# events


def steps(world: World) -> Iterator[tuple[str, World]]:
    """Yield every possible event, and the world after it."""
    if world.has_ended:
        return
    for process in world.processes:
        yield from _steps_of_process(world, process)
    yield from _steps_of_etcd(world)
    yield from _steps_of_master(world)
    yield from _deaths(world)


def _steps_of_process(world: World, process: Process) -> Iterator[tuple[str, World]]:
    who = f"{process.index}:{process.generation}"
    if process.moves is None:
        yield f"load {who}", _load(world, process)
        return
    yield from _pushes(world, process, who)
    core = _core(process)
    effects = core.read(world.revision, world.placement, world.stored, world.keys[process.index] or None)
    if effects or core.state != process.moves:
        yield f"read {who}", _carry_out(world, replace(process, moves=core.state), effects)
    for leaving in process.moves.leaving:
        yield from _leaving(world, process, leaving.block, who)
    for message, content in world.messages:
        if not isinstance(message, Acknowledged) and message.generation == process.generation:
            yield from _receive(world, process, message, content, who)
    is_present = world.keys[process.index] == process.generation
    if (
        world.has_order
        and process.index not in world.saved
        and is_present
        and answers_for(process, world.placement.version)
    ):
        # One file for each block that the process has now.
        files = {(process.index, each.block, each.applied) for each in process.contents}
        yield (
            f"save {who}",
            replace(world, files=world.files | files, saved=world.saved | {process.index}),
        )


def answers_for(process: Process, version: int) -> bool:
    """True if the process has the blocks that this version of the placement assigns to it.

    A request to all pservers, such as an audit or a checkpoint, names a version of the placement. A process that knows
    only an older version reads the placement before it answers, so that answers for different versions are never
    combined.
    """
    return process.moves.version == version


def _answers(world: World, process: Process) -> bool:
    is_present = world.keys[process.index] == process.generation
    return is_present and answers_for(process, world.placement.version)


def _load(world: World, process: Process) -> World:
    """Read the placement, and load the blocks of a process from the newest checkpoint."""
    holder = world.keys[process.index] or None
    if holder != process.generation:
        return _without(world, process)
    moves = State(tuple(world.placement.blocks_of(process.index)), world.revision, world.placement.version)
    contents = tuple(Content(block, world.checkpoint[block]) for block in moves.blocks)
    return _with_process(world, replace(process, moves=moves, contents=contents))


def _pushes(world: World, process: Process, who: str) -> Iterator[tuple[str, World]]:
    for content in process.contents:
        for batch in range(len(world.acknowledged[content.block])):
            core = _core(process)
            if core.serves(content.block) is not Serves.HERE:
                continue
            bit = 1 << batch
            after = world
            if not content.applied & bit:
                update = core.updated(content.block)
                changed = replace(content, applied=content.applied | bit)
                contents = _put(process.contents, content.block, changed)
                after = _with_process(after, replace(process, moves=core.state, contents=contents))
                if update is not None:
                    after = _send(after, update, bit)
            known = [list(each) for each in world.acknowledged]
            ack = (process.index, process.generation, world.placement.version)
            # A report with an earlier acknowledgement by this pserver would not count either if this one does not.
            others = {each for each in known[content.block][batch] if each[0] != process.index}
            known[content.block][batch] = frozenset(others | {ack})
            after = replace(after, acknowledged=tuple(map(tuple, known)))
            if after != world:
                yield f"push {who} block {content.block} batch {batch}", after


def _leaving(world: World, process: Process, block: int, who: str) -> Iterator[tuple[str, World]]:
    content = process.content(block)
    assert content is not None
    core = _core(process)
    last = core.freeze(block, content.digest)
    assert last is not None
    after = _send(_with_process(world, replace(process, moves=core.state)), last, content)
    if after != world:
        yield f"freeze {who} block {block}", after
    core = _core(process)
    transaction = core.give_up(block)
    if world.left.give_ups and transaction is not None and transaction not in world.in_flight:
        after = _with_process(world, replace(process, moves=core.state))
        left = replace(world.left, give_ups=world.left.give_ups - 1)
        yield f"give-up {who} block {block}", replace(after, in_flight=after.in_flight | {transaction}, left=left)


def _receive(
    world: World, process: Process, message: Copy | Update | Last, content: Content | int, who: str
) -> Iterator[tuple[str, World]]:
    core = _core(process)
    staged = next((each for each in process.staged if each.block == message.block), None)
    answer = core.received(message, b"" if staged is None else staged.digest)
    process = replace(process, moves=core.state)
    if isinstance(answer, Stage):
        assert isinstance(content, Content)
        after = _with_process(world, replace(process, staged=_put(process.staged, message.block, content)))
    elif isinstance(answer, Append):
        assert staged is not None
        assert isinstance(content, int)
        assert not staged.applied & content, "an update was applied twice"
        changed = replace(staged, applied=staged.applied | content)
        after = _with_process(world, replace(process, staged=_put(process.staged, message.block, changed)))
    elif isinstance(answer, Acknowledged):
        after = _send(_with_process(world, process), answer, 0)
    else:
        return
    if after != world:
        yield f"receive {who} {type(message).__name__} attempt {message.attempt} block {message.block}", after


def _holds(world: World, transaction: Transaction) -> bool:
    """True if all comparisons of a transaction hold."""
    attempt = 0 if world.stored is None else world.stored.attempt
    return (
        transaction.attempt == attempt
        and transaction.master in (None, world.lock)
        and all(world.keys[index] == generation for index, generation in transaction.generations)
        and transaction.version in (None, world.placement.version)
        and not (transaction.excludes_checkpoint and world.has_order)
    )


def _carried_out(world: World, transaction: Transaction) -> World:
    if not _holds(world, transaction):
        return world
    if transaction.intent is None:
        stored = None
    elif world.stored is None:
        world = replace(world, revision=world.revision + 1)
        stored = StoredIntent(world.revision, transaction.intent)
    else:
        stored = StoredIntent(world.stored.attempt, transaction.intent)
    return replace(world, stored=stored, placement=transaction.placement or world.placement)


def _steps_of_etcd(world: World) -> Iterator[tuple[str, World]]:
    for transaction in world.in_flight:
        after = replace(_carried_out(world, transaction), in_flight=world.in_flight - {transaction})
        yield f"transaction {transaction.attempt} of {transaction.master}", after
    pending = world.master.pending
    if pending is not None and world.master.generation == world.lock:
        after = _carried_out(world, pending)
        if world.left.lost_replies and after != world:
            left = replace(world.left, lost_replies=world.left.lost_replies - 1)
            yield f"lost reply {pending.attempt}", replace(after, left=left)
        # The master learns the outcome, and reads.
        after = _carried_out(world, pending)
        master = replace(world.master, pending=None, placement=after.placement, stored=after.stored)
        replaced = after.replaced.confirmed(after.placement.version)
        yield f"outcome {pending.attempt}", replace(after, master=master, replaced=replaced)


def _director(master: Master) -> Director:
    return Director(master.generation, master.placement, master.stored, master.pending)


def _seen(master: Master) -> dict[int, int]:
    return {index: generation for index, generation in enumerate(master.seen) if generation}


def _steps_of_master(world: World) -> Iterator[tuple[str, World]]:
    master = world.master
    for index, generation in enumerate(world.keys):
        if master.seen[index] != generation:
            seen = (*master.seen[:index], generation, *master.seen[index + 1 :])
            # A new process invalidates the open audit.
            after = _with_master(world, replace(master, seen=seen, audit=()))
            replaced = world.replaced.seen(index, generation, _director(master).placement_for(index))
            yield f"see {index}:{generation}", replace(after, replaced=replaced)
    if master.pending is not None:
        return
    if master.stored != world.stored or master.placement != world.placement:
        # A pserver that gave up has deleted the intent.
        yield "notice", _with_master(world, replace(master, stored=world.stored, placement=world.placement))
    yield from _settle(world)
    yield from _report(world)
    yield from _move(world)
    yield from _order(world)
    yield from _audit(world)


def _with_master(world: World, master: Master) -> World:
    return replace(world, master=master)


def _settle(world: World) -> Iterator[tuple[str, World]]:
    master = world.master
    for process in world.processes:
        index, generation = process.index, process.generation
        if process.moves is None or master.seen[index] != generation or world.settled[index] == generation:
            continue
        if generation < world.settled[index]:
            continue
        done = world.done
        for content in process.contents:
            done &= content.applied
        settled = (*world.settled[:index], generation, *world.settled[index + 1 :])
        yield f"settle {index}:{generation}", replace(world, settled=settled, done=done)


def _report(world: World) -> Iterator[tuple[str, World]]:
    batches = len(world.acknowledged[0])
    for batch in range(batches):
        if world.done & 1 << batch:
            continue
        acks = [each[batch] for each in world.acknowledged]
        if any(_is_accepted(world, report) for report in product(*acks)):
            yield f"report batch {batch}", replace(world, done=world.done | 1 << batch)


def _is_accepted(world: World, report: tuple[Ack, ...]) -> bool:
    pservers = [
        min((generation for each, generation, _ in report if each == index), default=_NOTHING)
        for index in range(len(world.keys))
    ]
    return world.replaced.accepts(pservers, min(placement for _, _, placement in report))


def _is_settled(world: World) -> bool:
    return world.master.seen == world.settled


def _move(world: World) -> Iterator[tuple[str, World]]:
    master, director = world.master, _director(world.master)
    cancel = director.cancel_if_failed(_seen(master))
    if cancel is not None:
        yield "cancel", _with_master(world, replace(master, pending=cancel))
    for message, _ in world.messages:
        if isinstance(message, Acknowledged):
            commit = director.commit([message])
            if commit is not None:
                yield f"commit block {message.block}", _with_master(world, replace(master, pending=commit))
    if not world.left.attempts:
        return
    for moves in _possible(master.placement, len(world.keys)):
        try:
            intent = director.begin(
                moves,
                _seen(master),
                dict(enumerate(world.settled)),
                is_audit_open=bool(master.audit),
                is_checkpoint_open=world.has_order,
            )
        except NotReadyError:
            continue
        left = replace(world.left, attempts=world.left.attempts - 1)
        text = ", ".join(f"{move.block} from {move.source} to {move.destination}" for move in moves)
        yield f"intend {text}", replace(_with_master(world, replace(master, pending=intent)), left=left)


def _possible(placement: Placement, pservers: int) -> Iterator[tuple[Move, ...]]:
    """Yield the moves of single blocks, and the moves of all blocks to a spare pserver."""
    for block, source in enumerate(placement.owners):
        for destination in range(pservers):
            if destination != source:
                yield (Move(block, source, destination),)
    if len(placement.owners) > 1:
        spare = next((index for index in range(pservers) if index not in placement.owners), None)
        if spare is not None:
            yield tuple(Move(block, source, spare) for block, source in enumerate(placement.owners))


def _order(world: World) -> Iterator[tuple[str, World]]:
    director = _director(world.master)
    if world.has_order:
        if len(world.saved) == len(world.keys):
            saved = [{applied for _, each, applied in world.files if each == block} for block in _blocks(world)]
            assert all(saved), "a block is in no file of a checkpoint"
            checkpoint = tuple(min(each) for each in saved)
            yield "publish", _without_order(replace(world, checkpoint=checkpoint))
        else:
            yield "abandon", _without_order(world)
        return
    if world.left.checkpoints and not director.is_moving and world.stored is None and _is_settled(world):
        left = replace(world.left, checkpoints=world.left.checkpoints - 1)
        yield "order", replace(world, has_order=True, left=left)


def _blocks(world: World) -> range:
    return range(len(world.placement.owners))


def _without_order(world: World) -> World:
    return replace(world, has_order=False, files=frozenset(), saved=frozenset())


def _audit(world: World) -> Iterator[tuple[str, World]]:
    master, everything = world.master, (1 << len(world.acknowledged[0])) - 1
    if world.done != everything or not _is_settled(world):
        return
    if not master.audit:
        if not _director(master).is_moving:
            yield "audit", _with_master(world, replace(master, audit=(None,) * len(world.keys)))
        return
    yield from _audit_answers(world)
    if None not in master.audit:
        answers = [each for each in master.audit if each is not None]
        assert sorted(block for blocks, _ in answers for block in blocks) == list(_blocks(world)), (
            "an audit has no answer for a block"
        )
        having = everything
        for _, each in answers:
            having &= each
        assert having == everything or master.seen != world.keys, "an audit finds that something is missing"
        if having == everything:
            yield "end", replace(world, has_ended=True)
        else:
            yield "reopen", replace(_with_master(world, replace(master, audit=())), done=having)


def _audit_answers(world: World) -> Iterator[tuple[str, World]]:
    master, everything = world.master, (1 << len(world.acknowledged[0])) - 1
    for process in world.processes:
        index = process.index
        if process.moves is None or master.seen[index] != process.generation or master.audit[index] is not None:
            continue
        if not answers_for(process, master.placement.version):
            continue
        having = everything
        for content in process.contents:
            having &= content.applied
        answer = (tuple(each.block for each in process.contents), having)
        answers = (*master.audit[:index], answer, *master.audit[index + 1 :])
        yield f"answer {index}", _with_master(world, replace(master, audit=answers))


def _deaths(world: World) -> Iterator[tuple[str, World]]:
    left = world.left
    alive = {process.generation for process in world.processes}
    for process in world.processes:
        if left.crashes:
            others = tuple(each for each in world.processes if each is not process)
            after = replace(world, processes=others, left=replace(left, crashes=left.crashes - 1))
            yield f"crash {process.index}:{process.generation}", after
    for index, generation in enumerate(world.keys):
        if not generation:
            taken = replace(world, revision=world.revision + 1)
            keys = (*world.keys[:index], taken.revision, *world.keys[index + 1 :])
            yield f"start {index}:{taken.revision}", _with_process(replace(taken, keys=keys), _started(index, taken))
            continue
        if generation in alive and not left.freezes:
            continue
        used = replace(left, freezes=left.freezes - 1) if generation in alive else left
        keys = (*world.keys[:index], 0, *world.keys[index + 1 :])
        yield f"expire {index}:{generation}", replace(world, keys=keys, left=used)
    if left.masters:
        master = world.master
        in_flight = world.in_flight | ({master.pending} if master.pending is not None else set())
        revision = world.revision + 1
        successor = Master(revision, world.placement, world.stored, world.keys)
        after = replace(world, revision=revision, lock=revision, master=successor, in_flight=in_flight)
        # The lock prevents that a commit of the predecessor is executed later.
        after = replace(after, replaced=after.replaced.confirmed(world.placement.version))
        for index, generation in enumerate(world.keys):
            placement = _director(successor).placement_for(index)
            after = replace(after, replaced=after.replaced.seen(index, generation, placement))
        yield f"take-over {revision}", replace(after, left=replace(left, masters=left.masters - 1))


def _started(index: int, world: World) -> Process:
    return Process(index, world.revision)


# invariants


def wrong(world: World) -> str | None:
    """Return violations: work that counts as done, but is missing in a block whose owner is settled."""
    for block, index in enumerate(world.placement.owners):
        generation = world.keys[index]
        if not generation or world.settled[index] != generation:
            continue
        process = next((each for each in world.processes if each.generation == generation), None)
        if process is None or process.moves is None:
            continue
        contents = process.contents if block in process.moves.blocks else process.staged
        content = next((each for each in contents if each.block == block), None)
        if content is None:
            return f"pserver {index} owns block {block} and does not have it"
        if world.done & ~content.applied:
            return f"batches {world.done:b} are done, and block {block} has {content.applied:b}"
    return None
