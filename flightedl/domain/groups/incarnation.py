"""State machine of a group's incarnations: the current start, and the records that kill its ranks.

Each start of a group is an incarnation, numbered by the generation of its rank 0. Generations are create_revisions of
etcd, so a later start has a higher number. The rules are:

* Only rank 0 begins an incarnation, and only with a generation above the current one. This ends the previous
  incarnation: its ranks can no longer start, report or finish.
* An incarnation runs once every rank has reported the token that it loaded, if any. If all loaded tokens are equal, all
  ranks use that token. If the tokens differ, the incarnation ends, and every rank gets an explanation.
* The group is done when every rank of the current incarnation has reached the end of the data and left its session
  cleanly. In a stopped job, ranks may also leave before the end of the data.
* Once a rank knows that the job was stopped, it reports each round before it starts the round. When all ranks do so, or
  have left, the highest reported round becomes the last one: no rank has started a later round, and all ranks end their
  loops after this round.

To find records that kill ranks, the master determines which rank ended first: one whose script raised an exception, or
one that ended without a report. The records of its round become suspects. If a later incarnation with other ranks or
batches ends at some of them, the others are no longer suspected. A suspect is cleared once all ranks of a later
incarnation have passed it, and convicted once ``attempts_limit`` incarnations have ended at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from flightedl.domain.groups import plan
from flightedl.domain.groups.lanes import EpochOrder, GroupData
from flightedl.errors import FencedError, UsageError
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceReply,
    GroupPlaceRequest,
    GroupRank,
    GroupRecord,
    GroupStartReply,
    GroupStartRequest,
    Piece,
    Suspect,
)

GATHERING, RUNNING, OVER, DONE = "gathering", "running", "over", "done"
OVER_TEXT = "another rank of this group has ended, or the group was started again: start this process again"
SILENT = "it ended without a word"
#: Maximum number of reports per second from all ranks together. The limit leaves the master time for other work.
_REPORTS_PER_S = 200
_REPORT_S = 0.5
#: Maximum number of ranks that a message names.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The round on which a rank was working when it last reported."""

    at: int
    end: int
    pieces: tuple[Piece, ...]
    heard_at: float
    #: True if the rank reports each round before it starts the round, because the job was stopped.
    is_stopping: bool = False


