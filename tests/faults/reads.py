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
from flightedl.recording.moments import BEGUN
from flightedl.recording.reader import ReadRecord, Recording, recordings_in


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
        *queue_errors(each for each in found if each.header.process == "master"),
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


class QueueHistory:
    """The assignments and accepted reports that masters have told, in the order of their times."""

    def __init__(self) -> None:
        #: Attempt -> (trainer, epoch, position, first batch, end batch).
        self.given: dict[int, tuple[str, int, int, int, int]] = {}
        #: (epoch, position) -> attempts that finished since the last time at which work may have been lost.
        self.finished: dict[tuple[int, int], list[int]] = {}
        self._callers: dict[tuple[str, int], Any] = {}

    def read(self, master: str, record: ReadRecord) -> Iterator[str]:
        """Read a record of a master, and yield its errors."""
        event, effects = builtins_from_json(record.fields), builtins_from_json(record.effects)
        if record.name == BEGUN:
            self._callers = {key: each for key, each in self._callers.items() if key[0] != master}
        elif record.name == "Asked" and "TasksTicket" in event["request"]:
            ticket = event["request"]["TasksTicket"]
            if not ticket["evaluation"]:
                self._callers[master, event["call"]] = ticket
        is_lost = any(each["Note"]["kind"] in _MAY_LOSE_WORK for each in effects if "Note" in each)
        for each in effects:
            if "Answer" in each and "TasksReply" in each["Answer"]["reply"]:
                ticket = self._callers.pop((master, each["Answer"]["call"]), None)
                if ticket is not None:
                    yield from self._answered(ticket, each["Answer"]["reply"]["TasksReply"])
        if is_lost:
            self.finished.clear()

    def _answered(self, ticket: Any, reply: Any) -> Iterator[str]:
        lost = {each["attempt"] for each in reply["lost"]}
        for given in reply["assignments"]:
            attempt, place = given["attempt"], (given["epoch"], given["position"])
            piece = (ticket["trainer"], *place, given["first_batch"], given["end_batch"])
            if self.given.setdefault(attempt, piece) != piece:
                yield f"attempt {attempt} was given as {self.given[attempt]} and as {piece}"
            for other in self.finished.get(place, ()):
                _, _, _, first, end = self.given.get(other, ("", 0, 0, 0, 0))
                if attempt > other and max(first, given["first_batch"]) < min(end, given["end_batch"]):
                    yield f"attempt {attempt} was given for {place} although attempt {other} had finished it"
        for report in ticket["finished"]:
            if report["attempt"] not in lost:
                self.finished.setdefault((report["epoch"], report["position"]), []).append(report["attempt"])


#: Kinds of notes after which finished work may be assigned again.
_MAY_LOSE_WORK = frozenset({"pserver_settled", "work_lost", "values_lost"})


def queue_errors(masters: Iterable[Recording]) -> Iterator[str]:
    """Yield a sentence for each error in what the masters told about the queue."""
    records = [
        (master.header.wall_s + record.at - master.header.clock_s, master.path.name, record)
        for master in masters
        for _, record in master.records()
    ]
    queue = QueueHistory()
    for _, name, record in sorted(records, key=lambda each: each[0]):
        yield from queue.read(name, record)
