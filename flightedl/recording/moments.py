"""What recorded events mean to people: moments of batches, tasks, blocks and trainers, out of each kind of core.

Epochs are counted from 1, as everywhere where people read them; tasks, batches and blocks from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flightedl.recording.reader import ReadRecord, Recording

#: (kind, identity): ("batch", 3, 17, 2), ("task", 3, 17), ("block", 5), ("trainer", "a"). What concerns everything is
#: ("job",).
Subject = tuple[Any, ...]
JOB: Subject = ("job",)


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, for people.

    Args:
        at: Seconds since 1970.
        process: Where.
        text: What; "{blocks}" stands for the blocks.
        subjects: Of whom it tells.
        blocks: That it is about, as ranges.
    """

    at: float
    process: str
    text: str
    subjects: frozenset[Subject]
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Known:
    """What the moments of a run have told so far."""

    #: Attempt -> (epoch, task, first batch, end batch).
    attempts: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)

    def task_of(self, attempt: int) -> list[Subject]:
        """The task that an attempt is at, if that is known."""
        found = self.attempts.get(attempt)
        return [] if found is None else [("task", found[0], found[1])]


class _Core:
    """Tells the moments of one core."""

    def __init__(self, process: str, known: Known) -> None:
        self.process = process
        self.known = known
        self.at = 0.0

    def moment(self, text: str, *subjects: Subject, blocks: Iterable[tuple[int, int]] = ()) -> Moment:
        return Moment(self.at, self.process, text, frozenset(subjects), tuple(blocks))

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        """What an event and its effects mean."""
        raise NotImplementedError


class _Master(_Core):
    def __init__(self, process: str, known: Known) -> None:
        super().__init__(process, known)
        self._callers: dict[int, str] = {}
        self._seen: dict[str, dict[str, int]] = {"trainers": {}, "pservers": {}}

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == "MasterBegun":
            self.process = f"master {event['settings']['generation']}"
            yield self.moment("leads", JOB)
        elif name == "LeasesSeen":
            yield from self._leases(event)
        elif name == "WorkAsked" and not event["ticket"]["evaluation"]:
            yield from self._reported(event["call"], event["ticket"])
        elif name == "JoinAsked":
            self._callers[event["call"]] = event["request"]["trainer"]
        for each in effects:
            ((kind, effect),) = each.items()
            yield from self._effect(kind, effect)

    def _leases(self, event: Any) -> Iterator[Moment]:
        for kind, seen in self._seen.items():
            now: dict[str, int] = event[kind]
            one = kind[:-1]
            for name in sorted({*seen, *now}):
                if seen.get(name) == now.get(name):
                    continue
                subject = ("trainer", name) if kind == "trainers" else JOB
                if name in seen:
                    yield self.moment(f"sees that {one} {name} is gone, generation {seen[name]}", subject)
                if name in now:
                    yield self.moment(f"sees {one} {name}, generation {now[name]}", subject)
            self._seen[kind] = now

    def _reported(self, call: int, ticket: Any) -> Iterator[Moment]:
        trainer = ticket["trainer"]
        self._callers[call] = trainer
        for kind, word in (("finished", "finished"), ("failed", "failed"), ("returned", "handed back")):
            for report in ticket[kind]:
                attempt = report["attempt"]
                at = f", at batch {report['batch']}" if report.get("batch") is not None else ""
                by = f", acknowledged by generations {report['pservers']}" if report.get("pservers") else ""
                subjects = [("trainer", trainer), *self.known.task_of(attempt)]
                yield self.moment(f"hears of {trainer} that attempt {attempt} is {word}{at}{by}", *subjects)

    def _effect(self, kind: str, effect: Any) -> Iterator[Moment]:
        if kind == "Answer":
            ((reply_kind, reply),) = effect["reply"].items()
            trainer = self._callers.pop(effect["call"], None)
            if trainer is not None and reply_kind == "TasksReply":
                yield from self._answered(trainer, reply)
            elif trainer is not None and reply_kind == "JoinReply" and reply["member"]:
                yield self.moment(f"tells {trainer} that it is member {reply['member']}", ("trainer", trainer))
            elif trainer is not None and reply_kind == "error":
                yield self.moment(f"refuses {trainer}: {reply}", ("trainer", trainer))
        elif kind == "Note" and not effect["text"].startswith(_TOLD_BY_LEASES):
            yield self.moment(_text(effect), JOB)
        elif kind == "QueueNews" and not effect["evaluation"]:
            yield from self._news(effect["effect"])
        elif kind == "DeleteElection":
            yield self.moment("lets the model get first values again", JOB)

    def _answered(self, trainer: str, reply: Any) -> Iterator[Moment]:
        for given in reply["assignments"]:
            place = given["epoch"] + 1, given["task"], given["first_batch"], given["end_batch"]
            self.known.attempts[given["attempt"]] = place
            batches = f"batches {place[2]} to {place[3] - 1} of task {place[0]}/{place[1]}"
            text = f"gives {trainer} attempt {given['attempt']}: {batches}"
            yield self.moment(text, ("trainer", trainer), ("task", *place[:2]))
        for lost in reply["lost"]:
            attempt = lost["attempt"]
            subjects = [("trainer", trainer), *self.known.task_of(attempt)]
            yield self.moment(f"tells {trainer} to drop attempt {attempt}", *subjects)

    def _news(self, news: Any) -> Iterator[Moment]:
        ((kind, found),) = news.items()
        if kind == "EpochFinished":
            yield self.moment(f"finds that epoch {found['epoch'] + 1} is done", JOB)
        elif kind == "Expired":
            given, trainer = found["assignment"], found["trainer"]
            task = ("task", given["epoch"] + 1, given["task"])
            text = f"takes back what {trainer} holds: task {task[1]}/{task[2]} took too long"
            yield self.moment(text, task, ("trainer", trainer))
        elif kind == "Quarantined":
            piece = found["piece"]
            task = ("task", piece["epoch"] + 1, piece["task"])
            batches = f"batches {piece['first_batch']} to {piece['end_batch'] - 1} of task {task[1]}/{task[2]}"
            yield self.moment(f"gives up {batches}: {piece['error']}", task)


