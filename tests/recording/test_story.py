"""The story of a batch, a task, a block or a trainer across all processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.pserver.block_values import Extent, Push, Pushed
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.domain.queue.values import QueueSettings
from flightedl.domain.trainer.batches import Batch as BatchAtHand
from flightedl.domain.trainer.feed import Feed
from flightedl.domain.trainer.first_values import Candidate, ElectionOfFirstValues
from flightedl.domain.trainer.steps import Next, Steps, carried_out
from flightedl.domain.trainer.transfers import Answer, AskAgain, KeepWaiting, Pull, Transfer
from flightedl.domain.trainer.transfers import Push as PushCall
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration
from flightedl.messages.parameters import Outcome
from flightedl.messages.tasks import FinishedTask, ReturnedTask, TasksReply, TasksTicket
from flightedl.recording.cores import CORES
from flightedl.recording.reader import recordings_in
from flightedl.recording.recorded import recorded
from flightedl.recording.replay import replay
from flightedl.recording.story import SOURCES, story, subject_of, text_of
from flightedl.recording.values import assignment_of
from flightedl.recording.writer import SUFFIX, Recorder


class Clock:
    """A clock that a test sets. Clocks of processes on different machines start at different times."""

    def __init__(self, wall_s: float = 100.0, ahead_s: float = 0.0) -> None:
        self.wall_s = wall_s
        self._ahead_s = ahead_s

    def now(self) -> float:
        return self.wall_s + self._ahead_s

    def wall_time(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


class Run:
    """Recorded processes, each with its own clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clocks: list[Clock] = []
        self.wall_s = 100.0

    def recorder(self, process: str) -> Recorder:
        clock = Clock(self.wall_s, ahead_s=10.0 * len(self.clocks))
        self.clocks.append(clock)
        path = self.directory / f"{process}-{len(self.clocks)}{SUFFIX}"
        path.touch()

        def write(line: bytes) -> None:
            with path.open("ab") as file:
                file.write(line)

        return Recorder(process, "1", "demo", clock, write, is_strict=True)

    def at(self, wall_s: float) -> None:
        self.wall_s = wall_s
        for clock in self.clocks:
            clock.wall_s = wall_s

    def lines(self, kind: str, identity: str) -> list[str]:
        found = story(recordings_in(self.directory), subject_of(kind, identity))
        return [f"{each.at - 100:g} {each.process}: {text_of(each)}" for each in found]

    def check(self) -> None:
        assert [each.difference for each in map(replay, recordings_in(self.directory))] == [None] * len(self.clocks)


class Pserver:
    """A pserver with blocks 2 to 4, in two spans."""

    def __init__(self, run: Run, mode: Mode) -> None:
        extents = [Extent(range(2, 4)), Extent(range(4, 5))]
        self.protocol = recorded(run.recorder("pserver"), {"pserver": 0, "generation": 7}, BlockProtocol, extents, mode)

    def view(self, serial: int, *members: tuple[str, int, int]) -> None:
        named = [ViewMember(trainer=t, generation=1, member=m, first_round=r) for t, m, r in members]
        self.protocol.apply_view(
            ViewRequest(plan_hash="p", master_generation=5, serial=serial, members=named, mode=None, switch_round=0)
        )

    def push(self, trainer: str, member: int, batch: Batch, base: int = 0) -> list[str]:
        pushed = Push(trainer, 1, member, [(batch, 1)])
        firsts = [span.numbers.start for span in self.protocol.spans]
        found = [self.protocol.push(first, pushed, base, has_gradient=True) for first in firsts]
        return [each.outcome.name for each in found if isinstance(each, Pushed)]


class Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def master_of(run: Run) -> Callable[[events.Event], list[TasksReply]]:
    recorder = run.recorder("master")
    clock = run.clocks[-1]
    declared = ModelDeclaration(parameters=[], optimizer={}, mode=Async().to_json())
    model = DeclaredModel(declaration=declared, pservers=1, plan_hash="p")
    core = recorded(
        recorder,
        {},
        MasterCore,
        CoreSettings(generation=5, pserver_count=1, keeps_checkpoints=False),
        clock.now(),
        StoredState(declaration=JobDeclaration(model=model)),
        QueueSettings(2, lambda _: 1),
    )

    def apply(event: events.Event) -> list[TasksReply]:
        effects = core.apply(event, clock.now())
        return [each.reply for each in effects if isinstance(getattr(each, "reply", None), TasksReply)]  # type: ignore[union-attr]

    return apply