class Group:
    """State machine of one job's group. Not thread-safe.

    Args:
        attempts_limit: Number of incarnations after which records that ended them are omitted for all ranks.
        record: State stored by a predecessor.
    """

    def __init__(self, attempts_limit: int, record: GroupRecord | None = None) -> None:
        self._attempts_limit = attempts_limit
        #: Complete state for a successor. Changes replace this object and never modify it.
        self.record = GroupRecord() if record is None else record
        #: True if a trainer has stopped the job.
        self.is_stopped = False
        #: Rank -> its round. Not stored, because the ranks report to a successor again.
        self.places: dict[int, Place] = {}

    @property
    def is_done(self) -> bool:
        """True if every rank of the current incarnation has reached the end of the data and left cleanly."""
        return self.record.phase == DONE

    @property
    def has_started(self) -> bool:
        return self.record.incarnation > 0

    # starting

    def enter(self, request: GroupStartRequest) -> GroupStartReply:
        """Let a rank join the start of its group. A repeated request changes nothing.

        Raises:
            UsageError: The ranks of this start contradict each other.
            FencedError: This start is over.
        """
        if request.rank >= request.size:
            raise UsageError(f"rank {request.rank} is not below the group's size, {request.size}")
        record = self.record
        known = record.ranks.get(request.rank)
        if known is None or not _is_from(request, known) or record.start != request.start:
            if request.rank == 0:
                if request.generation <= record.incarnation:
                    raise FencedError("a later start of the group has replaced this one: end this process")
                self._begin(request)
            elif not self._may_join(request, known):
                return GroupStartReply(waiting_for="rank 0 of this start of the group", is_stale=True)
            else:
                self._require_alike(request)
                self.record = replace(record, ranks={**record.ranks, request.rank: _declared(request)})
            self._start_if_complete()
        elif known.token != request.token:
            raise UsageError("this rank has declared another token before: load it before the first batch")
        return self._answer()

    def waits(self, request: GroupStartRequest) -> bool:
        """True if a rank has joined a start that is still waiting for other ranks."""
        record = self.record
        known = record.ranks.get(request.rank)
        is_of_start = record.phase == GATHERING and record.start == request.start and known is not None
        return is_of_start and known is not None and _is_from(request, known) and known.token == request.token

    def _may_join(self, request: GroupStartRequest, known: GroupRank | None) -> bool:
        record = self.record
        is_newer = known is None or known.generation < request.generation
        return record.phase == GATHERING and record.start == request.start and is_newer

    def _require_alike(self, request: GroupStartRequest) -> None:
        if request.size != self.record.size:
            raise UsageError(
                f"rank {request.rank} was started in a group of {request.size} ranks, but rank 0 in one of "
                f"{self.record.size}: start all ranks with the same number"
            )
        first = self.record.ranks[0].plan
        if request.plan != first:
            raise UsageError(
                f"rank {request.rank} has declared the data with {request.plan}, but rank 0 with {first}: "
                "declare the same data on all ranks"
            )

    def _begin(self, request: GroupStartRequest) -> None:
        self._judge(self._silent_longest(), SILENT)
        self.places = {}
        self.record = replace(
            self.record,
            incarnation=request.generation,
            start=request.start,
            size=request.size,
            phase=GATHERING,
            ranks={0: _declared(request)},
            token="",
            refused="",
            is_judged=False,
            starts=self.record.starts + 1,
            stop_after=None,
        )

    def _start_if_complete(self) -> None:
        record = self.record
        if record.phase != GATHERING or len(record.ranks) < record.size:
            return
        declared = {each.token: rank for rank, each in sorted(record.ranks.items(), reverse=True) if each.token}
        if len(declared) > 1:
            first, second = sorted(declared.values())[:2]
            ranks = record.ranks
            self.record = replace(
                record,
                phase=OVER,
                refused=(
                    f"rank {first} has loaded the data's position {ranks[first].position or 'A'} and rank {second} "
                    f"{ranks[second].position or 'B'}: load the same checkpoint in all ranks, or in rank 0 alone"
                ),
            )
        else:
            self.record = replace(record, phase=RUNNING, token=next(iter(declared), ""))

    def _answer(self) -> GroupStartReply:
        record = self.record
        if record.refused:
            raise UsageError(record.refused)
        if record.phase == GATHERING:
            missing = [rank for rank in range(record.size) if rank not in record.ranks]
            named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
            return GroupStartReply(waiting_for=f"rank {named} of {record.size} to ask for its first batch")
        if record.phase != RUNNING:
            raise FencedError(OVER_TEXT)
        return GroupStartReply(
            incarnation=record.incarnation,
            token=record.token,
            # Ranks report whole rounds, so a later conviction may name records that are excluded already.
            left_out=_disjoint(piece for each in record.convicted for piece in each.pieces),
            # The previous incarnation may have ended before its ranks reported their rounds.
            watched_until=max((each.end for each in record.suspects), default=1) if record.starts > 1 else 0,
            is_stopping=self.is_stopped,
        )

    # running

    def at(self, request: GroupPlaceRequest, now: float) -> GroupPlaceReply:
        if not self._is_current(request) or self.record.phase != RUNNING:
            return GroupPlaceReply(is_current=False)
        known = self.places.get(request.rank)
        if known is None or known.at <= request.at:
            # The rank's two threads report concurrently, so reports may arrive out of order.
            self.places[request.rank] = Place(request.at, request.end, tuple(request.pieces), now, request.is_stopping)
        if self.record.suspects:
            passed = min((each.at for each in self.places.values()), default=0)
            if len(self.places) == self.record.size and any(each.end <= passed for each in self.record.suspects):
                left = [each for each in self.record.suspects if each.end > passed]
                self.record = replace(self.record, suspects=left)
        self._fix_end()
        return GroupPlaceReply(
            every_s=max(_REPORT_S, self.record.size / _REPORTS_PER_S),
            is_stopping=self.is_stopped,
            stop_after=self.record.stop_after,
        )

    def _fix_end(self) -> None:
        """Choose the last round of a stopped job, once no rank can start a later one unnoticed."""
        if self.is_stopped and self.record.stop_after is None:
            known = {rank for rank, place in self.places.items() if place.is_stopping}
            if all(each.has_left or rank in known for rank, each in self.record.ranks.items()):
                self.record = replace(self.record, stop_after=max(each.at for each in self.places.values()))

    # ending

    def leave(self, request: GroupLeaveRequest) -> None:
        """Record that a rank has left its session. Ignores ranks of other incarnations.

        Raises:
            FencedError: The rank would leave cleanly, but its incarnation is over.
        """
        rank = self.record.ranks[request.rank] if self._is_current(request) else None
        if rank is not None and (rank.has_left or rank.is_cleared):
            return
        if request.is_clean and (rank is None or self.record.phase == OVER):
            raise FencedError(OVER_TEXT)
        if rank is None:
            return
        if not request.is_clean:
            self._update(request.rank, is_cleared=True)
            if request.error:
                self._judge(request.rank, request.error)
            self.record = replace(self.record, phase=OVER)
            return
        self._update(request.rank, has_left=True, has_finished=request.has_finished)
        ranks = self.record.ranks.values()
        if self.record.phase == RUNNING and all(each.has_left for each in ranks):
            is_done = self.is_stopped or all(each.has_finished for each in ranks)
            self.record = replace(self.record, phase=DONE if is_done else OVER)

    def gone(self, trainer: str, generation: int) -> None:
        ranks = self.record.ranks
        rank = next((r for r, each in ranks.items() if (each.trainer, each.generation) == (trainer, generation)), None)
        if rank is None or ranks[rank].has_left:
            return
        if self.record.phase == GATHERING and rank:
            self.record = replace(self.record, ranks={other: each for other, each in ranks.items() if other != rank})
            return
        if not ranks[rank].is_cleared:
            self._judge(rank, SILENT)
        self.record = replace(self.record, phase=OVER)

    def _judge(self, first: int | None, error: str) -> None:
        """Make the records of the rank that ended first suspects, once per incarnation."""
        place = None if first is None else self.places.get(first)
        if self.record.is_judged or place is None or not place.pieces:
            return
        suspects, found = self.record.suspects, Suspect(end=place.end, pieces=_disjoint(place.pieces), deaths=0)
        others = []
        for each in suspects:
            if common := _common(each.pieces, found.pieces):
                found = Suspect(end=min(each.end, found.end), pieces=common, deaths=found.deaths + each.deaths)
            else:
                others.append(each)
        found = replace(found, deaths=found.deaths + 1, error=error)
        is_convicted = found.deaths >= self._attempts_limit
        self.record = replace(
            self.record,
            is_judged=True,
            suspects=others if is_convicted else [*others, found],
            convicted=[*self.record.convicted, found] if is_convicted else self.record.convicted,
        )

    def inheritance(self) -> GroupRecord:
        """Return the record for a start that has another master, and judge the ranks as if that start had begun."""
        ended = Group(self._attempts_limit, self.record)
        ended.places = self.places
        ended._judge(ended._silent_longest(), SILENT)
        last = ended.record
        return GroupRecord(suspects=last.suspects, convicted=last.convicted, starts=last.starts)

    def _silent_longest(self) -> int | None:
        """Return the rank that ended without a report and whose last report is the oldest, or None."""
        silent = [rank for rank, each in self.record.ranks.items() if not each.has_left and not each.is_cleared]
        heard = [(self.places[rank].heard_at, rank) for rank in silent if rank in self.places]
        return min(heard)[1] if heard else None

    def _update(self, rank: int, **changes: bool) -> None:
        ranks = self.record.ranks
        self.record = replace(self.record, ranks={**ranks, rank: replace(ranks[rank], **changes)})

    def _is_current(self, request: GroupPlaceRequest | GroupLeaveRequest) -> bool:
        known = self.record.ranks.get(request.rank)
        return request.incarnation == self.record.incarnation and known is not None and _is_from(request, known)

    def check(self) -> None:
        record = self.record
        assert record.phase in {GATHERING, RUNNING, OVER, DONE}
        assert record.phase == OVER or record.ranks[0].generation == record.incarnation
        assert all(0 <= rank < record.size for rank in record.ranks)
        if record.phase in {RUNNING, DONE}:
            assert len(record.ranks) == record.size
            assert {each.token for each in record.ranks.values() if each.token} <= {record.token}
        if record.phase == DONE:
            assert all(each.has_left and (each.has_finished or self.is_stopped) for each in record.ranks.values())
        assert all(each.deaths < self._attempts_limit for each in record.suspects)


