"""Bugs in the moves of blocks between pservers. Runs with one of these bugs always have moves."""

from __future__ import annotations

from tests.support.planting import Planted, bug, swaps

_SERVER = "domain.moving.server:MovingBlocks."
_DIRECTOR = "domain.moving.director:Director."
_BLOCKS = "domain.pserver.blocks:BlockProtocol."
_CORE = "domain.master.core:MasterCore."
_REPLACED = "domain.recovery.replacements:Replacements."

MOVE_BUGS: dict[str, Planted] = {
    "a unit thaws before its attempt is over": bug(
        "a pserver accepts pushes again although the master may still commit the move",
        swaps(f"{_SERVER}_end_attempts", "if leaving.attempt != attempt:", "if leaving.is_frozen:"),
    ),
    "an earlier attempt's copy is adopted": bug(
        "a pserver adopts a copy that lacks updates which the source has applied since",
        swaps(f"{_SERVER}_adopt_or_release", "arriving.attempt == placement.attempt_of(arriving.block)", "True"),
        swaps(f"{_SERVER}_end_attempts", "if arriving.attempt != attempt and", "if False and"),
        swaps(f"{_SERVER}received", "arriving.attempt >= message.attempt", "arriving.is_complete"),
    ),
    "blocks move before losses are known": bug(
        "blocks move away from a pserver that has not reported which batches it lacks",
        swaps(
            f"{_DIRECTOR}_require_quiet", "index not in seen or settled.get(index) != seen[index]", "index not in seen"
        ),
    ),
    "blocks move during a checkpoint": bug(
        "the files of a checkpoint belong to different placements",
        swaps(f"{_DIRECTOR}_require_quiet", "if is_audit_open or is_checkpoint_open:", "if is_audit_open:"),
        swaps(f"{_DIRECTOR}_transaction", "excludes_checkpoint=attempt == NONE", "excludes_checkpoint=False"),
        swaps(f"{_CORE}_tick_checkpoints", "and not self.moves.is_moving", ""),
    ),
    "moved blocks forget their batches": bug(
        "the applied sets of blocks do not move along with the blocks",
        swaps(
            f"{_BLOCKS}state_of",
            "self._applied.encoded(numbers)",
            "AppliedBatches(numbers).encoded(numbers)",
        ),
    ),
    "moved blocks forget their clocks": bug(
        "the members' clocks do not move along with the blocks",
        swaps(f"{_BLOCKS}adopt", "released.members, released.clocks)", "released.members, {})"),
    ),
    "blocks leave within a round": bug(
        "blocks leave although their open round has gradients",
        swaps(f"{_BLOCKS}is_at_edge", "all(span.rounds.is_at_edge for span in spans)", "True"),
        swaps(f"{_BLOCKS}release", "if not span.rounds.is_at_edge:", "if False:"),
    ),
    "a restart without blocks rolls back": bug(
        "all pservers return to a checkpoint when a pserver without blocks restarts",
        swaps(
            "domain.recovery.replay:PserverRecovery.announced",
            "self._is_rollback and summary.has_blocks",
            "self._is_rollback",
        ),
    ),
    "a deposed master follows its successor": bug(
        "a deposed master adopts its successor's placement during a checkpoint",
        swaps(f"{_CORE}_moves_read", "if not event.is_outcome and placement != director.placement:", "if False:"),
    ),
    "a surplus process keeps its index": bug(
        "a process that waits for blocks does not end when the job needs fewer pservers",
        swaps(
            "domain.moving.server:is_surplus",
            "(is_serving or (desired is not None and index >= desired))",
            "is_serving",
        ),
    ),
}