def ticket(trainer: str, **more: object) -> TasksTicket:
    return TasksTicket(trainer=trainer, generation=1, wait_s=0.0, **more)  # type: ignore[arg-type]


def test_the_story_of_a_task_shows_that_another_trainer_finishes_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    master, pserver = master_of(run), Pserver(run, Async())
    feed = recorded(run.recorder("trainer"), {"trainer": "b", "evaluation": ""}, Feed, 0.0)
    master(events.LeasesSeen({"a": 1, "b": 1, "c": 1}, {0: 7}, 1))
    run.at(101)
    (reply,) = master(events.Asked(1, ticket("a", want=1)))
    (given,) = reply.assignments
    pserver.view(1, ("a", 1, 0), ("b", 2, 0))
    run.at(102)
    assert pserver.push("a", 1, Batch(0, given.task, 0)) == ["ACCEPTED", "ACCEPTED"]
    run.at(103)
    master(events.LeasesSeen({"b": 1, "c": 1}, {0: 7}, 2))
    run.at(103.5)
    master(events.LeasesSeen({"b": 1}, {0: 7}, 2))
    (reply,) = master(events.Asked(2, ticket("b", want=1)))
    run.at(104)
    ask = feed.next_step(run.clocks[-1].now())
    feed.answered(ask, reply, run.clocks[-1].now())  # type: ignore[arg-type]
    task = feed.begin()
    assert task is not None
    run.at(105)
    assert pserver.push("b", 2, Batch(0, given.task, 0)) == ["ALREADY_APPLIED", "ALREADY_APPLIED"]
    run.at(106)
    feed.finished(task, [7], run.clocks[-1].now())
    run.at(107)
    attempt = task.assignment.attempt
    done = FinishedTask(epoch=0, position=given.position, attempt=attempt, pservers=[7])
    master(events.Asked(3, ticket("b", want=0, finished=[done])))
    run.check()
    name = f"1/{given.task}"
    lines, acknowledged = run.lines("batch", f"{name}/0"), "acknowledges, as already applied,"
    assert lines == [
        f"1 master 5: assigns attempt {given.attempt} to a: batches 0 to 0 of task {name}",
        "1 pserver 0 (7): receives a view of a from round 0, b from round 0",
        f"2 pserver 0 (7): accepts a gradient from a for {name}/0 at blocks 2-4, base 0, member 1",
        f"2 pserver 0 (7): updates blocks 2-4 from version 0 to 1, with {name}/0",
        "3 master 5: detects the loss of trainer a (generation 1)",
        f"3.5 master 5: assigns attempt {attempt} to b: batches 0 to 0 of task {name}",
        f"4 trainer b: begins to read task {name}, attempt {attempt}",
        f"5 pserver 0 (7): {acknowledged} a gradient from b for {name}/0 at blocks 2-4, base 0, member 2",
        f"6 trainer b: completes task {name}",
        f"7 master 5: receives from b: attempt {attempt} finished, acknowledged by generations [7]",
    ]
    assert run.lines("task", name) == lines
    assert not any("trainer c" in line for line in lines), "the story of a task excludes events of others"
    assert [line for line in run.lines("trainer", "a") if "loss" in line] == [lines[4]]


def test_the_story_of_a_block_shows_its_rounds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pserver = Pserver(run, Sync())
    pserver.view(1, ("a", 1, 0), ("b", 2, 0))
    run.at(101)
    pserver.push("a", 1, Batch(1, 0, 0))
    assert pserver.push("c", 9, Batch(1, 3, 0)) == ["NOT_MEMBER", "NOT_MEMBER"]
    run.at(102)
    pserver.push("b", 2, Batch(1, 1, 0))
    run.at(103)
    pserver.view(2, ("a", 1, 0))
    run.check()
    assert run.lines("block", "3")[-4:] == [
        "1 pserver 0 (7): rejects, as not from a member, a gradient from c for 2/3/0 at blocks 2-3, base 0, member 9",
        "2 pserver 0 (7): accepts a gradient from b for 2/1/0 at blocks 2-3, base 0, member 2",
        "2 pserver 0 (7): updates blocks 2-3 from version 0 to 1, with 2/0/0, 2/1/0",
        "3 pserver 0 (7): receives a view of a from round 0",
    ]
    assert run.lines("batch", "2/0/0")[-1].startswith("2 pserver 0 (7): updates blocks 2-4")
    assert run.lines("batch", "9/9/9") == []


