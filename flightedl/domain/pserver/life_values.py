"""States, events and effects of a pserver's lifecycle."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.messages.control import OrderNumber
from flightedl.messages.declarations import DeclaredModel


class State(enum.Enum):
    """States of a pserver, in the order in which they usually occur."""

    NO_INDEX = "it has no index"
    NO_MODEL = "the job has no model"
    BUILDING = "its blocks are being allocated"
    RESTORING = "it is loading a checkpoint"
    #: The model has first values, but this pserver's blocks have lost theirs, and no checkpoint contains them.
    LACKING = "its values are lost"
    WAITING = "it is waiting for first values"
    SERVING = "it has values"
    #: Like SERVING, but only until a checkpoint contains everything that has been pushed.
    DRAINING = "it is about to end"
    ENDED = "the process is ending"


@dataclass(frozen=True, slots=True)
class Facts:
    """State of the job in etcd, as last read by this process."""

    #: The declared model, possibly from an earlier run of the job; None if none was found.
    model: DeclaredModel | None = None
    #: Election (its create_revision) that gave the model its first values; None if it has none yet.
    election: int | None = None
    #: Checkpoints that this pserver may load; None if there are none.
    loadable: range | None = None
    #: Checkpoints among ``loadable`` that at least one pserver failed to load.
    rejected: frozenset[int] = frozenset()
    #: Generation of the active master; 0 if there is none.
    master: int = 0


# --- events ---


@dataclass(frozen=True, slots=True)
class IndexAcquired:
    """This process has acquired an index."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The process has read the job's state in etcd."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class PlanMade:
    """Answer to ``Build``: this process has computed the model's shard plan."""

    plan_hash: str


@dataclass(frozen=True, slots=True)
class Placed:
    """This pserver has the blocks that a newer placement assigns to it."""

    plan_hash: str


@dataclass(frozen=True, slots=True)
class CompilingBegan:
    """The cache lacks kernels that the blocks need. They are being compiled, which may take minutes."""


@dataclass(frozen=True, slots=True)
class BlocksMade:
    """Answer to ``MakeBlocks``: the blocks are allocated. Usually, they have no values yet."""

    #: Number of blocks, without buckets.
    block_count: int
    #: True if this pserver has no blocks or buckets until some are moved to it.
    is_empty: bool = False
    #: Election of the blocks' values, if they were copied from the predecessor; otherwise None.
    copied: int | None = None


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """The blocks could not be allocated or filled."""

    why: str
    #: True if another process may succeed.
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """Answer to ``Restore``: all blocks have the values of a checkpoint."""

    number: int
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class NothingLoadable:
    """Answer to ``Restore``: none of the given checkpoints can be loaded."""

    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreUnreachable:
    """Answer to ``Restore``: the store is unreadable at the moment."""

    why: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Answer to ``CatchUp``: the current state in etcd, or None if etcd could not be reached."""

    facts: Facts | None


@dataclass(frozen=True, slots=True)
class PauseOver:
    """Answer to ``Pause``."""


@dataclass(frozen=True, slots=True)
class FirstValuesBegin:
    """An elected trainer is about to send first values."""

    election: int


@dataclass(frozen=True, slots=True)
class FirstValuesReceived:
    """First values of an election have arrived, so that ``block_count`` blocks now have them."""

    election: int
    block_count: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process was asked to end. It has a short time left to write a last checkpoint."""

    #: The newest checkpoint order that the process has received.
    order: OrderNumber | None


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """The master wants all pservers to load the same checkpoint, or to start without values."""


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The lease has expired, so another process may hold the index now."""


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """The blocks' values and their protocol state no longer agree."""

    why: str


Event = (
    IndexAcquired
    | Seen
    | PlanMade
    | Placed
    | CompilingBegan
    | BlocksMade
    | BuildFailed
    | Restored
    | NothingLoadable
    | StoreUnreachable
    | CaughtUp
    | PauseOver
    | FirstValuesBegin
    | FirstValuesReceived
    | DrainAsked
    | ReloadAsked
    | LeaseOver
    | BlocksLost
)


# --- effects ---


@dataclass(frozen=True, slots=True)
class Build:
    """Compute the model's shard plan, then report ``PlanMade``."""

    model: DeclaredModel


@dataclass(frozen=True, slots=True)
class MakeBlocks:
    """Allocate the blocks of the plan, then report ``BlocksMade``."""

    model: DeclaredModel


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the newest readable one of these checkpoints, then report the result."""

    loadable: range
    rejected: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for a short time, because etcd or the store is unreachable, then report ``PauseOver``."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Read etcd itself instead of a cached copy, then report ``CaughtUp``."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Tell the master that this pserver's values of the election are lost."""

    election: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Accept pushes and pulls: the blocks have this election's first values, or values derived from them by updates."""

    election: int
    #: The checkpoint that was loaded; None if the blocks have first values.
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Exit. The process needs no successor, because the job cannot continue."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Exit, so that a successor starts without this process's values."""

    why: str


Effect = Build | MakeBlocks | Restore | Pause | CatchUp | Lack | Serve | Fail | StartAgain
Effects = tuple[Effect, ...]
