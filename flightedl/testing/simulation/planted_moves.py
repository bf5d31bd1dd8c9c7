"""Bugs in the moves of blocks between pservers; see ``planted``. Runs with one of these bugs always have moves."""

from __future__ import annotations

from flightedl.testing.simulation.planted import Planted, answers, bug, swaps

_SERVER = "domain.moving.server:MovingBlocks."
_DIRECTOR = "domain.moving.director:Director."
_BLOCKS = "domain.pserver.blocks:BlockProtocol."
_CORE = "domain.master.core:MasterCore."
_REPLACED = "domain.recovery.replacements:Replacements."

MOVE_BUGS: dict[str, Planted] = {
    "frozen blocks are updated": bug(
        "a pserver applies pushes to blocks whose content it has already sent to another pserver",
        answers("testing.simulation.shard:Shard._is_frozen", "False"),
    ),
    "an earlier attempt's copy is adopted": bug(
        "a pserver adopts a copy that lacks updates which the source has applied since",
        swaps(f"{_SERVER}_adopt_or_release", "arriving.attempt == placement.attempt_of(arriving.block)", "True"),
        swaps(f"{_SERVER}_end_attempts", "if arriving.attempt != attempt and", "if False and"),
        swaps(f"{_SERVER}received", "arriving.attempt >= message.attempt", "arriving.is_complete"),
    ),
    "moved blocks forget their batches": bug(
        "the applied sets of blocks do not move along with the blocks",
        swaps(
            f"{_BLOCKS}state_of",
            "self._applied.encoded(numbers)",
            "AppliedBatches(numbers).encoded(numbers)",
        ),
    ),
}
