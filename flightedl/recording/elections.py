"""A trainer's part in the election of first values, and whose model it follows then: recorded, and from a recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.first_values import Candidate, Elected, ElectionOfFirstValues, FollowedElection, Step
from flightedl.errors import CorruptError, FlightedlError, JobFailedError, UnavailableError
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import CoreRecorder


class _Event(msgspec.Struct, frozen=True):
    """What happens to a trainer's part in the election."""


class ElectionBegun(_Event, frozen=True):
    """The first event."""

    trainer: str
    pserver_count: int


class NextStepAsked(_Event, frozen=True):
    """As ``ElectionOfFirstValues.next_step``."""

    newest: int


class Looked(_Event, frozen=True):
    """As ``ElectionOfFirstValues.looked``."""

    found: Candidate | None


class Stood(_Event, frozen=True):
    """As ``ElectionOfFirstValues.stood``."""


class Uploaded(_Event, frozen=True):
    """As ``ElectionOfFirstValues.uploaded``."""

    generation: int
    initialized: int
    blocks: int


class Confirmed(_Event, frozen=True):
    """As ``ElectionOfFirstValues.confirmed``."""

    revision: int | None


class StepFailed(_Event, frozen=True):
    """As ``ElectionOfFirstValues.failed``."""

    error: str
    is_transient: bool


class ElectionFollowed(_Event, frozen=True):
    """The model of this election is worked for from now on."""

    elected: Elected


class OtherElectionSeen(_Event, frozen=True):
    """As ``FollowedElection.require_same``, where it raises."""

    election: int | None
    revision: int


_EVENTS = by_name(_Event.__subclasses__())


class RecordedElection(ElectionOfFirstValues):
    """Records what happens to it; arguments as of ``ElectionOfFirstValues``."""

    def __init__(self, recorder: CoreRecorder, trainer: str, pserver_count: int) -> None:
        super().__init__(trainer, pserver_count)
        self._recorder = recorder
        #: A step that is over at once is a part of the one before.
        self._is_inside = False
        self._record(ElectionBegun(trainer, pserver_count))

    def _record(self, event: _Event, *effects: object) -> None:
        self._recorder.record(self._recorder.now(), event, effects)

    def next_step(self, newest: int = 0) -> Step:
        if self._is_inside:
            return super().next_step(newest)
        self._is_inside = True
        try:
            step = super().next_step(newest)
        finally:
            self._is_inside = False
        self._record(NextStepAsked(newest), step)
        return step

    def looked(self, found: Candidate | None) -> None:
        super().looked(found)
        self._record(Looked(found))

    def stood(self) -> None:
        super().stood()
        self._record(Stood())

    def uploaded(self, generation: int, initialized: int, blocks: int) -> None:
        super().uploaded(generation, initialized, blocks)
        self._record(Uploaded(generation, initialized, blocks))

    def confirmed(self, revision: int | None) -> None:
        super().confirmed(revision)
        self._record(Confirmed(revision))

    def failed(self, error: FlightedlError) -> None:
        event = StepFailed(self._recorder.hidden(str(error) or type(error).__name__), is_transient(error))
        try:
            super().failed(error)
        except FlightedlError:
            # Which one it was is said by the event.
            self._recorder.raised(self._recorder.now(), event, JobFailedError(""))
            raise
        self._record(event)


class RecordedFollowing(FollowedElection):
    """Records when the model is another one."""

    def __init__(self, recorder: CoreRecorder, elected: Elected) -> None:
        super().__init__(elected)
        self._recorder = recorder
        recorder.record(recorder.now(), ElectionFollowed(elected))

    def require_same(self, election: int | None, revision: int) -> None:
        try:
            super().require_same(election, revision)
        except FlightedlError as error:
            self._recorder.raised(self._recorder.now(), OtherElectionSeen(election, revision), error)
            raise


class ElectionPlayer:
    """A trainer's part to which recorded events happen, or an election that it follows."""

    def __init__(self) -> None:
        self._election: ElectionOfFirstValues | None = None
        self._followed: FollowedElection | None = None

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of an election of first values: {name}")
        happened: Any = decode(event, _EVENTS[name])
        match happened:
            case ElectionBegun(trainer, pserver_count):
                self._election = ElectionOfFirstValues(trainer, pserver_count)
            case ElectionFollowed(elected):
                self._followed = FollowedElection(elected)
            case OtherElectionSeen(election, revision) if self._followed is not None:
                self._followed.require_same(election, revision)
            case _ if self._election is not None:
                return self._happens(self._election, happened)
            case _:
                raise CorruptError("an election that has not begun")
        return ()

    @staticmethod
    def _happens(election: ElectionOfFirstValues, event: Any) -> Sequence[object]:
        match event:
            case NextStepAsked(newest):
                return (election.next_step(newest),)
            case Looked(found):
                election.looked(found)
            case Stood():
                election.stood()
            case Uploaded(generation, initialized, blocks):
                election.uploaded(generation, initialized, blocks)
            case Confirmed(revision):
                election.confirmed(revision)
            case StepFailed(error, may_help):
                election.failed(UnavailableError(error) if may_help else JobFailedError(error))
        return ()
