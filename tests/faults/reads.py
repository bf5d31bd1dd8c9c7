"""Checks of what a job's processes read, from their recordings and from the logs of ``reading_ledger``.

* The versions of a block that a trainer receives from one process of a pserver never decrease.
* Values belong to their version: all trainers that have a version of a block from one process have the same values.
* A name of ``job.once`` has one holder at a time: once a claim has been observed, no earlier claim is observed as held.
* The queue is a register: no attempt is given to two trainers or for two pieces of work, also by different masters.
  Work whose report was accepted is assigned again only if a pserver has been replaced or the audit has found it
  missing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flightedl.messages.decoding import builtins_from_json
from flightedl.recording.reader import ReadRecord, Recording, recordings_in
from flightedl.recording.values import BEGUN


class Received(NamedTuple):
    """A trainer received a version of some blocks from one process of a pserver, by the trainer's clock."""

    at: float
    generation: int
    begin: int
    end: int
    version: int


def findings(recordings: Path, logs: Path) -> list[str]:
    """Return a sentence for each error in the recordings of a job and in the logs of its trainers."""
    found = recordings_in(recordings)
    trainers = {each.path.name: list(received(each)) for each in found if each.header.process == "trainer"}
    pids = {name.split("-")[-1].split(".")[0]: reads for name, reads in trainers.items()}
    lines = {file.stem: [json.loads(line) for line in whole_lines(file)] for file in sorted(logs.glob("*.reads"))}
    return [
        *(text for name, reads in trainers.items() for text in backward_versions(name, reads)),
        *different_values({pid: (pids.get(pid, []), logged) for pid, logged in lines.items()}),
        *two_holders([line for logged in lines.values() for line in logged if "name" in line]),
        *queue_errors(found),
    ]


def whole_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file, without a last line that a killed process has not completed."""
    text = file.read_text("utf-8")
    yield from text[: text.rfind("\n") + 1].splitlines()


def received(recording: Recording) -> Iterator[Received]:
    """Yield what the trainer of a recording received."""
    for _, record in recording.records():
        if record.name == "handle_answers" and record.core.startswith("steps-"):
            event = builtins_from_json(record.fields)
            for begin, end, _, version, *_ in event["answers"]:
                if version is not None:
                    yield Received(record.at, event["generation"], begin, end, version)


def backward_versions(trainer: str, reads: Iterable[Received]) -> Iterator[str]:
    """Yield a sentence for each version of a block that is lower than an earlier one from the same process."""
    newest: dict[tuple[int, int], int] = {}
    for each in reads:
        for block in range(each.begin, each.end):
            known = newest.get((each.generation, block), 0)
            if each.version < known:
                yield (
                    f"{trainer} received block {block} at version {each.version} from generation {each.generation}, "
                    f"after version {known}"
                )
            newest[each.generation, block] = each.version


def different_values(trainers: Mapping[str, tuple[list[Received], list[Any]]]) -> Iterator[str]:
    """Yield a sentence for each version of a parameter with different values.

    Args:
        trainers: Trainer -> what it received, and the lines of its log.
    """
    #: Parameter with the source and version of each of its blocks -> (digest, trainer).
    seen: dict[tuple[str, tuple[tuple[int, int], ...]], tuple[str, str]] = {}
    for trainer, (reads, lines) in trainers.items():
        current: dict[int, Received] = {}
        left = iter(reads)
        following = next(left, None)
        for line in (line for line in lines if "digests" in line):
            while following is not None and following.at <= line["at"]:
                current.update(dict.fromkeys(range(following.begin, following.end), following))
                following = next(left, None)
            for name, digest in line["digests"].items():
                sources = [current[block] for block in range(*line["blocks"][name]) if block in current]
                if min((each.version for each in sources), default=-1) != line["versions"][name]:
                    # The end of a killed trainer's recording is missing.
                    continue
                versions = tuple((each.generation, each.version) for each in sources)
                known, other = seen.setdefault((name, versions), (digest, trainer))
                if known != digest:
                    yield f"trainers {other} and {trainer} have different values of {name!r} at {versions}"


def two_holders(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each name that was observed as held by an earlier claim after a later claim was observed."""
    by_name: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_name[line["name"]].append(line)
    for name, known in by_name.items():
        ended: list[tuple[float, int]] = sorted((line["ended"], line["generation"]) for line in known)
        newest, place = 0, 0
        for line in sorted(known, key=lambda each: each["began"]):
            while place < len(ended) and ended[place][0] < line["began"]:
                newest = max(newest, ended[place][1])
                place += 1
            if line["generation"] < newest:
                yield f"{name} was held by claim {line['generation']} after claim {newest} had been seen"