#: Notes of the log that say what ``_leases`` tells already.
_TOLD_BY_LEASES = ("pserver is there", "trainer is gone")


def _text(note: Any) -> str:
    try:
        return str(note["text"] % tuple(note["values"]))
    except (TypeError, ValueError):
        return f"{note['text']} {note['values']}"


class _Feed(_Core):
    def __init__(self, process: str, known: Known) -> None:
        super().__init__(process, known)
        self._trainer: Subject = ("trainer", "")
        self._is_evaluation = False
        self._tasks: dict[int, Subject] = {}

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == "FeedBegun":
            self.process, self._trainer = f"trainer {event['trainer']}", ("trainer", event["trainer"])
            self._is_evaluation = bool(event["evaluation"])
            yield self.moment("begins a loop over the data", self._trainer)
        if self._is_evaluation:
            return
        if name == "TaskBegun" and effects:
            taken = effects[0]["TaskTaken"]
            task = self._tasks[taken["task"]] = ("task", taken["epoch"] + 1, taken["number"])
            yield self.moment(
                f"begins to read task {task[1]}/{task[2]}, attempt {taken['attempt']}", task, self._trainer
            )
        elif name in _REPORTS and event["task"] in self._tasks:
            task = self._tasks.pop(event["task"])
            more = f" (batch {event['batch']}: {event['error']})" if name == "TaskFailed" else ""
            yield self.moment(f"{_REPORTS[name]} task {task[1]}/{task[2]}{more}", task, self._trainer)
        elif name in _OF_TRAINERS:
            yield self.moment(_OF_TRAINERS[name], self._trainer)


_REPORTS = {
    "TaskFinished": "has the answer of every block for",
    "TaskFailed": "cannot do",
    "TaskHandedBack": "hands back",
}
_OF_TRAINERS = {
    "RegisteredAgain": "has registered again, and hands back all that it held",
    "FeedRetired": "has left its loop",
    "FeedClosed": "closes its loop",
}


class _Life(_Core):
    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == "IndexTaken":
            self.process = f"pserver {event['index']} ({event['generation']})"
            yield self.moment("takes its index", JOB)
        for each in effects:
            ((kind, effect),) = each.items()
            if kind == "Serve":
                origin = "first values" if effect["checkpoint"] is None else f"checkpoint {effect['checkpoint']}"
                yield self.moment(f"serves, from {origin}", JOB)
            elif kind == "Lack":
                yield self.moment("has lost its values, and there is no checkpoint of them", JOB)
            elif kind in {"Fail", "StartAgain"}:
                yield self.moment(f"ends: {effect['why']}", JOB)


