"""A simulated program's loop over its data: the product's feed and loop, and a reader that reads ahead."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.trainer.feed import Ask, AssignedTask, Feed, Over, Rest, WaitForEvent
from flightedl.domain.trainer.readings import (
    BatchDone,
    BatchLoop,
    Finished,
    GiveUpSum,
    HandBack,
    HandOut,
    Item,
    LoopStep,
    NeedItem,
    PushSum,
    ReadBatch,
    ReadFailure,
    TaskEnd,
    Unreadable,
)
from flightedl.errors import DataError
from flightedl.messages.tasks import TasksReply
from flightedl.recording.recorded import recorded
from tests.simulation.cores.world import Action, Violation

if TYPE_CHECKING:
    from tests.simulation.cores.trainer import Trainer

#: Number of items that are read ahead of the loop body.
_AHEAD = 4
_UNREADABLE_SHARE = 0.002
_SLOW_SHARE = 0.05


class Loop:
    """A loop over the training data or an evaluation, until the program leaves it or everything is done."""

    def __init__(self, trainer: Trainer, cover_s: float, evaluation: str = "") -> None:
        self.evaluation = evaluation
        self.trainer = trainer
        self.world = trainer.world
        self.feed = recorded(trainer.recorder, {"trainer": trainer.name, "evaluation": evaluation}, Feed, cover_s)
        self.steps: BatchLoop = recorded(trainer.recorder, {"trainer": trainer.name}, BatchLoop)
        #: The batch on which the loop body is working.
        self.at: HandOut | None = None
        self.is_left = False
        #: True if the loop's feed has nothing more to report.
        self.is_over = False
        self._items: deque[Item] = deque()
        #: The task that is being read, and its next batch.
        self._reads: tuple[AssignedTask, int] | None = None
        self._is_reading = False
        self._needs_item = False
        self._is_asking = False
        self._timer = 0
        #: Attempt -> generation of the registration to which it was assigned.
        self._assigned_to: dict[int, int] = {}
        #: The latest epoch that has begun, according to a master.
        self._begun_epoch = 0

    def begin(self) -> None:
        self._pump()
        self._go()

    # the feed

    def registered_again(self) -> None:
        self.feed.registered_again()
        self._pump()

    def _pump(self) -> None:
        """Do the work of the feed's thread after a change."""
        self.feed.check()
        if self._is_asking or self.is_over:
            return
        self._timer += 1
        step = self.feed.next_step(self.world.now)
        while isinstance(step, Rest):
            step = self.feed.next_step(self.world.now)
        if isinstance(step, Ask):
            self._ask(step)
        elif isinstance(step, WaitForEvent):
            if not math.isinf(step.at):
                timer = self._timer
                delay_s = max(step.at - self.world.now, 1e-6)
                self.trainer.later(delay_s, lambda: self._pump() if timer == self._timer else None)
        else:
            assert isinstance(step, Over)
            self.is_over = True
            self.trainer.feed_over(self)
        self._read()

    def _ask(self, ask: Ask) -> None:
        self._is_asking = True
        generation = self.trainer.generation
        for attempt in ask.holding:
            if self._assigned_to.get(attempt) != generation:
                raise Violation(f"{self.trainer} holds attempt {attempt} of its earlier registration")

        def answered(reply: TasksReply | Exception) -> None:
            self._is_asking = False
            if isinstance(reply, TasksReply):
                self._handle_reply(ask, reply)
            else:
                self.feed.ask_failed(reply, self.world.now)
                if self.feed.error is not None and not self.is_left:
                    self.trainer.end(f"its feed ended with {self.feed.error}")
                    return
            self._pump()
            if self._needs_item and self.feed.is_done:
                self._go()

        self.trainer.ask_master(ask, answered, self.evaluation)

    def _handle_reply(self, ask: Ask, reply: TasksReply) -> None:
        self._begun_epoch = max(self._begun_epoch, reply.epoch)
        for assignment in reply.assignments:
            self._assigned_to[assignment.attempt] = self.trainer.generation
        self.feed.answered(ask, reply, self.world.now)
        assigned = {assignment.attempt for assignment in reply.assignments}
        held = {task.assignment.attempt for task in self.feed.held}
        if lost := assigned - held - self.feed.reports.attempts:
            raise Violation(f"{self.trainer} was assigned {lost}, and neither holds nor returns these attempts")

    # the reader

    def _read(self) -> None:
        if self.is_left or self._is_reading or len(self._items) >= _AHEAD:
            return
        if self._reads is None:
            if (task := self.feed.begin()) is None:
                return
            self._reads = (task, task.assignment.first_batch)
        self._is_reading = True
        random = self.trainer.own
        longest_s = 1.0 if random.random() < _SLOW_SHARE and self.world.are_faults_on else 0.02
        self.trainer.later(longest_s * random.random(), self._was_read)

    def _was_read(self) -> None:
        self._is_reading = False
        if self.is_left or self._reads is None:
            return
        task, number = self._reads
        if number == task.assignment.end_batch:
            self._items.append(TaskEnd(task))
            self._reads = None
        elif (is_deadly := self.trainer.cluster.shape.faulty.get((task.assignment.task, number))) is not None:
            if is_deadly:
                self.trainer.end(f"batch {number} of task {task.assignment.task} kills it")
                return
            self._items.append(ReadFailure(task, number, DataError("it cannot be decoded")))
            self._reads = None
        elif self.world.are_faults_on and self.trainer.own.random() < _UNREADABLE_SHARE * self.trainer.fault_scale:
            self.world.fault("unreadable")
            self._items.append(ReadFailure(task, number, DataError("it cannot be read")))
            self._reads = None
        else:
            self._items.append(ReadBatch.of(task, number, self._records(task, number)))
            self._reads = (task, number + 1)
        if self._needs_item:
            self._go()
        self._read()

    def _records(self, task: AssignedTask, number: int) -> int:
        given = task.assignment
        return self.trainer.cluster.shape.records_of(Batch(given.epoch, given.task, number))

    # the body

    def _go(self) -> None:
        """Run the loop until it has to wait."""
        self.at = None
        if self._needs_item:
            self._need_item()
        else:
            self._do(self.steps.next_step(self.trainer.worker.take_changes()))

    def _do(self, step: LoopStep) -> None:
        """Carry out one step of the loop, and all further steps that need no waiting."""
        while not self.is_left and self.trainer.is_alive:
            self.steps.check()
            match step:
                case NeedItem():
                    self._need_item()
                    return
                case HandOut():
                    self._open(step)
                    return
                case PushSum():
                    self.trainer.push_sum(self._guarded(self._go))
                    return
                case GiveUpSum():
                    self.trainer.give_up_sum()
                case Unreadable(failure):
                    self.feed.failed(failure.task, str(failure.error), failure.number, self.world.now)
                case Finished(task, pservers, placement):
                    self.feed.finished(task, pservers, self.world.now, placement=placement)
                case HandBack(task):
                    self._hand_back(task)
                case BatchDone(task, number):
                    self.feed.batch_done(task, number)
            self._pump()
            step = self.steps.next_step(self.trainer.worker.take_changes())

    def _hand_back(self, task: AssignedTask) -> None:
        others = [each for each in self.feed.held if each != task]
        self.feed.hand_back(task, self.world.now)
        if lost := [each.assignment.attempt for each in others if not self.feed.is_held(each)]:
            raise Violation(f"{self.trainer} gives up {lost} together with another task")

    def _need_item(self) -> None:
        self._needs_item = False
        while self._items:
            item = self._items.popleft()
            self._read()
            if self.feed.is_held(item.task):
                self._do(self.steps.accept(item))
                return
        if self.feed.is_done and self._reads is None:
            self.trainer.all_done(self)
        else:
            self._needs_item = True

    def _guarded(self, then: Action) -> Action:
        return lambda: None if self.is_left else then()

    def _open(self, handed: HandOut) -> None:
        task, batch = handed.task, handed.batch

        def denied() -> None:
            step = self.steps.denied(batch)
            if step != HandBack(task):
                raise Violation(f"{self.trainer} was denied {batch}, and does {step}")
            self._do(step)

        if handed.is_again and not self.feed.is_held(task):
            denied()
            return
        if batch.epoch > self._begun_epoch:
            raise Violation(f"{self.trainer} works on {batch}, of an epoch that has not begun")

        def opened() -> None:
            self.at = handed
            self.trainer.work(batch, self._guarded(self._go))

        self.trainer.open_batch(batch, self._guarded(opened), self._guarded(denied))

    def go_on(self) -> None:
        self._go()

    # the end

    def leave(self) -> None:
        """Leave the loop because of a break or an error. The current task is returned unless it is reported soon."""
        if not self.is_left:
            self.is_left = True
            self.feed.retire(None if self.at is None else self.at.task, self.world.now)
            self._pump()

    def fail(self) -> None:
        if self.at is not None:
            self.feed.failed(self.at.task, "it raised", self.at.batch.number, self.world.now, "a.py:1")
            self._pump()

    def close(self) -> None:
        self.is_left = True
        self.feed.close()
        self._pump()
