"""Moments in a master's recorded events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flightedl.recording.moments import BEGUN, JOB, CoreMoments, Effects, Known, Moment, Process, task_of


class MasterMoments(CoreMoments):
    """Moments of a master's decisions."""

    def __init__(self, process: Process, known: Known) -> None:
        super().__init__(process, known)
        #: Call -> (trainer, evaluation). The evaluation is empty for training data.
        self._callers: dict[int, tuple[str, str]] = {}
        self._seen: dict[str, dict[str, int]] = {"trainers": {}, "pservers": {}}

    def moments(self, name: str, event: Any, effects: Effects) -> Iterator[Moment]:
        if name == BEGUN:
            self.process.name = f"master {event['settings']['CoreSettings']['generation']}"
            yield self.moment("becomes the leader", JOB)
        elif name == "LeasesSeen":
            yield from self._leases(event)
        elif name == "Asked":
            ((kind, request),) = event["request"].items()
            if kind == "TasksTicket":
                yield from self._reported(event["call"], request)
            elif kind == "JoinRequest":
                self._callers[event["call"]] = request["trainer"], ""
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
                    yield self.moment(f"detects the loss of {one} {name} (generation {seen[name]})", subject)
                if name in now:
                    yield self.moment(f"detects {one} {name} (generation {now[name]})", subject)
            self._seen[kind] = now

    def _reported(self, call: int, ticket: Any) -> Iterator[Moment]:
        trainer, evaluation = self._callers[call] = ticket["trainer"], ticket["evaluation"]
        for kind in ("finished", "failed", "returned"):
            for report in ticket[kind]:
                attempt = report["attempt"]
                at = f", at batch {report['batch']}" if report.get("batch") is not None else ""
                by = f", acknowledged by generations {report['pservers']}" if report.get("pservers") else ""
                of = f" of evaluation {evaluation}" if evaluation else ""
                text = f"receives from {trainer}: attempt {attempt}{of} {kind}{at}{by}"
                yield self.moment(text, ("trainer", trainer), *self.known.work_of(evaluation, attempt))

    def _effect(self, kind: str, effect: Any) -> Iterator[Moment]:
        if kind == "Answer":
            ((reply_kind, reply),) = effect["reply"].items()
            trainer, evaluation = self._callers.pop(effect["call"], ("", ""))
            if trainer and reply_kind == "TasksReply":
                yield from self._answered(trainer, evaluation, reply)
            elif trainer and reply_kind == "JoinReply" and reply["member"]:
                yield self.moment(f"admits {trainer} as member {reply['member']}", ("trainer", trainer))
            elif trainer and reply_kind == "error":
                yield self.moment(f"rejects a request of {trainer}: {reply}", ("trainer", trainer))
        elif kind == "Note" and not effect["text"].startswith(_NOTES_OF_LEASES):
            yield self.moment(_text(effect), JOB)
        elif kind == "QueueNews":
            yield from self._news(effect["evaluation"], effect["effect"])
        elif kind == "DeleteElection":
            yield self.moment("requests new first values for the model", JOB)

    def _answered(self, trainer: str, evaluation: str, reply: Any) -> Iterator[Moment]:
        for given in reply["assignments"]:
            attempt, place = given["attempt"], (given["epoch"] + 1, given["task"])
            if not evaluation:
                self.known.attempts[attempt] = place
            task, name = task_of(evaluation, place)
            batches = f"batches {given['first_batch']} to {given['end_batch'] - 1} of {name}"
            yield self.moment(f"assigns attempt {attempt} to {trainer}: {batches}", ("trainer", trainer), task)
        for lost in reply["lost"]:
            attempt = lost["attempt"]
            work = self.known.work_of(evaluation, attempt)
            yield self.moment(f"tells {trainer} to drop attempt {attempt}", ("trainer", trainer), *work)

    def _news(self, evaluation: str, news: Any) -> Iterator[Moment]:
        ((kind, found),) = news.items()
        if kind == "EpochFinished":
            if evaluation:
                yield self.moment(f"completes evaluation {evaluation}", ("evaluation", evaluation))
            else:
                yield self.moment(f"completes epoch {found['epoch'] + 1}", JOB)
        elif kind == "Expired":
            given, trainer = found["assignment"], found["trainer"]
            task, name = task_of(evaluation, (given["epoch"] + 1, given["task"]))
            yield self.moment(f"revokes {name} from {trainer}, which took too long", task, ("trainer", trainer))
        elif kind == "Quarantined":
            piece = found["piece"]
            task, name = task_of(evaluation, (piece["epoch"] + 1, piece["task"]))
            batches = f"batches {piece['first_batch']} to {piece['end_batch'] - 1} of {name}"
            yield self.moment(f"quarantines {batches}: {piece['error']}", task)


#: Log messages that only repeat the moments from ``_leases``.
_NOTES_OF_LEASES = ("pserver registered", "pserver is gone", "trainer registered", "trainer is gone")


def _text(note: Any) -> str:
    try:
        return str(note["text"] % tuple(note["values"]))
    except (TypeError, ValueError):
        return f"{note['text']} {note['values']}"
