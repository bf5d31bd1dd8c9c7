"""Messages between the ranks of a group and the master: how a group starts, where its ranks are, how they leave.

A *group* is a set of ranks that train one model together without pservers, as ``torchrun`` starts them. Each start of a
group is an *incarnation*, numbered by the generation of its rank 0.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Name, Natural, Reply, SenderOfJob, Text

#: Most ranks of a group.
SIZE_LIMIT = 65_536
#: A range of records of a task: epoch, task, first record and end record (exclusive).
Piece = tuple[Natural, Natural, Natural, Natural]
Pieces = Annotated[list[Piece], msgspec.Meta(max_length=4096)]
#: An encoded token; empty: none.
TokenText = Annotated[str, msgspec.Meta(max_length=8192)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=SIZE_LIMIT)]
Size = Annotated[int, msgspec.Meta(ge=1, le=SIZE_LIMIT)]


class GroupStartRequest(SenderOfJob, frozen=True, kw_only=True):
    """A rank joins the start of its group and declares the token that it has loaded."""

    #: Name that all ranks of this start share, and no ranks of another start. Empty if the ranks share no name: then
    #: rank 0 begins an incarnation, and the others join it.
    start: Text = ""
    rank: Rank
    size: Size
    token: TokenText = ""
    #: The token's position, for people.
    position: Text = ""
    #: All other settings that determine the records of a rank; equal on every rank.
    plan: Text = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class GroupStartReply(Reply, frozen=True, kw_only=True):
    """The incarnation that has started, and the token from which all of its ranks continue."""

    #: 0 if it has not started yet: ask again.
    incarnation: int = 0
    #: Reason for waiting if the incarnation has not started.
    waiting_for: str = ""
    #: True if the master knows of no current start of that name: look the name up again before asking again.
    is_stale: bool = False
    token: str = ""
    #: Records that no rank gets, because they have killed their ranks too often.
    left_out: list[Piece] = []
    #: Up to this position, and for a moment beyond it, the rank reports each round to the master before handing it out;
    #: 0 disables these reports.
    watched_until: int = 0


class GroupPlaceRequest(SenderOfJob, frozen=True, kw_only=True):
    """The round that a rank works on."""

    incarnation: Natural
    rank: Rank
    #: Records of the dataset, over all epochs, that were handed out before this round.
    at: Natural
    #: The rank's records of this round.
    pieces: Pieces = []


class GroupPlaceReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``GroupPlaceRequest``."""

    #: False if the incarnation is over. The rank must then stop.
    is_current: bool = True
    #: Seconds to wait before the next report.
    every_s: Annotated[float, msgspec.Meta(ge=0.1, le=600)] = 0.5


class GroupLeaveRequest(SenderOfJob, frozen=True, kw_only=True):
    """A rank leaves its session."""

    incarnation: Natural
    rank: Rank
    #: True if no exception ended the session.
    is_clean: bool
    #: True if the rank has seen the end of the data.
    has_finished: bool = False
    #: The exception of the rank's own script at its own batch; empty if there was none, or if another rank or a signal
    #: caused it.
    error: Text = ""


class GroupRank(Reply, frozen=True, kw_only=True):
    """A process that takes part in an incarnation."""

    trainer: Name
    generation: Natural
    token: str = ""
    position: str = ""
    plan: str = ""
    has_left: bool = False
    has_finished: bool = False
    #: True if it cannot have been the first rank to end.
    is_cleared: bool = False


class Suspect(Reply, frozen=True, kw_only=True):
    """Records at which ranks ended first, one incarnation after the other."""

    at: int
    pieces: list[Piece]
    #: Number of incarnations.
    deaths: int = 1
    error: str = ""


class GroupRecord(Reply, frozen=True, kw_only=True):
    """Value of ``group`` in etcd: the current incarnation, and records suspected or known to kill their ranks."""

    #: Generation of its rank 0; 0: no group has started.
    incarnation: int = 0
    start: str = ""
    size: int = 0
    #: "gathering", "running", "over" or "done".
    phase: str = "over"
    ranks: dict[int, GroupRank] = {}
    token: str = ""
    #: Explanation for all ranks if they cannot start together.
    refused: str = ""
    #: True if the records of the rank that ended first are among the suspects or the convicted.
    is_judged: bool = False
    suspects: list[Suspect] = []
    convicted: list[Suspect] = []
    #: Starts of this job's group so far.
    starts: int = 0
