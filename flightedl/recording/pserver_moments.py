"""Moments in a pserver's recorded events: in its lifecycle, its blocks and its snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flightedl.messages.parameters import Outcome
from flightedl.recording.moments import JOB, CoreMoments, Effects, Known, Moment, Process, Subject, of_blocks
from flightedl.recording.spans import Spans


class LifeMoments(CoreMoments):
    """Moments of the lifecycle."""

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:
        if name == "IndexAcquired":
            self.process.name = f"pserver {event['index']} ({event['generation']})"
            yield self.moment("acquires its index", JOB)
        for each in effects:
            ((kind, effect),) = each.items()
            if kind == "Serve":
                origin = "first values" if effect["checkpoint"] is None else f"checkpoint {effect['checkpoint']}"
                yield self.moment(f"begins to serve, from {origin}", JOB)
            elif kind == "Lack":
                yield self.moment("lacks its predecessor's values, of which there is no checkpoint", JOB)
            elif kind in {"Fail", "StartAgain"}:
                yield self.moment(f"ends: {effect['why']}", JOB)


class BlockMoments(CoreMoments):
    """Moments of pushes to blocks, of the blocks' views, and of their updates."""

    def __init__(self, process: Process, known: Known) -> None:
        super().__init__(process, known)
        self._spans: Spans[None] = Spans(lambda: None, lambda _: None)

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:
        self._spans.apply(name, event, effects)
        if name == "push" and "Pushed" in effects[0]:
            yield from self._pushed(event, effects)
        elif name == "apply_view":
            yield from self._viewed(event["request"]["ViewRequest"], effects)
        elif name == "restore":
            yield self.moment("restores {blocks} from a checkpoint", *self._all(), blocks=self._places())
        elif name == "initialize":
            place = (event["number"], event["number"] + 1)
            yield self.moment("accepts first values of {blocks}", *of_blocks(place), blocks=[place])

    def _place(self, first: int) -> tuple[int, int]:
        numbers, _ = self._spans[first]
        return numbers.start, numbers.stop

    def _places(self) -> list[tuple[int, int]]:
        return [(numbers.start, numbers.stop) for numbers, _ in self._spans.all()]

    def _all(self) -> list[Subject]:
        return [JOB, *(subject for place in self._places() for subject in of_blocks(place))]

    def _pushed(self, event: Any, effects: Effects) -> Iterator[Moment]:
        place, push = self._place(event["first"]), event["push"]["Push"]
        answer = Outcome(effects[0]["Pushed"]["outcome"])
        outcome = _OUTCOMES.get(answer, answer.name)
        kind = "a gradient" if event["has_gradient"] else "an arrival"
        batches, names = _batches(push["batches"])
        text = (
            f"{outcome} {kind} from {push['trainer']} for {names} at {{blocks}}, base {event['base_version']}, "
            f"member {push['member']}"
        )
        yield self.moment(text, *batches, ("trainer", push["trainer"]), *of_blocks(place), blocks=[place])
        yield from self._changed(place, effects[1:])

    def _viewed(self, request: Any, effects: Effects) -> Iterator[Moment]:
        members = ", ".join(f"{each['trainer']} from round {each['first_round']}" for each in request["members"])
        trainers = [("trainer", each["trainer"]) for each in request["members"]]
        text = f"receives a view of {members}" if members else "receives a view without members"
        yield self.moment(text, *trainers, *self._all()[1:])
        place = (0, 0)
        for each in effects[1:]:
            if "returned" in each:
                place = self._place(each["returned"])
            else:
                yield from self._changed(place, [each])

    def _changed(self, place: tuple[int, int], effects: Effects) -> Iterator[Moment]:
        for each in effects:
            ((kind, effect),) = each.items()
            if kind not in {"Update", "EmptyRound"}:
                continue
            batches, names = _batches(effect.get("batches", ()))
            versions = f"from version {effect['from_version']} to {effect['to_version']}"
            with_what = f"with {names}" if names else "without a gradient"
            yield self.moment(
                f"updates {{blocks}} {versions}, {with_what}", *batches, *of_blocks(place), blocks=[place]
            )


_OUTCOMES = {
    Outcome.ACCEPTED: "accepts",
    Outcome.ALREADY_APPLIED: "acknowledges, as already applied,",
    Outcome.STALE: "rejects, as stale,",
    Outcome.NOT_MEMBER: "rejects, as not from a member,",
    Outcome.PARTLY_APPLIED: "rejects, as partly applied,",
}


def _batches(named: Iterable[Any]) -> tuple[list[Subject], str]:
    found = sorted((epoch + 1, task, batch) for (epoch, task, batch), _ in named)
    subjects: list[Subject] = [("batch", *each) for each in found]
    return subjects, ", ".join(f"{epoch}/{task}/{batch}" for epoch, task, batch in found)


class SnapshotMoments(CoreMoments):
    """Moments of failed snapshots."""

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:  # noqa: ARG002
        if name == "failed":
            yield self.moment(
                f"cannot write checkpoint {event['order']['OrderNumber']['number']}: {event['reason']}", JOB
            )