def test_a_span_that_is_split_and_copied_replays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pserver = Pserver(run, Async())
    pserver.view(1, ("a", 1, 0))
    cut, _ = pserver.protocol.begin_cut(None)
    assert pserver.protocol.copy(cut, 3) is not None
    pserver.protocol.split(2, [range(2, 3), range(3, 4)])
    push = Push("a", 1, 1, [(Batch(0, 0, 0), 1)])
    assert pserver.protocol.prepare(2, push, 0, has_gradient=True).copies
    pserver.protocol.push(2, push, 0, has_gradient=True)
    assert pserver.protocol.copy(cut, 4) is not None
    pserver.protocol.end_cut(cut)
    pserver.protocol.set_task_counts([(0, 4)])
    run.check()
    assert any("at block 2," in line for line in run.lines("block", "2"))
    assert not any("0/0/0" in line or "1/0/0" in line for line in run.lines("block", "3"))


def test_the_story_of_a_task_shows_its_return(tmp_path: Path) -> None:
    run = Run(tmp_path)
    master = master_of(run)
    master(events.LeasesSeen({"a": 1}, {}, 1))
    (reply,) = master(events.Asked(1, ticket("a", want=2)))
    given = reply.assignments[0]
    back = ReturnedTask(epoch=0, position=given.position, attempt=given.attempt)
    master(events.Asked(2, ticket("a", want=0, returned=[back])))
    assert f"receives from a: attempt {given.attempt} returned" in run.lines("task", f"1/{given.task}")[-1]


@pytest.mark.parametrize(
    ("kind", "identity"), [("batch", "3/17"), ("task", "3"), ("block", "a"), ("pserver", "1"), ("task", "3/-1")]
)
def test_a_story_requires_a_known_subject(kind: str, identity: str) -> None:
    with pytest.raises(UsageError, match="use batch"):
        subject_of(kind, identity)


class Script:
    """A trainer's steps, with planned answers of pservers."""

    def __init__(self, run: Run, mode: Mode) -> None:
        recorder = run.recorder("trainer")
        self.steps = recorded(recorder, {"trainer": "a"}, Steps, [[0, 1], [2, 3]], mode)
        self.election = recorded(recorder, {}, ElectionOfFirstValues, "a", 2)

    def open(self, number: int, *, joins: bool = False) -> None:
        if joins:
            self.carry_out(self.steps.joined(6, None))
        self.carry_out(self.steps.open_batch(BatchAtHand(0, 1, 7, number, 4, 2), 6, 1))

    def carry_out(self, step: Next, *outcomes: Outcome, having: bytes = b"") -> None:
        """Carry out effects. Each pserver answers pushes with the planned outcomes in order."""
        planned = list(outcomes)

        def perform(effect: object) -> None:
            for index, first in enumerate(effect.calls if isinstance(effect, Transfer) else ()):
                verdict = self.steps.handle_answers(effect.serial, index, 0, [], NotReadyError("nobody is there"))
                call = first if isinstance(verdict, AskAgain) else None
                while call is not None:
                    blocks = sorted(call.blocks if isinstance(call, PushCall) else call.wanted)
                    outcome = (
                        (planned.pop(0) if planned else Outcome.ACCEPTED)
                        if isinstance(call, PushCall)
                        else Outcome.NONE
                    )
                    version = call.wanted[blocks[0]] if isinstance(call, Pull) else None
                    answer = Answer(blocks[0], blocks[-1] + 1, outcome, version, having)
                    verdict = self.steps.handle_answers(effect.serial, index, 20 + index, [answer])
                    call = verdict.call if isinstance(verdict, KeepWaiting) else None

        carried_out(self.steps, step, perform)


