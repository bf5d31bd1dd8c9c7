"""The story of one batch, task, block, trainer or evaluation, over all processes of a run, in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from flightedl.errors import UsageError
from flightedl.messages.decoding import builtins_from_json
from flightedl.recording.master_moments import MasterMoments
from flightedl.recording.moments import BEGUN, JOB, Core, Known, Moment, Subject, Teller, ranges
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

#: Of each kind, how many numbers are in its identity; a trainer is told by its id, an evaluation by its name.
_KINDS = {"batch": 3, "task": 2, "block": 1}
#: Moments of one process that are the same but for the blocks, so close to each other, are told as one.
_TOGETHER_S = 1.0


def subject_of(kind: str, identity: str) -> Subject:
    """Of whom a story is told; epochs count from 1.

    It is ``batch 3/17/2``, ``task 3/17``, ``block 5``, ``trainer ID`` or ``evaluation NAME``.

    Raises:
        UsageError: it is none of these.
    """
    if kind in {"trainer", "evaluation"}:
        return (kind, identity)
    numbers = identity.split("/")
    if kind not in _KINDS or len(numbers) != _KINDS[kind] or not all(number.isdecimal() for number in numbers):
        raise UsageError(
            f"--story {kind} {identity}: a story is of batch EPOCH/TASK/BATCH, task EPOCH/TASK, block NUMBER, "
            "trainer ID or evaluation NAME, where epochs count from 1"
        )
    return (kind, *map(int, numbers))


#: Kind of a core -> what tells of one.
TELLERS: Mapping[str, Callable[[Teller, Known], Core]] = {
    "master": MasterMoments,
    "life": LifeMoments,
    "blocks": BlockMoments,
    "snapshots": SnapshotMoments,
    "feed": FeedMoments,
    "loop": LoopMoments,
    "acknowledged": LoopMoments,
    "steps": StepMoments,
    # What it decides is told by the master and the pservers.
    "membership": Core,
    "election": ElectionMoments,
    "election-followed": FollowedMoments,
    "end": EndMoments,
}


def moments_of(recording: Recording, known: Known) -> Iterator[Moment]:
    """What a process's recording tells.

    Raises:
        CorruptError: the file is damaged.
    """
    header = recording.header
    process = Teller(recording.name)
    cores: dict[str, Core] = {}
    for _, record in recording.records():
        if record.core not in cores:
            cores[record.core] = TELLERS[record.core.rpartition("-")[0]](process, known)
        core = cores[record.core]
        core.at = header.wall_s + record.at - header.clock_s
        event, effects = builtins_from_json(record.fields), builtins_from_json(record.effects)
        if record.name == BEGUN:
            process.begun(event)
        yield from core.tell(record.name, event, effects)


def story(recordings: Iterable[Recording], subject: Subject) -> list[Moment]:
    """What the recordings of a run tell of a subject, and what befell the job and those who took part meanwhile.

    Raises:
        CorruptError: a file is damaged.
    """
    known = Known()
    # Masters first: they tell which task an attempt is at.
    ordered = sorted(recordings, key=lambda each: each.header.process != "master")
    told = sorted((m for each in ordered for m in moments_of(each, known)), key=lambda moment: moment.at)
    own = [moment for moment in told if _is_of(moment, subject)]
    if not own:
        return []
    first, last = own[0].at, own[-1].at
    beside: set[Subject] = {JOB}
    if subject[0] in {"batch", "task", "evaluation"}:
        # Who had it, and whether they lived.
        beside |= {each for moment in own for each in moment.subjects if each[0] == "trainer"}
    mine = set(map(id, own))
    found = [
        moment for moment in told if id(moment) in mine or (first <= moment.at <= last and _befell(moment, beside))
    ]
    return _joined(found)


def _is_of(moment: Moment, subject: Subject) -> bool:
    if subject in moment.subjects:
        return True
    if subject[0] == "batch":
        return ("task", *subject[1:3]) in moment.subjects
    return subject[0] == "task" and any(each[0] == "batch" and each[1:3] == subject[1:] for each in moment.subjects)


def _befell(moment: Moment, beside: set[Subject]) -> bool:
    """Whether a moment is of the job as a whole, or of the life of one of these trainers."""
    return bool(moment.subjects & beside) and all(each in beside or each[0] == "block" for each in moment.subjects)


def _joined(moments: Sequence[Moment]) -> list[Moment]:
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
    """What happened, with the blocks."""
    return moment.text.replace("{blocks}", _blocks(moment.blocks))


def _blocks(places: Iterable[tuple[int, int]]) -> str:
    found = ranges(number for place in places for number in range(*place))
    names = [str(begin) if end - begin == 1 else f"{begin}-{end - 1}" for begin, end in found]
    is_one = len(found) == 1 and found[0][1] - found[0][0] == 1
    return f"block{'' if is_one else 's'} {', '.join(names)}"
