"""The cores of a trainer, recorded where there is something to record them.

What records them is imported only then: few trainers are recorded, and it would be a twentieth of what one imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.trainer.acknowledged import AcknowledgedLoop
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.feed import Feed
from flightedl.domain.trainer.first_values import Elected, ElectionOfFirstValues, FollowedElection
from flightedl.domain.trainer.membership import TrainerMembership
from flightedl.domain.trainer.readings import BatchLoop, Holder, ReadBatch, Records
from flightedl.domain.trainer.steps import Membership, Steps
from flightedl.ports import Clock

if TYPE_CHECKING:
    from flightedl.recording.writer import Recorder


def recording_trainer(directory: str, job: str, clock: Clock) -> contextlib.AbstractContextManager[Recorder | None]:
    """As ``writer.recording_process``, of a trainer."""
    if not directory:
        return contextlib.nullcontext()
    from flightedl.recording.writer import recording_process

    return recording_process(directory, "trainer", job, clock)


def trainer_feed(recorder: Recorder | None, cover_s: float, trainer: str, evaluation: str = "") -> Feed:
    """A feed, which is recorded where there is something to record it.

    Args:
        recorder: Of the process.
        cover_s: As of ``Feed``.
        trainer: Its id.
        evaluation: Whose tasks it fetches; empty: those of the training data.
    """
    if recorder is None:
        return Feed(cover_s)
    from flightedl.recording.trainer import RecordedFeed

    return RecordedFeed(recorder, cover_s, trainer, evaluation)


def batch_loop(
    recorder: Recorder | None,
    trainer: str,
    feed: Holder,
    current_of: Callable[[ReadBatch[Records]], CurrentBatch],
) -> BatchLoop[Records]:
    """A loop, which is recorded where there is something to record it.

    Args:
        recorder: Of the process.
        trainer: Its id.
        feed: As of ``BatchLoop``.
        current_of: Likewise.
    """
    if recorder is None:
        return BatchLoop(feed, current_of)
    from flightedl.recording.loops import RecordedLoop

    return RecordedLoop(recorder, trainer, feed, current_of)


def acknowledged_loop(
    recorder: Recorder | None,
    trainer: str,
    feed: Holder,
    current_of: Callable[[ReadBatch[Records]], CurrentBatch],
) -> AcknowledgedLoop[Records]:
    """A loop, which is recorded where there is something to record it.

    Args:
        recorder: Of the process.
        trainer: Its id.
        feed: As of ``AcknowledgedLoop``.
        current_of: Likewise.
    """
    if recorder is None:
        return AcknowledgedLoop(feed, current_of)
    from flightedl.recording.acknowledged import RecordedAcknowledgedLoop

    return RecordedAcknowledgedLoop(recorder, trainer, feed, current_of)


def trainer_membership(recorder: Recorder | None, trainer: str) -> TrainerMembership:
    """A membership, which is recorded where there is something to record it."""
    if recorder is None:
        return TrainerMembership()
    from flightedl.recording.membership import RecordedMembership

    return RecordedMembership(recorder, trainer)


def trainer_steps(
    recorder: Recorder | None, trainer: str, shards: Sequence[Collection[int]], membership: Membership, mode: Mode
) -> Steps:
    """Steps, which are recorded where there is something to record them.

    Args:
        recorder: Of the process.
        trainer: Its id.
        shards: As of ``Steps``.
        membership: Likewise.
        mode: Likewise.
    """
    if recorder is None:
        return Steps(shards, membership, mode)
    from flightedl.recording.steps import RecordedSteps

    return RecordedSteps(recorder, trainer, shards, membership, mode)


def election_of_first_values(recorder: Recorder | None, trainer: str, pserver_count: int) -> ElectionOfFirstValues:
    """A trainer's part, which is recorded where there is something to record it."""
    if recorder is None:
        return ElectionOfFirstValues(trainer, pserver_count)
    from flightedl.recording.elections import RecordedElection

    return RecordedElection(recorder.core("election"), trainer, pserver_count)


def followed_election(recorder: Recorder | None, elected: Elected) -> FollowedElection:
    """Whose model is worked for; recorded likewise."""
    if recorder is None:
        return FollowedElection(elected)
    from flightedl.recording.elections import RecordedFollowing

    return RecordedFollowing(recorder.core("election"), elected)


def job_end(recorder: Recorder | None) -> JobEnd:
    """What is known of the end, which is recorded where there is something to record it."""
    if recorder is None:
        return JobEnd()
    from flightedl.recording.endings import RecordedEnd

    return RecordedEnd(recorder.core("end"))