class Piece(NamedTuple):
    """A piece of work as an attempt names it."""

    trainer: str
    epoch: int
    position: int
    first: int
    end: int

    def overlaps(self, other: Piece) -> bool:
        """True if both contain the same batch."""
        is_same_task = (self.epoch, self.position) == (other.epoch, other.position)
        return is_same_task and max(self.first, other.first) < min(self.end, other.end)


class QueueHistory:
    """What the masters told the trainers about the training data.

    A master records an assignment before its state is stored. If it dies before that, the trainer never receives the
    assignment, and another master may give the attempt to somebody else. So assignments count as the trainers received
    them.
    """

    def __init__(self) -> None:
        #: (attempt, piece) of each received assignment, in any order.
        self.given: list[tuple[int, Piece]] = []
        #: (time, attempt) of each acknowledged report.
        self.finished: list[tuple[float, int]] = []
        #: (attempt, trainer) -> time at which a master decided to assign it.
        self.decided: dict[tuple[int, str], float] = {}
        #: Times at which finished work may have been lost.
        self.losses: list[float] = []

    def read_master(self, at: float, record: ReadRecord, callers: dict[int, str]) -> None:
        """Read a record of a master. ``callers`` are the trainers of its calls."""
        event, effects = builtins_from_json(record.fields), builtins_from_json(record.effects)
        if record.name == "Asked" and "TasksTicket" in event["request"]:
            callers[event["call"]] = event["request"]["TasksTicket"]["trainer"]
        for each in effects:
            if "Note" in each and each["Note"]["kind"] in _MAY_LOSE_WORK:
                self.losses.append(at)
            elif "Answer" in each and "TasksReply" in each["Answer"]["reply"]:
                for given in each["Answer"]["reply"]["TasksReply"]["assignments"]:
                    self.decided[given["attempt"], callers.get(each["Answer"]["call"], "")] = at

    def read_feed(self, at: float, record: ReadRecord, trainer: str) -> None:
        """Read a record of a trainer's feed of training data."""
        if record.name != "answered":
            return
        event = builtins_from_json(record.fields)
        reply, ask = event["reply"]["TasksReply"], event["ask"]["Ask"]
        for each in reply["assignments"]:
            piece = Piece(trainer, each["epoch"], each["position"], each["first_batch"], each["end_batch"])
            self.given.append((each["attempt"], piece))
        lost = {each["attempt"] for each in reply["lost"]}
        self.finished += [(at, each["attempt"]) for each in ask["reports"]["finished"] if each["attempt"] not in lost]

    def errors(self) -> Iterator[str]:
        """Yield a sentence for each error."""
        pieces: dict[int, Piece] = {}
        for attempt, piece in self.given:
            if pieces.setdefault(attempt, piece) != piece:
                yield f"attempt {attempt} was given as {tuple(pieces[attempt])} and as {tuple(piece)}"
        for at, attempt in self.finished:
            done = pieces.get(attempt)
            for later, piece in pieces.items() if done is not None else ():
                decided = self.decided.get((later, piece.trainer), 0.0)
                is_new = later != attempt and decided > at and piece.overlaps(done)
                if is_new and not any(at - _SLACK_S <= loss <= decided for loss in self.losses):
                    yield f"attempt {later} was given for {tuple(piece)} although attempt {attempt} had finished it"


#: Kinds of notes after which finished work may be assigned again.
_MAY_LOSE_WORK = frozenset({"pserver_settled", "work_lost", "values_lost"})
#: A loss may be noted this long before the trainer receives the answer to its report.
_SLACK_S = 5.0


def queue_errors(recordings: Iterable[Recording]) -> Iterator[str]:
    """Yield a sentence for each error in what the masters told about the queue."""
    history = QueueHistory()
    for recording in recordings:
        header = recording.header
        callers: dict[int, str] = {}
        #: Feed of training data -> its trainer.
        feeds: dict[str, str] = {}
        for _, record in recording.records():
            at, kind = header.wall_s + record.at - header.clock_s, record.core.rpartition("-")[0]
            if kind == "master":
                history.read_master(at, record, callers)
            elif kind == "feed" and record.name == BEGUN:
                about = builtins_from_json(record.fields)["about"]
                if not about["evaluation"]:
                    feeds[record.core] = about["trainer"]
            elif record.core in feeds:
                history.read_feed(at, record, feeds[record.core])
    yield from history.errors()