class _Blocks(_Core):
    def __init__(self, process: str, known: Known) -> None:
        super().__init__(process, known)
        #: First block of a span -> its blocks, begin and end.
        self._spans: dict[int, tuple[int, int]] = {}

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == "BlocksBegun":
            self.process = f"pserver {event['pserver']} ({event['generation']})"
            self._spans = {first: (first, first + count) for first, count in event["spans"]}
        elif name == "BlocksPushed":
            yield from self._pushed(event, effects)
        elif name == "SpanSplit":
            self._split(event["into"])
        elif name == "ViewCame":
            yield from self._viewed(event["request"], effects)
        elif name == "BlocksRestored":
            self._split(effects[0]["Apart"]["spans"])
            yield self.moment("takes {blocks} over from a checkpoint", *self._all(), blocks=self._spans.values())
        elif name == "FirstValuesTaken":
            place = (event["block"], event["block"] + 1)
            yield self.moment("takes first values of {blocks}", *_of_blocks(place), blocks=[place])

    def _all(self) -> list[Subject]:
        return [JOB, *(subject for place in self._spans.values() for subject in _of_blocks(place))]

    def _split(self, into: Iterable[tuple[int, int]]) -> None:
        self._spans |= {first: (first, first + count) for first, count in into}

    def _pushed(self, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        place, push = self._spans[event["span"]], event["push"]
        if "Apart" in effects[0]:
            self._split(effects[0]["Apart"]["spans"])
            return
        answer = effects[0]["PushAnswered"]
        outcome = _OUTCOMES.get(answer["outcome"], answer["outcome"])
        kind = "a gradient" if event["has_gradient"] else "an arrival"
        batches, names = _batches(push["batches"])
        text = (
            f"{outcome} {kind} of {push['trainer']} for {names} at {{blocks}}, base {event['base_version']}, "
            f"member {push['member']}"
        )
        yield self.moment(text, *batches, ("trainer", push["trainer"]), *_of_blocks(place), blocks=[place])
        yield from self._changed(place, effects[1:])

    def _viewed(self, request: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        members = ", ".join(f"{each['trainer']} from round {each['first_round']}" for each in request["members"])
        trainers = [("trainer", each["trainer"]) for each in request["members"]]
        yield self.moment(f"is told to wait for {members or 'nobody'}", *trainers, *self._all()[1:])
        place = (0, 0)
        for each in effects[1:]:
            if "Span" in each:
                place = self._spans[each["Span"]]
            else:
                yield from self._changed(place, [each])

    def _changed(self, place: tuple[int, int], effects: Iterable[Mapping[str, Any]]) -> Iterator[Moment]:
        for each in effects:
            ((kind, effect),) = each.items()
            if kind not in {"Update", "EmptyRound"}:
                continue
            batches, names = _batches(effect.get("batches", ()))
            versions = f"from version {effect['from_version']} to {effect['to_version']}"
            text = (
                f"takes {{blocks}} {versions}, with {names}" if names else f"takes {{blocks}} {versions}, without any"
            )
            yield self.moment(text, *batches, *_of_blocks(place), blocks=[place])


_OUTCOMES = {
    "ACCEPTED": "accepts",
    "ALREADY_APPLIED": "has already, and acknowledges,",
    "STALE": "refuses as too late",
    "NOT_MEMBER": "refuses, as not of a member,",
    "PARTLY_APPLIED": "refuses, for it has some of them already,",
}


def _of_blocks(place: tuple[int, int]) -> list[Subject]:
    return [("block", number) for number in range(*place)]


def _batches(named: Iterable[Any]) -> tuple[list[Subject], str]:
    found = sorted((epoch + 1, task, batch) for (epoch, task, batch), _ in named)
    subjects: list[Subject] = [("batch", *each) for each in found]
    return subjects, ", ".join(f"{epoch}/{task}/{batch}" for epoch, task, batch in found)


class _Loop(_Core):
    def __init__(self, process: str, known: Known) -> None:
        super().__init__(process, known)
        self._trainer: Subject = ("trainer", "")

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == "LoopBegun":
            self.process, self._trainer = f"trainer {event['trainer']}", ("trainer", event["trainer"])
        for each in effects:
            said = each.get("LoopSaid", {})
            if said.get("step") == "HandOut":
                batch = said["epoch"] + 1, said["task"], said["batch"]
                again = " again" if _is_again(event["batches"], said["batch"]) else ""
                yield self.moment(
                    "hands {}/{}/{} to the script{}".format(*batch, again), ("batch", *batch), self._trainer
                )
            elif said.get("step") == "GiveUpSum":
                yield self.moment(
                    "forgets the gradients that were added up: their task is somebody else's", self._trainer
                )


def _is_again(states: Iterable[Any], number: int) -> bool:
    return any(state["number"] == number and state["must_repeat"] for state in states)


class _Membership(_Core):
    """What it decides is told by the master and the pservers."""

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:  # noqa: ARG002
        return iter(())


_CORES: Mapping[str, Callable[[str, Known], _Core]] = {
    "master": _Master,
    "feed": _Feed,
    "life": _Life,
    "blocks": _Blocks,
    "loop": _Loop,
    "membership": _Membership,
    "steps": _Membership,
    "election": _Membership,
    "end": _Membership,
    "snapshots": _Membership,
}


def moments_of(recording: Recording, known: Known) -> Iterator[Moment]:
    """What a process's recording tells.

    Raises:
        CorruptError: the file is damaged.
    """
    header = recording.header
    cores: dict[str, _Core] = {}
    for _, record in recording.records():
        if record.core not in cores:
            cores[record.core] = _CORES[record.core.rpartition("-")[0]](recording.name, known)
        core = cores[record.core]
        core.at = header.wall_s + record.at - header.clock_s
        yield from core.tell(record.name, *_read(record))


def _read(record: ReadRecord) -> tuple[Any, Any]:
    return msgspec.json.decode(record.fields), msgspec.json.decode(record.effects)
