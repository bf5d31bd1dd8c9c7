"""Messages between the ranks of a group and the master, for starting the group, reporting progress, and leaving.

A *group* is a set of ranks that train one model together without pservers, for example ranks that ``torchrun`` started.
Each start of a group is an *incarnation*, whose number is the generation of its rank 0.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Name, Natural, Reply, SenderOfJob, Text

#: Most ranks of a group.
SIZE_LIMIT = 65_536
#: A range of the records of a lane in an epoch's order: epoch, number of lanes and their windows, lane, number of the
#: first record, and exclusive end. Ranges of epochs with other lanes or windows contain other records.
Piece = tuple[Natural, Natural, Natural, Natural, Natural, Natural]
Pieces = Annotated[list[Piece], msgspec.Meta(max_length=4096)]
#: An encoded token; empty: none.
TokenText = Annotated[str, msgspec.Meta(max_length=8192)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=SIZE_LIMIT)]
Size = Annotated[int, msgspec.Meta(ge=1, le=SIZE_LIMIT)]


class GroupStartRequest(SenderOfJob, frozen=True, kw_only=True):
    """A rank joins the start of its group, and reports the token that it has loaded."""

    #: Name that all ranks of this start share, and that no other start uses. If the name is empty, rank 0 begins an
    #: incarnation, and the other ranks join it.
    start: Text = ""
    rank: Rank
    size: Size
    token: TokenText = ""
    #: The token's position, for people.
    position: Text = ""
    #: All other settings that determine a rank's records. They must be the same on every rank.
    plan: Text = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class GroupStartReply(Reply, frozen=True, kw_only=True):
    """The incarnation that has started, and the token with which all of its ranks continue."""

    #: Number of the incarnation; 0 if it has not started yet, in which case the rank repeats the request.
    incarnation: int = 0
    #: Reason why the incarnation has not started; empty if it has.
    waiting_for: str = ""
    #: True if the master knows no current start with the rank's name. The rank must look up the name again.
    is_stale: bool = False
    token: str = ""
    #: Records that no rank receives, because they have killed ranks too often.
    left_out: list[Piece] = []
    #: Up to this position, and for a short time after passing it, the rank reports each round to the master before it
    #: starts the round. 0 disables these reports.
    watched_until: int = 0
    #: True if the job was stopped; see ``GroupPlaceReply``.
    is_stopping: bool = False


class GroupPlaceRequest(SenderOfJob, frozen=True, kw_only=True):
    """The round that a rank is working on."""

    incarnation: Natural
    rank: Rank
    #: Number of records, over all epochs, that preceded this round.
    at: Natural
    #: Number of records, over all epochs, up to the end of this round.
    end: Natural = 0
    #: Records that the rank processes in this round.
    pieces: Pieces = []
    #: True if the rank knows that the job was stopped. It has started no later round, and waits for the reply before it
    #: starts this one.
    is_stopping: bool = False


class GroupPlaceReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``GroupPlaceRequest``."""

    #: False if the incarnation is over, and the rank must stop.
    is_current: bool = True
    #: Seconds to wait before the next report.
    every_s: Annotated[float, msgspec.Meta(ge=0.1, le=600)] = 0.5
    #: True if the job was stopped: from now on, the rank must report each round before it starts the round.
    is_stopping: bool = False
    #: Position of the last round that the ranks of a stopped group may start; None if it is not fixed yet.
    stop_after: int | None = None


class GroupLeaveRequest(SenderOfJob, frozen=True, kw_only=True):
    """A rank leaves its session."""

    incarnation: Natural
    rank: Rank
    #: True if the session ended without an exception.
    is_clean: bool
    #: True if the rank has reached the end of the data.
    has_finished: bool = False
    #: The exception that the rank's script raised at its current batch; empty if there was none, or if another rank or
    #: a signal caused it.
    error: Text = ""


class GroupRank(Reply, frozen=True, kw_only=True):
    """A process that is a rank of an incarnation."""

    trainer: Name
    generation: Natural
    token: str = ""
    position: str = ""
    plan: str = ""
    has_left: bool = False
    has_finished: bool = False
    #: True if this rank cannot have been the first one to end.
    is_cleared: bool = False


class Suspect(Reply, frozen=True, kw_only=True):
    """Records on which the first rank to end in an incarnation was working, and how many incarnations ended there."""

    #: Number of records, over all epochs, up to the end of the round.
    end: int
    pieces: list[Piece]
    #: Number of incarnations.
    deaths: int = 1
    error: str = ""


class GroupRecord(Reply, frozen=True, kw_only=True):
    """Value of the key ``group``: the current incarnation, and records that are suspected or known to kill ranks."""

    #: Generation of the incarnation's rank 0; 0 if no group has started.
    incarnation: int = 0
    start: str = ""
    size: int = 0
    #: "gathering", "running", "over" or "done".
    phase: str = "over"
    ranks: dict[int, GroupRank] = {}
    token: str = ""
    #: Message for all ranks if they cannot start together; otherwise empty.
    refused: str = ""
    #: True if the records of the rank that ended first are already suspected or known to kill ranks.
    is_judged: bool = False
    suspects: list[Suspect] = []
    convicted: list[Suspect] = []
    #: Number of starts of this job's group so far.
    starts: int = 0
    #: Position of the last round of a stopped group; None if it is not fixed.
    stop_after: int | None = None
