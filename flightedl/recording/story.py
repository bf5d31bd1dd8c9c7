"""The story of one batch, task, block, trainer or evaluation: its moments in all processes, in chronological order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from flightedl.errors import UsageError
from flightedl.messages.decoding import builtins_from_json
from flightedl.recording.master_moments import MasterMoments
from flightedl.recording.moments import BEGUN, JOB, CoreMoments, Known, Moment, Process, Subject, ranges
from flightedl.recording.pserver_moments import BlockMoments, LifeMoments, SnapshotMoments
from flightedl.recording.reader import Recording
from flightedl.recording.trainer_moments import (
    ElectionMoments,
    EndMoments,
    FeedMoments,
    FollowedMoments,
    LoopMoments,
    StepMoments,
)

#: Kind of subject -> number of integers that identify it, for subjects that are identified by integers.
_KINDS = {"batch": 3, "task": 2, "block": 1}
#: Moments that differ only in their blocks are merged if at most this many seconds lie between them.
_TOGETHER_S = 1.0


def subject_of(kind: str, identity: str) -> Subject:
    """Parse the subject of a story. Epochs are numbered from 1.

    A subject is ``batch 3/17/2``, ``task 3/17``, ``block 5``, ``trainer ID`` or ``evaluation NAME``.

    Raises:
        UsageError: The subject is none of these.
    """
    if kind in {"trainer", "evaluation"}:
        return (kind, identity)
    numbers = identity.split("/")
    if kind not in _KINDS or len(numbers) != _KINDS[kind] or not all(number.isdecimal() for number in numbers):
        raise UsageError(
            f"--story {kind} {identity}: use batch EPOCH/TASK/BATCH, task EPOCH/TASK, block NUMBER, trainer ID or "
            "evaluation NAME; epochs are numbered from 1"
        )
    return (kind, *map(int, numbers))


#: Kind of core -> class that yields its moments.
SOURCES: Mapping[str, Callable[[Process, Known], CoreMoments]] = {
    "master": MasterMoments,
    "life": LifeMoments,
    "blocks": BlockMoments,
    "snapshots": SnapshotMoments,
    "feed": FeedMoments,
    "loop": LoopMoments,
    "acknowledged": LoopMoments,
    "steps": StepMoments,
    # The moments of the master and of the pservers already contain the decisions about membership.
    "membership": CoreMoments,
    "election": ElectionMoments,
    "election-followed": FollowedMoments,
    "end": EndMoments,
}


def moments_of(recording: Recording, known: Known) -> Iterator[Moment]:
    """Yield the moments in the recording of a process.

    Raises:
        CorruptError: The file is damaged.
    """
    header = recording.header
    process = Process(recording.name)
    cores: dict[str, CoreMoments] = {}
    for _, record in recording.records():
        if record.core not in cores:
            cores[record.core] = SOURCES[record.core.rpartition("-")[0]](process, known)
        core = cores[record.core]
        core.at = header.wall_s + record.at - header.clock_s
        event, effects = builtins_from_json(record.fields), builtins_from_json(record.effects)
        if record.name == BEGUN:
            process.begun(event)
        yield from core.moments(record.name, event, effects)


def story(recordings: Iterable[Recording], subject: Subject) -> list[Moment]:
    """Return a subject's moments, and the moments of the job and of the involved trainers in the same period.

    Raises:
        CorruptError: A file is damaged.
    """
    known = Known()
    # Read masters first, because their records map attempts to tasks.
    ordered = sorted(recordings, key=lambda each: each.header.process != "master")
    moments = sorted((m for each in ordered for m in moments_of(each, known)), key=lambda moment: moment.at)
    own = [moment for moment in moments if _is_of(moment, subject)]
    if not own:
        return []
    first, last = own[0].at, own[-1].at
    context: set[Subject] = {JOB}
    if subject[0] in {"batch", "task", "evaluation"}:
        # Include the starts and deaths of trainers that held the task.
        context |= {each for moment in own for each in moment.subjects if each[0] == "trainer"}
    mine = set(map(id, own))
    return _merged([m for m in moments if id(m) in mine or (first <= m.at <= last and _is_only_about(m, context))])


def _is_of(moment: Moment, subject: Subject) -> bool:
    if subject in moment.subjects:
        return True
    if subject[0] == "batch":
        return ("task", *subject[1:3]) in moment.subjects
    return subject[0] == "task" and any(each[0] == "batch" and each[1:3] == subject[1:] for each in moment.subjects)


def _is_only_about(moment: Moment, context: set[Subject]) -> bool:
    return bool(moment.subjects & context) and all(each in context or each[0] == "block" for each in moment.subjects)


def _merged(moments: Sequence[Moment]) -> list[Moment]:
    found: list[Moment] = []
    for moment in moments:
        same = next(
            (
                place
                for place in range(len(found) - 1, max(len(found) - 9, -1), -1)
                if moment.blocks
                and (found[place].process, found[place].text) == (moment.process, moment.text)
                and moment.at - found[place].at <= _TOGETHER_S
                and set(found[place].blocks).isdisjoint(moment.blocks)
            ),
            None,
        )
        if same is None:
            found.append(moment)
        else:
            found[same] = replace(found[same], blocks=(*found[same].blocks, *moment.blocks))
    return found


def text_of(moment: Moment) -> str:
    """Return the description of a moment, including its blocks."""
    return moment.text.replace("{blocks}", _blocks(moment.blocks))


def _blocks(places: Iterable[tuple[int, int]]) -> str:
    found = ranges(number for place in places for number in range(*place))
    names = [str(begin) if end - begin == 1 else f"{begin}-{end - 1}" for begin, end in found]
    is_one = len(found) == 1 and found[0][1] - found[0][0] == 1
    return f"block{'' if is_one else 's'} {', '.join(names)}"
