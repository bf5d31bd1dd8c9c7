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


def batch_loop(
    recorder: Recorder | None,
    trainer: str,
    feed: Holder,
    current_of: Callable[[ReadBatch[Records]], CurrentBatch],
) -> BatchLoop[Records]:
    """Make a loop of a trainer, recorded where there is a recorder; other arguments as of the plain one."""
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
    """Make a loop of a trainer, recorded where there is a recorder; other arguments as of the plain one."""
    if recorder is None:
        return AcknowledgedLoop(feed, current_of)
    from flightedl.recording.acknowledged import RecordedAcknowledgedLoop

    return RecordedAcknowledgedLoop(recorder, trainer, feed, current_of)


def trainer_steps(
    recorder: Recorder | None, trainer: str, shards: Sequence[Collection[int]], membership: Membership, mode: Mode
) -> Steps:
    """Make steps of a trainer, recorded where there is a recorder; other arguments as of the plain ones."""
    if recorder is None:
        return Steps(shards, membership, mode)
    from flightedl.recording.steps import RecordedSteps

    return RecordedSteps(recorder, trainer, shards, membership, mode)