def excluded(left_out: Collection[Piece], data: GroupData, epoch: int, order: plan.Order) -> list[Piece]:
    """Return the records to be skipped as pieces of the order that an epoch has in this start.

    If the global batch of an earlier start was another one, its epochs had another order.
    """
    found, records = [], dict[int, set[int]]()
    for each in left_out:
        its_epoch, lanes, window, *piece = each
        if (its_epoch, lanes, window) == (epoch, order.lanes, order.window):
            found.append(each)
        elif its_epoch == epoch:
            for chunk, numbers in EpochOrder(data, epoch, plan.Order(lanes, window)).chunk_records(plan.Piece(*piece)):
                records.setdefault(chunk, set()).update(numbers.tolist())
    total, searched = data.record_count(order.lanes), EpochOrder(data, epoch, order)
    for lane in range(order.lanes if records else 0):
        whole = plan.Piece(lane, 0, -((lane - total) // order.lanes))
        parts = searched.pieces_of(records, whole)
        found += [(epoch, order.lanes, order.window, lane, part.first_record, part.end_record) for part in parts]
    return _disjoint(found)


def without(step: plan.Round, left_out: Collection[Piece]) -> plan.Round:
    """Return a copy of a round without the records to be skipped."""
    pieces = step.pieces
    for epoch, lanes, window, lane, first, end in left_out:
        if (epoch, lanes, window) == (step.epoch, step.order.lanes, step.order.window):
            pieces = tuple(part for piece in pieces for part in _parts(piece, lane, first, end))
    return replace(step, pieces=pieces)


def _parts(piece: plan.Piece, lane: int, first: int, end: int) -> Iterator[plan.Piece]:
    if piece.lane != lane:
        yield piece
        return
    before = piece.first_record, min(first, piece.end_record)
    after = max(end, piece.first_record), piece.end_record
    yield from (plan.Piece(lane, start, stop) for start, stop in (before, after) if start < stop)


def _common(some: Collection[Piece], others: Collection[Piece]) -> list[Piece]:
    """Return the records that are in both of two lists of ranges."""
    found = []
    for *place, first, end in some:
        for *other, other_first, other_end in others:
            if place == other and (start := max(first, other_first)) < (stop := min(end, other_end)):
                found.append((*place, start, stop))
    return _disjoint(cast("list[Piece]", found))


def _disjoint(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the records of ranges that may overlap, as the rounds of a padded epoch do, as ranges that do not."""
    found: list[Piece] = []
    for *place, first, end in sorted(pieces):
        if found and list(found[-1][:-2]) == place and first <= found[-1][-1]:
            found[-1] = *found[-1][:-1], max(found[-1][-1], end)
        else:
            found.append(cast("Piece", (*place, first, end)))
    return found


def _is_from(request: GroupStartRequest | GroupPlaceRequest | GroupLeaveRequest, known: GroupRank) -> bool:
    return (known.trainer, known.generation) == (request.trainer, request.generation)


def _declared(request: GroupStartRequest) -> GroupRank:
    return GroupRank(
        trainer=request.trainer,
        generation=request.generation,
        token=request.token,
        position=request.position,
        plan=request.plan,
    )
