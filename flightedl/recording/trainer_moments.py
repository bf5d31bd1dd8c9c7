"""What a trainer's recorded events mean to people: of its tasks, its batches, and what it sends and is answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flightedl.messages.parameters import Outcome
from flightedl.recording.moments import VALUES, Core, Known, Moment, Subject, Teller, of_blocks, task_of

Told = Sequence[Mapping[str, Any]]


class FeedMoments(Core):
    """Of the tasks of the training data, or of an evaluation."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        self._evaluation = ""
        self._tasks: dict[int, tuple[Subject, str]] = {}

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == "Begun":
            self.process.is_trainer(event["about"]["trainer"])
            self._evaluation = event["about"]["evaluation"]
            whole = f"its part in evaluation {self._evaluation}" if self._evaluation else "a loop over the data"
            yield self.moment(f"begins {whole}", *self._whole())
        elif name == "begin":
            taken = effects[0]["AssignedTask"]
            task, text = task_of(self._evaluation, (taken["epoch"] + 1, taken["task"]))
            self._tasks[taken["number"]] = task, text
            verb = "measure" if self._evaluation else "read"
            yield self.moment(f"begins to {verb} {text}, attempt {taken['attempt']}", task, self.process.trainer)
        elif name in _REPORTS and (known := self._tasks.pop(event["task"]["AssignedTask"]["number"], None)):
            task, text = known
            verb = "has measured" if self._evaluation and name == "finished" else _REPORTS[name]
            more = f" (batch {event['batch']}: {event['error']})" if name == "failed" else ""
            yield self.moment(f"{verb} {text}{more}", task, self.process.trainer)
        elif name in _OF_TRAINERS:
            loop = "its evaluation" if self._evaluation else "its loop"
            yield self.moment(_OF_TRAINERS[name].format(loop=loop), *self._whole())

    def _whole(self) -> list[Subject]:
        return [self.process.trainer, *([("evaluation", self._evaluation)] if self._evaluation else [])]


_REPORTS = {
    "finished": "has the answer of every block for",
    "failed": "cannot do",
    "hand_back": "hands back",
}
_OF_TRAINERS = {
    "registered_again": "has registered again, and hands back all that it held",
    "retire": "has left {loop}",
    "close": "closes {loop}",
}