def test_the_story_of_a_batch_shows_pushes_and_answers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    script = Script(run, Sync())
    script.open(0)
    run.at(101)
    script.carry_out(script.steps.step(), Outcome.ACCEPTED, Outcome.STALE)
    script.carry_out(script.steps.close_batch())
    run.at(102)
    script.open(0, joins=True)
    script.carry_out(script.steps.step(), Outcome.ALREADY_APPLIED)
    script.carry_out(script.steps.close_batch())
    run.check()
    lines = run.lines("batch", "1/1/0")
    assert lines == [
        "1 trainer a: has a gradient of 1/1/0",
        "1 trainer a: cannot find pserver 0: NotReadyError",
        "1 trainer a: pushes 1/1/0 to blocks 0-1 of pserver 0 (20), at version 0: accepted",
        "1 trainer a: receives blocks 0-1 from pserver 0 (20) at version 1",
        "1 trainer a: cannot find pserver 1: NotReadyError",
        "1 trainer a: pushes 1/1/0 to blocks 2-3 of pserver 1 (21), at version 0: rejected as stale",
        "1 trainer a: must compute 1/1/0 again",
        "2 trainer a: has a gradient of 1/1/0",
        "2 trainer a: cannot find pserver 0: NotReadyError",
        "2 trainer a: pushes 1/1/0 to blocks 0-1 of pserver 0 (20), at version 0: already applied",
        "2 trainer a: receives blocks 0-1 from pserver 0 (20) at version 1",
        "2 trainer a: cannot find pserver 1: NotReadyError",
        "2 trainer a: pushes 1/1/0 to blocks 2-3 of pserver 1 (21), at version 0: accepted",
        "2 trainer a: receives blocks 2-3 from pserver 1 (21) at version 1",
        "2 trainer a: settles 1/1/0",
    ]
    of_block = run.lines("block", "3")
    assert of_block == [line for line in run.lines("trainer", "a") if "2-3" in line]
    assert "2 trainer a: receives blocks 2-3 from pserver 1 (21) at version 0" in of_block, "as it joins"


def test_the_story_of_a_sum_names_its_batches(tmp_path: Path) -> None:
    run = Run(tmp_path)
    script = Script(run, Async(push_every=2))
    for batch in range(2):
        script.open(batch)
        script.steps.add(["w"])
        script.carry_out(script.steps.step(), Outcome.ACCEPTED, Outcome.PARTLY_APPLIED, having=b"\x01")
        script.carry_out(script.steps.close_batch())
    run.check()
    lines = [line for line in run.lines("batch", "1/1/0") if "receives" not in line and "cannot find" not in line]
    assert lines == [
        "0 trainer a: has a gradient of 1/1/0 and accumulates it",
        "0 trainer a: pushes the sum of 1/1/0, 1/1/1",
        "0 trainer a: pushes 1/1/0, 1/1/1 to blocks 0-1 of pserver 0 (20), at version 0: accepted",
        "0 trainer a: pushes 1/1/0, 1/1/1 to blocks 2-3 of pserver 1 (21), at version 0: rejected, partly applied",
        "0 trainer a: settles 1/1/0",
    ]
    assert "0 trainer a: must compute 1/1/1 again" in run.lines("task", "1/1")


def test_the_story_of_an_evaluation_shows_its_tasks(tmp_path: Path) -> None:
    run = Run(tmp_path)
    feed = recorded(run.recorder("trainer"), {"trainer": "a", "evaluation": "late"}, Feed, 0.0)
    ask = feed.next_step(run.clocks[-1].now())
    feed.answered(ask, TasksReply(assignments=[assignment_of(0, 3, 1, 2)], outcome=""), run.clocks[-1].now())  # type: ignore[arg-type]
    task = feed.begin()
    assert task is not None
    feed.finished(task, [], run.clocks[-1].now(), {"loss": (1.0, 2.0)})
    run.check()
    assert run.lines("evaluation", "late") == [
        "0 trainer a: begins its part of evaluation late",
        "0 trainer a: begins to evaluate task 3 of evaluation late, attempt 1",
        "0 trainer a: completes task 3 of evaluation late",
    ]
    assert run.lines("task", "1/3") == []


def test_the_story_of_a_model_shows_whose_first_values_it_gets(tmp_path: Path) -> None:
    run = Run(tmp_path)
    script = Script(run, Sync())
    for happens in (
        lambda election: election.key_read(None),
        lambda election: election.creation_attempted(),
        lambda election: election.key_read(Candidate("a", False, 9, 9)),
        lambda election: election.uploaded(20, 2, 2),
        lambda election: election.uploaded(21, 2, 2),
        lambda election: election.confirmed(12),
    ):
        script.election.next_step()
        happens(script.election)
    script.election.next_step()
    run.check()
    assert run.lines("trainer", "a") == [
        "0 trainer a: stands for the election of first values",
        "0 trainer a: sends first values to pserver 0, election 9",
        "0 trainer a: sends first values to pserver 1, election 9",
        "0 trainer a: confirms that the model has the first values of election 9",
        "0 trainer a: uses the model of election 9",
    ]


def test_every_recorded_kind_of_core_has_moments() -> None:
    assert SOURCES.keys() == CORES.keys()
