"""States, events and effects of a pserver's lifecycle."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.messages.control import OrderNumber
from flightedl.messages.declarations import DeclaredModel


class State(enum.Enum):
    """States of a pserver, in the usual order."""

    NO_INDEX = "it has no index"
    NO_MODEL = "the job has no model"
    BUILDING = "its blocks are being allocated"
    RESTORING = "it is loading a checkpoint"
    #: The model has first values, but those of this pserver's blocks are lost and in no checkpoint.
    LACKING = "its values are lost"
    WAITING = "it is waiting for first values"
    SERVING = "it has values"
    #: Like SERVING, until a checkpoint contains everything that was pushed.
    DRAINING = "it is about to end"
    ENDED = "the process is ending"


@dataclass(frozen=True, slots=True)
class Facts:
    """State of the job in etcd, as far as this process has read it."""

    #: The declared model, which may be from an earlier run; None if none was read.
    model: DeclaredModel | None = None
    #: The election (its create_revision) that gave the model its first values; None if it has no first values.
    election: int | None = None
    #: Checkpoints that may be loaded; None if there are none.
    loadable: range | None = None
    #: Loadable checkpoints that some pserver failed to load.
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
    """The job's state in etcd was read."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class PlanMade:
    """Answer to ``Build``: this process has computed the shard plan of the model."""

    plan_hash: str


@dataclass(frozen=True, slots=True)
class CompilingBegan:
    """Kernels that the blocks need are missing from the cache and are being compiled, which may take minutes."""


@dataclass(frozen=True, slots=True)
class BlocksMade:
    """Answer to ``MakeBlocks``: the blocks are allocated and have no values yet."""

    block_count: int


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """An unexpected error prevents the blocks from being allocated or filled."""

    why: str


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
    """Answer to ``Restore``: the store cannot be read at the moment."""

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
    """First values of an election were received; ``block_count`` blocks have them now."""

    election: int
    block_count: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process was asked to end and has a short time for a last checkpoint."""

    #: The newest checkpoint order that the process knows.
    order: OrderNumber | None


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """The master wants all pservers to return to one checkpoint, or to have no values."""


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The lease has expired, so another process may hold the index."""


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """Values and protocol state of the blocks are no longer consistent."""

    why: str


Event = (
    IndexAcquired
    | Seen
    | PlanMade
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
    """Compute the shard plan of the model, then report ``PlanMade``."""

    model: DeclaredModel


@dataclass(frozen=True, slots=True)
class MakeBlocks:
    """Allocate the blocks of the plan, then report ``BlocksMade``."""

    model: DeclaredModel


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the newest readable checkpoint of these, then report the result."""

    loadable: range
    rejected: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait a short time because etcd or the store is unreachable, then report ``PauseOver``."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Read etcd itself instead of a cached copy, then report ``CaughtUp``."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Report to the master that this pserver's values of the election are lost."""

    election: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Accept pushes and pulls: the blocks have values that descend from this election's first values."""

    election: int
    #: The checkpoint that was loaded; None if the values are the first values.
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """End the process without a successor, because the job cannot continue."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgain:
    """End the process, so that a successor starts without this process's values."""

    why: str


Effect = Build | MakeBlocks | Restore | Pause | CatchUp | Lack | Serve | Fail | StartAgain
Effects = tuple[Effect, ...]
