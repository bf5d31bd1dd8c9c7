"""The states of a pserver's life, what happens to it (events), and what follows (effects)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.messages.control import OrderNumber
from flightedl.messages.declarations import DeclaredModel


class State(enum.Enum):
    """What a pserver is doing, in the order of a life."""

    NO_INDEX = "it has no index"
    NO_MODEL = "the job has no model"
    BUILDING = "its blocks are made"
    RESTORING = "a checkpoint is loaded"
    #: The model has first values, and no checkpoint has those of these blocks.
    LACKING = "its values are lost"
    WAITING = "first values are to come"
    SERVING = "it has values"
    #: As SERVING, until a checkpoint has all that was pushed.
    DRAINING = "it is about to end"
    ENDED = "the process ends"


@dataclass(frozen=True, slots=True)
class Facts:
    """What etcd says of the job, as far as it is known here."""

    #: As declared; also of a former run.
    model: DeclaredModel | None = None
    #: The election (its create_revision) that gave the model its first values; None: it has none.
    election: int | None = None
    #: The checkpoints that may be loaded; None: there are none.
    loadable: range | None = None
    #: Those of them that some pserver could not load.
    rejected: frozenset[int] = frozenset()
    #: Generation of the active master; 0: there is none.
    master: int = 0


# --- events ---


@dataclass(frozen=True, slots=True)
class IndexTaken:
    """This process holds an index from now on."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The directory was looked at."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class PlanMade:
    """Answers ``Build``: the shard plan that this process computes from the model."""

    plan_hash: str


@dataclass(frozen=True, slots=True)
class CompilingBegan:
    """Kernels that the blocks need are not in the cache, so they are being compiled, which may take minutes."""


@dataclass(frozen=True, slots=True)
class BlocksMade:
    """Answers ``MakeBlocks``: they are there, without values."""

    block_count: int


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """Something that nobody has foreseen keeps the blocks from being made or filled."""

    why: str


@dataclass(frozen=True, slots=True)
class Restored:
    """Answers ``Restore``: all blocks have the values of a checkpoint."""

    number: int
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class NothingLoadable:
    """Answers ``Restore``: none of those that may be loaded can be."""

    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreUnreachable:
    """Answers ``Restore``: the store cannot be read at the moment."""

    why: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Answers ``CatchUp``: what etcd said after that was asked for. None: it could not be reached."""

    facts: Facts | None


@dataclass(frozen=True, slots=True)
class PauseOver:
    """Answers ``Pause``."""


@dataclass(frozen=True, slots=True)
class FirstValuesBegin:
    """A trainer that was elected is about to send first values."""

    election: int


@dataclass(frozen=True, slots=True)
class FirstValuesCame:
    """So many blocks have the first values of an election now."""

    election: int
    block_count: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process is told to end, and may take a moment for a last checkpoint."""

    #: The newest order that it has heard of.
    order: OrderNumber | None


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """The master wants all pservers back at one checkpoint, or without values."""


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """Another process may have the index by now."""


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """The blocks do not belong together any more."""

    why: str


Event = (
    IndexTaken
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
    | FirstValuesCame
    | DrainAsked
    | ReloadAsked
    | LeaseOver
    | BlocksLost
)


# --- effects ---


@dataclass(frozen=True, slots=True)
class Build:
    """Compute the shard plan of the model; then tell ``PlanMade``."""

    model: DeclaredModel


@dataclass(frozen=True, slots=True)
class MakeBlocks:
    """Make the blocks of the plan; then tell ``BlocksMade``."""

    model: DeclaredModel


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the newest of these checkpoints that can be loaded; then tell how it went."""

    loadable: range
    rejected: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait a little, because something could not be reached; then tell ``PauseOver``."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Ask etcd itself, not a copy of it; then tell ``CaughtUp``."""


@dataclass(frozen=True, slots=True)
class Lack:
    """The values of this election are lost here: the master should hear of it."""

    election: int


@dataclass(frozen=True, slots=True)
class Serve:
    """The blocks have values that grow from those of this election: pushes and pulls may come."""

    election: int
    #: None: the first values.
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot go on: end, and nobody needs to start again."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgain:
    """End, so that a successor begins without what this process has."""

    why: str


Effect = Build | MakeBlocks | Restore | Pause | CatchUp | Lack | Serve | Fail | StartAgain
Effects = tuple[Effect, ...]
