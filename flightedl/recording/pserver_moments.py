"""What a pserver's recorded events mean to people: of its life, its blocks and its snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flightedl.messages.parameters import Outcome
from flightedl.recording.moments import BEGUN, JOB, Core, Known, Moment, Subject, Teller, of_blocks


class LifeMoments(Core):
    """Of what it has and does, from its index to its end."""

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == "IndexTaken":
            self.process.name = f"pserver {event['index']} ({event['generation']})"
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


class BlockMoments(Core):
    """Of what is pushed to its blocks, and what they come to."""

    def __init__(self, process: Teller, known: Known) -> None:
        super().__init__(process, known)
        #: First block of a span -> its blocks, begin and end.
        self._spans: dict[int, tuple[int, int]] = {}

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        if name == BEGUN:
            self._spans = {begin: (begin, end) for (begin, end), _ in event["extents"]}
        elif name == "push":
            yield from self._pushed(event, effects)
        elif name == "split":
            self._split(effects)
        elif name == "take_view":
            yield from self._viewed(event["request"]["ViewRequest"], effects)
        elif name == "restore":
            self._split(effects)
            yield self.moment("takes {blocks} over from a checkpoint", *self._all(), blocks=self._spans.values())
        elif name == "initialize":
            place = (event["number"], event["number"] + 1)
            yield self.moment("takes first values of {blocks}", *of_blocks(place), blocks=[place])

    def _all(self) -> list[Subject]:
        return [JOB, *(subject for place in self._spans.values() for subject in of_blocks(place))]

    def _split(self, effects: Sequence[Mapping[str, Any]]) -> None:
        for each in effects:
            self._spans |= {begin: (begin, end) for begin, end in each["Split"]["into"]}

    def _pushed(self, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        place, push = self._spans[event["first"]], event["push"]["Push"]
        if "Split" in effects[0]:
            self._split(effects)
            return
        answer = Outcome(effects[0]["Pushed"]["outcome"])
        outcome = _OUTCOMES.get(answer, answer.name)
        kind = "a gradient" if event["has_gradient"] else "an arrival"
        batches, names = _batches(push["batches"])
        text = (
            f"{outcome} {kind} of {push['trainer']} for {names} at {{blocks}}, base {event['base_version']}, "
            f"member {push['member']}"
        )
        yield self.moment(text, *batches, ("trainer", push["trainer"]), *of_blocks(place), blocks=[place])
        yield from self._changed(place, effects[1:])

    def _viewed(self, request: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:
        members = ", ".join(f"{each['trainer']} from round {each['first_round']}" for each in request["members"])
        trainers = [("trainer", each["trainer"]) for each in request["members"]]
        yield self.moment(f"is told to wait for {members or 'nobody'}", *trainers, *self._all()[1:])
        place = (0, 0)
        for each in effects[1:]:
            if "returned" in each:
                place = self._spans[each["returned"]]
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
            yield self.moment(text, *batches, *of_blocks(place), blocks=[place])


_OUTCOMES = {
    Outcome.ACCEPTED: "accepts",
    Outcome.ALREADY_APPLIED: "has already, and acknowledges,",
    Outcome.STALE: "refuses as too late",
    Outcome.NOT_MEMBER: "refuses, as not of a member,",
    Outcome.PARTLY_APPLIED: "refuses, for it has some of them already,",
}


def _batches(named: Iterable[Any]) -> tuple[list[Subject], str]:
    found = sorted((epoch + 1, task, batch) for (epoch, task, batch), _ in named)
    subjects: list[Subject] = [("batch", *each) for each in found]
    return subjects, ", ".join(f"{epoch}/{task}/{batch}" for epoch, task, batch in found)


class SnapshotMoments(Core):
    """Of checkpoints that it could not be a part of."""

    def tell(self, name: str, event: Any, effects: Sequence[Mapping[str, Any]]) -> Iterator[Moment]:  # noqa: ARG002
        if name == "failed":
            yield self.moment(
                f"cannot write checkpoint {event['order']['OrderNumber']['number']}: {event['reason']}", JOB
            )