class LoopMoments(Core):
    """Of the batches that the script gets."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        #: Number that a task was told under -> its epoch and number.
        self._places: dict[int, tuple[int, int]] = {}

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == "LoopBegun":
            self.process.is_trainer(event["trainer"])
        elif name == "BatchDone" and event["task"] in self._places:
            batch = *self._places[event["task"]], event["number"]
            yield self.moment("is told that {}/{}/{} is done".format(*batch), ("batch", *batch), self.process.trainer)
        elif name == "ItemTaken":
            self._places[event["task"]] = event["place"][0] + 1, event["place"][1]
        for each in effects:
            said = each.get("LoopSaid", {})
            if said.get("step") == "HandOut":
                batch = said.get("epoch", 0) + 1, said.get("task", 0), said["batch"]
                again = " again" if _is_again(event.get("batches", ()), said["batch"]) else ""
                text = "hands {}/{}/{} to the script{}".format(*batch, again)
                yield self.moment(text, ("batch", *batch), self.process.trainer)
            elif said.get("step") == "GiveUpSum":
                text = "forgets the gradients that were added up: their task is somebody else's"
                yield self.moment(text, self.process.trainer)


def _is_again(states: Iterable[Any], number: int) -> bool:
    return any(state["number"] == number and state.get("must_repeat") for state in states)


class StepMoments(Core):
    """Of what is computed, to which blocks it is pushed, what they answer, and when it is settled."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        #: Epoch and task of the batch that the script has or had, and its number.
        self._task = (0, 0)
        self._number = 0
        #: Numbers of the batches that the present transfer pushes.
        self._pushed: list[int] = []
        #: Those of a task of which it was told that they wait in a sum, or are computed again.
        self._waiting: set[int] = set()
        self._repeated: set[int] = set()
        self._is_computed = False
        #: Whether the work at hand is about these batches.
        self._is_of_batch = False
        #: Pserver -> what was told of a call that is made again.
        self._said: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {}

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == "StepsBegun":
            self.process.is_trainer(event["trainer"])
        if name in _OF_BATCHES:
            self._is_of_batch = event.get("is_of_batch", _OF_BATCHES[name])
        if name == "BatchOpening":
            self._open(event)
        elif name in _COMPUTED and not self._is_computed:
            self._is_computed = True
            added = ", and adds it up" if name == "GradientsAdded" else ""
            yield self.moment(f"has a gradient of {self._name(self._number)}{added}", *self._batches([self._number]))
        elif name == "PserverAsked":
            yield from self._asked(event, effects)
        for each in effects:
            if "SumTaken" in each:
                numbers = each["SumTaken"]["batches"]
                names = ", ".join(map(self._name, numbers))
                yield self.moment(f"pushes the sum of {names}", *self._batches(numbers))
                self._pushed, self._is_of_batch = numbers, True
            elif "Returned" in each and (error := each["Returned"].get("error")):
                yield self.moment(f"ends its step with {error}", *self._batches([self._number]))
            elif "BatchNow" in each:
                yield from self._now(each["BatchNow"], is_closed=name == "BatchClosing")

    def _open(self, event: Any) -> None:
        task = event["epoch"] + 1, event["task"]
        if task != self._task:
            self._waiting, self._repeated = set(), set()
        self._task, self._number, self._is_computed = task, event["batch"], False
        self._pushed = [self._number]
        self._repeated.discard(self._number)

    def _name(self, number: int) -> str:
        return f"{self._task[0]}/{self._task[1]}/{number}"

    def _batches(self, numbers: Iterable[int]) -> list[Subject]:
        return [self.process.trainer, *(("batch", *self._task, number) for number in numbers)]

    def _now(self, batch: Any, *, is_closed: bool) -> Iterator[Moment]:
        """What a batch has come to, where that is news."""
        number = batch["number"]
        name, subjects = self._name(number), self._batches([number])
        if batch.get("must_repeat"):
            if number not in self._repeated:
                again = batch.get("again")
                in_sum = f", in a sum of {again[1]}" if again and again[1] > 1 else ""
                yield self.moment(f"has to compute {name} again{in_sum}", *subjects)
            self._repeated.add(number)
            self._waiting.discard(number)
        elif batch.get("waits"):
            self._waiting.add(number)
        elif is_closed or number in self._waiting:
            self._waiting.discard(number)
            yield self.moment(f"has {name} settled", *subjects)

    # one call of a pserver

    def _asked(self, event: Any, effects: Told) -> Iterator[Moment]:
        index = event["index"]
        asked = next((each["Asked"] for each in effects if "Asked" in each), None)
        if asked is None:
            yield from self._once(index, self.moment(f"finds no pserver {index}: {event['error']}", *self._subjects()))
            return
        pserver = f"pserver {index} ({event['generation']})"
        text = self._request(asked, pserver)
        rest = [(begin, end) for begin, end, _ in asked["blocks"]]
        for (begin, end), outcome, version, _ in event.get("answers", ()):
            rest = _without(rest, (begin, end))
            if answer := _ANSWERS[Outcome(outcome)]:
                said = answer if version is None else f"{answer}, and are at version {version}"
                yield self._of_blocks(f"{text}: {said}", [(begin, end)])
            else:
                yield self._of_blocks(f"gets {{blocks}} of {pserver} at version {version}", [(begin, end)])
        if not rest:
            self._said.pop(index, None)
        elif error := event.get("error"):
            yield from self._once(index, self._of_blocks(f"{text}: that fails with {error}", rest))
        else:
            said = "no answer yet" if event.get("is_through") else "nobody waits for an answer"
            yield from self._once(index, self._of_blocks(f"{text}: {said}", rest))

    def _request(self, asked: Any, pserver: str) -> str:
        wanted = sorted({version for _, _, version in asked["blocks"]})
        versions = f"version {wanted[0]}" if len(wanted) == 1 else f"versions {wanted[0]} to {wanted[-1]}"
        if asked["call"] == "push":
            return f"pushes {', '.join(map(self._name, self._pushed))} to {{blocks}} of {pserver}, at {versions}"
        return f"asks {pserver} for {{blocks}} from {versions} on"

    def _once(self, index: int, moment: Moment) -> Iterator[Moment]:
        """What is tried again and again is told once."""
        said = moment.text, moment.blocks
        if self._said.get(index) != said:
            self._said[index] = said
            yield moment

    def _of_blocks(self, text: str, places: Sequence[tuple[int, int]]) -> Moment:
        blocks = [subject for place in places for subject in of_blocks(place)]
        return self.moment(text, *self._subjects(), *blocks, blocks=places)

    def _subjects(self) -> list[Subject]:
        return self._batches(self._pushed) if self._is_of_batch else [self.process.trainer, VALUES]


_COMPUTED = {"StepCalled", "PushCalled", "GradientsAdded"}
#: What begins a work -> whether it is about a batch, unless it says so itself.
_OF_BATCHES = {
    "BatchOpening": False,
    "RefreshCalled": False,
    "PullCalled": False,
    "BatchClosing": True,
    "StepCalled": True,
    "PushCalled": True,
    "SumPushed": True,
}
_ANSWERS = {
    Outcome.NONE: "",
    Outcome.ACCEPTED: "they take it",
    Outcome.ALREADY_APPLIED: "they have it already",
    Outcome.STALE: "it is too late",
    Outcome.NOT_MEMBER: "it is not a member",
    Outcome.PARTLY_APPLIED: "they have some of them",
}


def _without(places: Iterable[tuple[int, int]], gone: tuple[int, int]) -> list[tuple[int, int]]:
    """Ranges without those numbers."""
    found = []
    for begin, end in places:
        found += [(begin, min(end, gone[0])), (max(begin, gone[1]), end)]
    return [(begin, end) for begin, end in found if begin < end]


class ElectionMoments(Core):
    """Of whose first values the model gets."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        self._said = ""

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == "Begun":
            self.process.is_trainer(event["trainer"])
        for each in effects:
            ((kind, step),) = each.items()
            text = _STEPS.get(kind, "").format(**step)
            if text and text != self._said:
                self._said = text
                yield self.moment(text, self.process.trainer)


_STEPS = {
    "Stand": "stands for the election of first values",
    "Upload": "sends first values to pserver {index}, election {election}",
    "Confirm": "says that the model has its first values, of election {election}",
    "Elected": "works for the model of election {election}",
}


class FollowedMoments(Core):
    """Of another model than the one that was worked for."""

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:  # noqa: ARG002
        if name == "require_same":
            yield self.moment("finds that the model has other first values", self.process.trainer)


class EndMoments(Core):
    """Of the job's end."""

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:  # noqa: ARG002
        if name == "heard" and event["reply"]["TasksReply"]["outcome"] == "epochs_done":
            yield self.moment("hears that all is done", self.process.trainer)
