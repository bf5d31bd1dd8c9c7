"""Exhaustive exploration of moving blocks: all orders of events in small clusters, and planted bugs."""

from collections.abc import Iterable

import pytest

from tests.domain.moving.world import Limits, World, first_world, steps, wrong
from tests.exploration import Explored, ViolationError, explore
from tests.support.planting import Edit, answers, bug, planted, rewrites, swaps

_SERVER = "domain.moving.server:MovingBlocks."
_DIRECTOR = "domain.moving.director:Director."
_REPLACED = "domain.recovery.replacements:Replacements."

#: Name -> (blocks, batches, pservers, owners, limits). The first ones run with every test.
SMALL = {
    "a pserver crashes": (1, 1, 2, (0,), Limits(crashes=1)),
    "the block moves twice": (1, 1, 2, (0,), Limits(crashes=0, attempts=2)),
    "a master is replaced": (1, 1, 2, (0,), Limits(crashes=0, masters=1)),
    "a lease ends early": (1, 1, 2, (0,), Limits(crashes=0, freezes=1, give_ups=0)),
    "a checkpoint is ordered": (1, 1, 2, (0,), Limits(crashes=0, checkpoints=1)),
    "a reply of etcd is lost": (1, 1, 2, (0,), Limits(crashes=1, give_ups=0, lost_replies=1)),
    "two batches": (1, 2, 2, (0,), Limits(crashes=0)),
    "two blocks": (2, 1, 2, (0, 1), Limits(crashes=0)),
}
LARGE = {
    "two crashes": (1, 1, 2, (0,), Limits(crashes=2, give_ups=0)),
    "a crash, and the block moves twice": (1, 1, 2, (0,), Limits(crashes=1, attempts=2)),
    "a crash, and a master is replaced": (1, 1, 2, (0,), Limits(crashes=1, masters=1)),
    "a crash, and a lease ends early": (1, 1, 2, (0,), Limits(crashes=1, freezes=1)),
    "a crash, and a checkpoint": (1, 1, 2, (0,), Limits(crashes=1, checkpoints=1)),
    "two masters are replaced": (1, 1, 2, (0,), Limits(crashes=0, masters=2, attempts=2)),
    "a crash with a spare": (1, 1, 3, (0,), Limits(crashes=1, attempts=1)),
    "a crash with two batches": (1, 2, 2, (0,), Limits(crashes=1)),
    "two blocks move to a spare": (2, 1, 3, (0, 1), Limits(crashes=0)),
    "a crash with two blocks": (2, 1, 2, (0, 1), Limits(crashes=1, give_ups=0)),
}

#: Name -> (limits, events that come first), with one block and two pservers.
PREPARED: dict[str, tuple[Limits, tuple[str, ...]]] = {
    "a crash and another master after a commit was sent": (
        Limits(crashes=1, masters=1, give_ups=0),
        ("push", "intend 0 from 0", "outcome", "read 0", "freeze 0", "receive 1:3 Copy", "receive 1:3 Last", "commit"),
    ),
    "two leases end while a pserver starts": (
        Limits(crashes=1, freezes=1, give_ups=0),
        ("crash 1", "expire 1", "start 1", "expire 1", "start 1", "load 1:5", "see 1", "settle 1"),
    ),
}

#: Name of the bug -> configuration that shows it, and edits that plant it.
BUGS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "a pserver that has not settled gives blocks away": (
        "a pserver crashes",
        (swaps(f"{_DIRECTOR}_require_quiet", " or settled.get(index) != seen[index]", ""),),
    ),
    "a report of a block that moved to a process that was lost counts": (
        "a pserver crashes",
        (swaps(f"{_REPLACED}accepts", "each.replaced_at <= placement", "True"),),
    ),
    "a report by a lost process counts because its block has moved on": (
        "a crash, and the block moves twice",
        (swaps(f"{_REPLACED}accepts", "pservers[each.index] >= each.generation", "True"),),
    ),
    "a process is replaced while a commit has an unknown outcome": (
        "a reply of etcd is lost",
        (swaps(f"{_DIRECTOR}placement_for", "newest.version", "self.placement.version"),),
    ),
    "an audit puts answers of two versions together": (
        "two batches",
        (answers("tests.domain.moving.world:answers_for", "True"),),
    ),
    "an audit begins while a block moves": (
        "two batches",
        (answers(f"{_DIRECTOR}is_moving", "False"),),
    ),
    "a block moves during a checkpoint": (
        "a checkpoint is ordered",
        (
            swaps(f"{_DIRECTOR}_require_quiet", "is_audit_open or is_checkpoint_open:", "is_audit_open:"),
            swaps(f"{_DIRECTOR}_transaction", "attempt == NONE", "False"),
        ),
    ),
    "a commit does not compare the lock": (
        "a crash and another master after a commit was sent",
        (swaps(f"{_DIRECTOR}_transaction", "master=self._master", "master=None"),),
    ),
    "an acknowledgement of an earlier attempt counts": (
        "the block moves twice",
        (swaps(f"{_DIRECTOR}commit", " if message.attempt == stored.attempt", ""),),
    ),
    "content that an earlier attempt staged is adopted": (
        "the block moves twice",
        (
            swaps(f"{_DIRECTOR}commit", " if message.attempt == stored.attempt", ""),
            swaps(f"{_SERVER}_adopt_or_release", " and arriving.attempt == placement.attempt_of(arriving.block)", ""),
        ),
    ),
    "a commit does not compare generations": (
        "a pserver crashes",
        (swaps(f"{_DIRECTOR}_transaction", "generations=generations", "generations=()"),),
    ),
    "a block is thawed after a time": (
        "two batches",
        (rewrites(f"{_SERVER}give_up", "return None", "self._leave(block, None)\nreturn None"),),
    ),
    "a repeated update is applied": (
        "two batches",
        (swaps(f"{_SERVER}received", "message.number != arriving.received + 1", "False"),),
    ),
    "updates that are missing are not noticed": (
        "two batches",
        (swaps(f"{_SERVER}received", "message.count != arriving.received or message.digest != digest", "False"),),
    ),
    "a frozen block is updated": (
        "two batches",
        (swaps(f"{_SERVER}serves", "leaving.is_frozen and block in leaving.blocks", "False"),),
    ),
}


def explored(name: str) -> Explored:
    if name in PREPARED:
        limits, events = PREPARED[name]
        first = after(first_world(1, 1, 2, (0,), limits), events)
    else:
        blocks, batches, pservers, owners, limits = (SMALL | LARGE)[name]
        first = first_world(blocks, batches, pservers, owners, limits)
    return explore(first, steps, wrong, lambda world: world.has_ended)


def after(world: World, events: Iterable[str]) -> World:
    """Return the world after these events, given by the beginnings of their names."""
    for begin in events:
        world = next(then for event, then in steps(world) if event.startswith(begin))
    return world


@pytest.mark.parametrize("name", SMALL | PREPARED)
def test_every_order_of_events_keeps_done_batches(name: str) -> None:
    found = explored(name)
    assert found.events.keys() >= {"push", "report", "outcome", "end"}
    assert len(found.parents) > 300


@pytest.mark.storm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_events_with_faults_keeps_done_batches(name: str) -> None:
    assert explored(name).events["end"]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    where, edits = BUGS[name]
    with planted([bug(name, *edits)]), pytest.raises(ViolationError):
        explored(where)
