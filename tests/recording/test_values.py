"""Encoding of events and effects as JSON."""

from __future__ import annotations

import json
import typing

import msgspec
import pytest

from flightedl.domain.checkpoint.values import MovePointer, Pointer, Sweep, WriteManifest
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.pserver import life_values
from flightedl.domain.queue.values import EpochFinished, QueueSettings
from flightedl.errors import CorruptError, JobFailedError, UnavailableError
from flightedl.messages.control import AppliedReply, AppliedRequest
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import FinishedTask, TasksTicket
from flightedl.recording.values import BatchCounts, encode, read, read_value, with_counts
from flightedl.recording.values import written as as_written

DECLARED = DeclaredDataset(
    index_hash="i",
    task_count=5,
    record_count=9,
    schema="",
    declaration=DatasetDeclaration(urls=["/d/*"], batch_size=4),
)


def written(value: object) -> object:
    return json.loads(encode(as_written(value)))


def again(event: object) -> object:
    (fields,) = msgspec.json.decode(encode(as_written(event)), type=dict[str, msgspec.Raw]).values()
    return read_value(type(event), fields)


@pytest.mark.parametrize(
    "event",
    [
        events.TimePassed(),
        events.LeasesSeen({"b": 2, "a": 1}, {1: 3, 0: 4}, 9),
        events.Asked(
            3,
            TasksTicket(
                trainer="a", generation=1, finished=[FinishedTask(epoch=0, position=1, attempt=2, pservers=[5])]
            ),
        ),
        events.Answered(0, 7, AppliedRequest(plan_hash="p"), AppliedReply(summary=b"\x00\xff")),
        events.StatusReceived([None]),
        life_values.Seen(life_values.Facts(loadable=range(2, 5), rejected=frozenset({3}))),
        life_values.CaughtUp(None),
    ],
)
def test_encoded_values_are_decoded_unchanged(event: object) -> None:
    assert again(event) == event


def test_the_order_of_a_mapping_is_preserved() -> None:
    seen = again(events.LeasesSeen({"b": 2, "a": 1}, {1: 3, 0: 4}, 9))
    assert isinstance(seen, events.LeasesSeen)
    assert [*seen.trainers] == ["b", "a"]
    assert [*seen.pservers] == [1, 0]


def test_every_event_has_a_decoder() -> None:
    for kind in (*typing.get_args(events.Event), *typing.get_args(life_values.Event)):
        with pytest.raises(CorruptError):
            read_value(kind, msgspec.Raw(b'"no event"'))


def test_values_of_a_union_name_their_class() -> None:
    assert written(out.StoreWork(WriteManifest(3), 5)) == {
        "StoreWork": {"work": {"WriteManifest": {"number": 3}}, "revision": 5}
    }
    assert written(out.StoreWork(Sweep(), 5)) == {"StoreWork": {"work": {"Sweep": {}}, "revision": 5}}
    pointer = written(out.StoreWork(MovePointer(Pointer(3, "c")), 5))
    assert typing.cast("dict[str, dict[str, object]]", pointer)["StoreWork"]["work"] != {"Sweep": {}}
    assert written(out.QueueNews("", EpochFinished(2))) == {
        "QueueNews": {"evaluation": "", "effect": {"EpochFinished": {"epoch": 2}}}
    }
    assert written(out.Answer(1, out.Done(), 2)) == {"Answer": {"call": 1, "reply": {"Done": {}}, "revision": 2}}


def test_an_error_is_encoded_as_its_class() -> None:
    answer = written(out.Answer(1, JobFailedError("a secret"), 0))
    assert answer == {"Answer": {"call": 1, "reply": {"error": "JobFailedError"}, "revision": 0}}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), UnavailableError("gone")], ids=repr)
def test_an_error_of_an_argument_keeps_its_class(error: BaseException) -> None:
    argument = msgspec.Raw(encode(as_written(error, lambda text: text)))
    assert type(read(BaseException, argument)) is type(error)


def test_sets_are_written_in_order() -> None:
    restore = life_values.Restore(range(1, 9), frozenset({5, 1, 3}))
    assert written(restore) == {"Restore": {"loadable": [1, 9], "rejected": [1, 3, 5]}}


def test_batch_counts_are_encoded_as_runs() -> None:
    counts = BatchCounts.of(lambda task: 1 if task < 3 else 2, 5)
    assert counts.runs == [(1, 3), (2, 2)]
    assert [counts(task) for task in range(5)] == [1, 1, 1, 2, 2]
    tasks = QueueSettings(5, lambda task: 1 + task // 4)
    read = again(with_counts(events.EvaluationIndexed("e", DECLARED, tasks)))
    assert isinstance(read, events.EvaluationIndexed)
    assert [read.tasks.batch_counts(task) for task in range(5)] == [1, 1, 1, 1, 2]
    joined = again(with_counts(events.FilesJoined(2, lambda _: 7)))
    assert isinstance(joined, events.FilesJoined)
    assert joined.batch_counts(1) == 7


def test_values_that_cannot_be_encoded_raise_an_error() -> None:
    with pytest.raises(TypeError, match="object cannot be recorded"):
        encode(as_written(out.Note("x", (object(),), out.Kind.DECLARED)))
