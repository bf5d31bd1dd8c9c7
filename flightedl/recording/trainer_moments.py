"""What a trainer's recorded events mean to people: of its tasks, its batches, and what it sends and is answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flightedl.messages.parameters import Outcome
from flightedl.recording.moments import BEGUN, VALUES, Core, Known, Moment, Subject, Teller, of_blocks, ranges, task_of

Told = Sequence[Mapping[str, Any]]


class FeedMoments(Core):
    """Of the tasks of the training data, or of an evaluation."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        self._evaluation = ""
        self._tasks: dict[int, tuple[Subject, str]] = {}

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == BEGUN:
            self._evaluation = event["about"]["evaluation"]
            whole = f"its part in evaluation {self._evaluation}" if self._evaluation else "a loop over the data"
            yield self.moment(f"begins {whole}", *self._whole())
        elif name == "begin":
            task_begun: Any = effects[0]
            number, epoch, _, of, attempt, *_ = task_begun
            task, text = task_of(self._evaluation, (epoch + 1, of))
            self._tasks[number] = task, text
            verb = "measure" if self._evaluation else "read"
            yield self.moment(f"begins to {verb} {text}, attempt {attempt}", task, self.process.trainer)
        elif name in _REPORTS and (known := self._tasks.pop(event["task"][0], None)):
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

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == "done":
            batch = _batch_of(event["batch"]["Batch"])
            yield self.moment("is told that {}/{}/{} is done".format(*batch), ("batch", *batch), self.process.trainer)
        for each in effects:
            if "HandOut" in each:
                batch = _batch_of(each["HandOut"]["batch"])
                again = " again" if each["HandOut"]["is_again"] else ""
                text = "hands {}/{}/{} to the script{}".format(*batch, again)
                yield self.moment(text, ("batch", *batch), self.process.trainer)
            elif "GiveUpSum" in each:
                text = "forgets the gradients that were added up: their task is somebody else's"
                yield self.moment(text, self.process.trainer)


def _batch_of(batch: Any) -> tuple[int, int, int]:
    return batch["epoch"] + 1, batch["task"], batch["number"]


class StepMoments(Core):
    """Of what is computed, to which blocks it is pushed, what they answer, and when it is settled."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        #: Epoch and task of the batch that the script has or had, and its number.
        self._task = (0, 0)
        self._number = 0
        self._is_computed = False
        #: Numbers of the batches that the present transfer is about; None: it only reads values.
        self._pushed: list[int] | None = None
        #: Pserver -> what it is asked.
        self._calls: dict[int, Any] = {}
        #: Pserver -> what was told of a call that is made again.
        self._said: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {}

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:
        if name == "open_batch":
            *task, self._number = _batch_of(event["batch"]["Batch"])
            self._task, self._is_computed = (task[0], task[1]), False
        elif name in {"step", "push", "add"} and not self._is_computed:
            self._is_computed = True
            added = ", and adds it up" if name == "add" else ""
            yield self.moment(f"has a gradient of {self._name(self._number)}{added}", *self._batches([self._number]))
        elif name == "heard":
            yield from self._heard(event["index"], event)
            for verdict in effects[0].values():
                (self._calls[event["index"]],) = verdict.get("call", {"": None}).values()
        for each in effects:
            yield from self._effect(each)

    def _effect(self, each: Mapping[str, Any]) -> Iterator[Moment]:
        if "TakeSum" in each:
            numbers = _numbers(each["TakeSum"]["batch"])
            names = ", ".join(map(self._name, numbers))
            yield self.moment(f"pushes the sum of {names}", *self._batches(numbers))
        elif (transfer := each.get("Transfer")) is not None:
            self._pushed = None if transfer["batch"] is None else _numbers(transfer["batch"])
            self._calls = dict(enumerate(transfer["calls"]))
        elif (done := each.get("Done")) is not None:
            if error := done.get("error"):
                yield self.moment(f"ends its step with {error['error']}", *self._batches([self._number]))
            for state in done.get("batches", ()):
                yield from self._now(state)

    def _name(self, number: int) -> str:
        return f"{self._task[0]}/{self._task[1]}/{number}"

    def _batches(self, numbers: Iterable[int]) -> list[Subject]:
        return [self.process.trainer, *(("batch", *self._task, number) for number in numbers)]

    def _now(self, state: Any) -> Iterator[Moment]:
        """The state that a batch has come to."""
        name, subjects = self._name(state["number"]), self._batches([state["number"]])
        if state.get("must_repeat"):
            again = state.get("again")
            in_sum = f", in a sum of {again['batch_count']}" if again and again["batch_count"] > 1 else ""
            yield self.moment(f"has to compute {name} again{in_sum}", *subjects)
        elif not state.get("waits"):
            yield self.moment(f"has {name} settled", *subjects)

    # a conversation with a pserver

    def _heard(self, index: int, event: Any) -> Iterator[Moment]:
        call, error = self._calls.get(index), event.get("error")
        if call is None:
            return
        if error is not None and not event["generation"]:
            yield from self._once(index, self.moment(f"finds no pserver {index}: {error['error']}", *self._subjects()))
            return
        pserver = f"pserver {index} ({event['generation']})"
        asked: dict[str, int] = call["bases"] if "bases" in call else call["wanted"]
        text = self._request(call, sorted(set(asked.values())), pserver)
        rest = ranges(map(int, asked))
        for begin, end, outcome, version, _ in event["answers"]:
            rest = _without(rest, (begin, end))
            if answer := _ANSWERS[Outcome(outcome)]:
                said = answer if version is None else f"{answer}, and are at version {version}"
                yield self._of_blocks(f"{text}: {said}", [(begin, end)])
            else:
                yield self._of_blocks(f"gets {{blocks}} of {pserver} at version {version}", [(begin, end)])
        if not rest:
            self._said.pop(index, None)
        else:
            said = "no answer yet" if error is None else f"that fails with {error['error']}"
            yield from self._once(index, self._of_blocks(f"{text}: {said}", rest))

    def _request(self, call: Any, wanted: Sequence[int], pserver: str) -> str:
        versions = f"version {wanted[0]}" if len(wanted) == 1 else f"versions {wanted[0]} to {wanted[-1]}"
        if "bases" in call:
            return f"pushes {', '.join(map(self._name, self._pushed or ()))} to {{blocks}} of {pserver}, at {versions}"
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
        return [self.process.trainer, VALUES] if self._pushed is None else self._batches(self._pushed)


def _numbers(pushed: Any) -> list[int]:
    """Numbers of the batches that are pushed as one."""
    return [each["batch"] for each in (pushed["identity"], *pushed["further"])]


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

    def tell(self, name: str, event: Any, effects: Told) -> Iterator[Moment]:  # noqa: ARG002
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
