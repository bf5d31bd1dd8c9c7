"""Moments in a trainer's recorded events: its tasks, its batches, and its pushes and pulls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flightedl.messages.parameters import Outcome
from flightedl.recording.moments import (
    BEGUN,
    VALUES,
    CoreMoments,
    Effects,
    Known,
    Moment,
    Process,
    Subject,
    of_blocks,
    ranges,
    task_of,
)


class FeedMoments(CoreMoments):
    """Moments of the tasks of the training data or an evaluation."""

    def __init__(self, process: Process, known: Known) -> None:
        super().__init__(process, known)
        self._evaluation = ""
        self._tasks: dict[int, tuple[Subject, str]] = {}

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:
        if name == BEGUN:
            self._evaluation = event["about"]["evaluation"]
            loop = f"its part of evaluation {self._evaluation}" if self._evaluation else "a loop over the data"
            yield self.moment(f"begins {loop}", *self._subjects())
        elif name == "begin":
            task_begun: Any = effects[0]
            number, epoch, _, of, attempt, *_ = task_begun
            task, text = task_of(self._evaluation, (epoch + 1, of))
            self._tasks[number] = task, text
            verb = "evaluate" if self._evaluation else "read"
            yield self.moment(f"begins to {verb} {text}, attempt {attempt}", task, self.process.trainer)
        elif name in _REPORTS and (known := self._tasks.pop(event["task"][0], None)):
            task, text = known
            more = f" (batch {event['batch']}: {event['error']})" if name == "failed" else ""
            yield self.moment(f"{_REPORTS[name]} {text}{more}", task, self.process.trainer)
        elif name in _OF_TRAINERS:
            loop = "its evaluation" if self._evaluation else "its loop"
            yield self.moment(_OF_TRAINERS[name].format(loop=loop), *self._subjects())

    def _subjects(self) -> list[Subject]:
        return [self.process.trainer, *([("evaluation", self._evaluation)] if self._evaluation else [])]


_REPORTS = {"finished": "completes", "failed": "fails to process", "hand_back": "returns"}
_OF_TRAINERS = {
    "registered_again": "registers again and returns all its tasks",
    "retire": "has left {loop}",
    "close": "closes {loop}",
}


class LoopMoments(CoreMoments):
    """Moments of the batches that the script receives."""

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:
        if name == "done":
            batch = _batch_of(event["batch"]["Batch"])
            text = "receives the script's acknowledgment of {}/{}/{}".format(*batch)
            yield self.moment(text, ("batch", *batch), self.process.trainer)
        for each in effects:
            if "HandOut" in each:
                batch = _batch_of(each["HandOut"]["batch"])
                again = " again" if each["HandOut"]["is_again"] else ""
                text = "hands {}/{}/{} to the script{}".format(*batch, again)
                yield self.moment(text, ("batch", *batch), self.process.trainer)
            elif "GiveUpSum" in each:
                text = "drops its accumulated gradients, because their task now belongs to another trainer"
                yield self.moment(text, self.process.trainer)


def _batch_of(batch: Any) -> tuple[int, int, int]:
    return batch["epoch"] + 1, batch["task"], batch["number"]


class StepMoments(CoreMoments):
    """Moments at which gradients are computed, pushed to blocks, answered and settled."""

    def __init__(self, process: Process, known: Known) -> None:
        super().__init__(process, known)
        #: Epoch and task of the script's current or last batch.
        self._task = (0, 0)
        #: Number of the script's current or last batch.
        self._number = 0
        self._is_computed = False
        #: Numbers of the batches that the current transfer pushes; None if the transfer only reads values.
        self._pushed: list[int] | None = None
        #: Pserver -> current call.
        self._calls: dict[int, Any] = {}
        #: Pserver -> newest moment of a call to it. Used to leave out retries.
        self._said: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {}

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:
        if name == "open_batch":
            *task, self._number = _batch_of(event["batch"]["Batch"])
            self._task, self._is_computed = (task[0], task[1]), False
        elif name in {"step", "push", "add"} and not self._is_computed:
            self._is_computed = True
            added = " and accumulates it" if name == "add" else ""
            yield self.moment(f"has a gradient of {self._name(self._number)}{added}", *self._batches([self._number]))
        elif name == "handle_answers":
            yield from self._heard(event["index"], event)
            for verdict in effects[0].values():
                (self._calls[event["index"]],) = verdict.get("call", {"": None}).values()
        for each in effects:
            yield from self._effect(each)

    def _effect(self, each: Mapping[str, Any]) -> Iterator[Moment]:
        if "PrepareSum" in each:
            numbers = _numbers(each["PrepareSum"]["batch"])
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
        name, subjects = self._name(state["number"]), self._batches([state["number"]])
        if state.get("must_repeat"):
            again = state.get("again")
            in_sum = f", in a sum of {again['batch_count']}" if again and again["batch_count"] > 1 else ""
            yield self.moment(f"must compute {name} again{in_sum}", *subjects)
        elif not state.get("waits"):
            yield self.moment(f"settles {name}", *subjects)

    # a conversation with a pserver

    def _heard(self, index: int, event: Any) -> Iterator[Moment]:
        call, error = self._calls.get(index), event.get("error")
        if call is None:
            return
        if error is not None and not event["generation"]:
            text = f"cannot find pserver {index}: {error['error']}"
            yield from self._once(index, self.moment(text, *self._subjects()))
            return
        pserver = f"pserver {index} ({event['generation']})"
        wanted: dict[str, int] = call["bases"] if "bases" in call else call["wanted"]
        text = self._request(call, sorted(set(wanted.values())), pserver)
        rest = ranges(map(int, wanted))
        for begin, end, outcome, version, _ in event["answers"]:
            rest = _without(rest, (begin, end))
            if answer := _ANSWERS[Outcome(outcome)]:
                said = answer if version is None else f"{answer}, now at version {version}"
                yield self._of_blocks(f"{text}: {said}", [(begin, end)])
            else:
                yield self._of_blocks(f"receives {{blocks}} from {pserver} at version {version}", [(begin, end)])
        if not rest:
            self._said.pop(index, None)
        else:
            said = "no answer yet" if error is None else f"fails with {error['error']}"
            yield from self._once(index, self._of_blocks(f"{text}: {said}", rest))

    def _request(self, call: Any, wanted: Sequence[int], pserver: str) -> str:
        versions = f"version {wanted[0]}" if len(wanted) == 1 else f"versions {wanted[0]} to {wanted[-1]}"
        if "bases" in call:
            return f"pushes {', '.join(map(self._name, self._pushed or ()))} to {{blocks}} of {pserver}, at {versions}"
        return f"requests {{blocks}} from {pserver} at {versions} or later"

    def _once(self, index: int, moment: Moment) -> Iterator[Moment]:
        """Yield the moment, unless it repeats the previous one, as retries do."""
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
    return [each["batch"] for each in (pushed["identity"], *pushed["others"])]


_ANSWERS = {
    Outcome.NONE: "",
    Outcome.ACCEPTED: "accepted",
    Outcome.ALREADY_APPLIED: "already applied",
    Outcome.STALE: "rejected as stale",
    Outcome.NOT_MEMBER: "rejected, not a member",
    Outcome.PARTLY_APPLIED: "rejected, partly applied",
}


def _without(places: Iterable[tuple[int, int]], removed: tuple[int, int]) -> list[tuple[int, int]]:
    found = []
    for begin, end in places:
        found += [(begin, min(end, removed[0])), (max(begin, removed[1]), end)]
    return [(begin, end) for begin, end in found if begin < end]


class ElectionMoments(CoreMoments):
    """Moments in the election of the trainer that provides the model's initial values."""

    def __init__(self, process: Process, known: Known) -> None:
        super().__init__(process, known)
        self._said = ""

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:  # noqa: ARG002
        for each in effects:
            ((kind, step),) = each.items()
            text = _STEPS.get(kind, "").format(**step)
            if text and text != self._said:
                self._said = text
                yield self.moment(text, self.process.trainer)


_STEPS = {
    "CreateKey": "stands for the election of first values",
    "Upload": "sends first values to pserver {index}, election {election}",
    "Confirm": "confirms that the model has the first values of election {election}",
    "Elected": "uses the model of election {election}",
}


class FollowedMoments(CoreMoments):
    """Moment at which the trainer notices that the model was initialized again."""

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:  # noqa: ARG002
        if name == "require_same":
            yield self.moment("finds that the model was initialized again", self.process.trainer)


class EndMoments(CoreMoments):
    """Moment at which the trainer learns that the job has ended."""

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:  # noqa: ARG002
        if name == "replied" and event["reply"]["TasksReply"]["outcome"] == "epochs_done":
            yield self.moment("learns that all epochs are done", self.process.trainer)
