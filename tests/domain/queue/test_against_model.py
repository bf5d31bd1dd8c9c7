"""The task queue against a naive model: one state for every batch of every epoch.

The model knows nothing of positions, runs, cursors or attempts limits. It is told what the queue answered, and says
whether that was allowed; what the queue says of every task must be what the model has.
"""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flightedl.domain.queue.storage import progress_of
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import (
    AlreadyDone,
    EpochFinished,
    EpochsDone,
    Expired,
    FailedSelector,
    Finished,
    NoTaskNow,
    Quarantined,
    QueueSettings,
    TaskGiven,
)
from flightedl.errors import FencedError, FlightedlError

TRAINERS = ("a", "b", "c", "d")
HOLDING_LIMIT = 7

picks = st.integers(0, 100)


def batch_counts(task):
    return task % 4 + 1


class QueueAgainstModel(RuleBasedStateMachine):
    @initialize(
        tasks=st.one_of(st.integers(1, 12), st.just(60)),
        epochs=st.sampled_from([1, 2, 3]),
        shuffle=st.booleans(),
        limit=st.integers(1, 3),
        confirmations=st.integers(0, 1),
        follow=st.booleans(),
        is_deduplicated=st.booleans(),
    )
    def begin(self, tasks, epochs, shuffle, limit, confirmations, follow, is_deduplicated):
        self.settings = QueueSettings(
            task_count=tasks,
            batch_counts=batch_counts,
            epochs=epochs,
            seed=7,
            shuffle=shuffle,
            attempts_limit=limit,
            confirmations=confirmations,
            timeout_floor_s=5.0,
            follow=follow,
            is_deduplicated=is_deduplicated,
            stuck_after_s=20.0,
        )
        self.queue = TaskQueue(self.settings)
        self.now = 1000.0
        self.tasks = tasks
        self.is_following = follow
        self.epoch = 0
        #: (epoch, task, batch) -> todo, done, failed or dropped, or the set of attempts that hold it.
        self.model = {}
        #: Attempt -> (trainer, assignment), only for current ones.
        self.out = {}
        #: Attempt -> time since which it runs: it is the oldest of its trainer.
        self.running = {}
        #: Attempt -> time at which its trainer last reported a finished batch of it.
        self.progress = {}
        self.ended = []
        self.begin_epoch(tasks)

    def begin_epoch(self, tasks):
        first = max((task + 1 for epoch, task, _ in self.model if epoch == self.epoch), default=0)
        for task in range(first, tasks):
            for batch in range(batch_counts(task)):
                self.model[self.epoch, task, batch] = "todo"

    # the model's reaction to the queue's answers

    def batches_of(self, assignment):
        return [(assignment.epoch, assignment.task, b) for b in range(assignment.first_batch, assignment.end_batch)]

    def is_open(self, epoch):
        return any(isinstance(s, set) or s == "todo" for (e, _, _), s in self.model.items() if e == epoch)

    def lost(self, attempt):
        """A holder has lost its piece: batches that are not done are todo again, unless another trainer holds them."""
        _, assignment = self.out.pop(attempt)
        for batch in self.batches_of(assignment):
            if self.model[batch] != "done":
                self.model[batch].remove(attempt)
                if not self.model[batch]:
                    self.model[batch] = "todo"

    def holders_of(self, assignment):
        """Return the attempts that hold a piece."""
        return set().union(*(s for s in map(self.model.get, self.batches_of(assignment)) if isinstance(s, set)))

    def held_by(self, trainer):
        return sorted(attempt for attempt, (holder, _) in self.out.items() if holder == trainer)

    def note_running(self):
        """Record that a trainer has begun its oldest piece, if that has changed."""
        oldest = {self.held_by(trainer)[0] for trainer, _ in self.out.values()}
        self.running = {attempt: self.running.get(attempt, self.now) for attempt in sorted(oldest)}

    def whole_todo(self, epoch):
        """Return the number of tasks whose batches are all todo."""
        by_task = {}
        for (e, task, _), state in self.model.items():
            if e == epoch:
                by_task.setdefault(task, set()).add(state if isinstance(state, str) else "out")
        return sum(states == {"todo"} for states in by_task.values())

    def heed(self, effects, epoch_touched=None):
        """Check effects in their order."""
        for effect in effects:
            if isinstance(effect, Quarantined):
                piece = effect.piece
                assert piece.end_batch - piece.first_batch == 1
                batch = (piece.epoch, piece.task, piece.first_batch)
                assert self.model[batch] == "todo"
                self.model[batch] = "failed"
            elif isinstance(effect, EpochFinished):
                assert not self.is_open(effect.epoch)
                if effect.epoch == self.epoch:
                    assert not any(self.is_open(epoch) for epoch in range(self.epoch))
                    self.epoch += 1
                    if self.epoch < self.settings.epochs:
                        self.begin_epoch(self.tasks)
                self.ended.append(effect.epoch)

    def is_finished(self):
        """A piece whose batches are all noted as done is held until its trainer finishes it."""
        is_open = any(self.is_open(epoch) for epoch in range(self.epoch))
        return self.epoch == self.settings.epochs and not is_open and not self.out

    def is_alone(self, attempt, epoch):
        """True if no unsuspicious piece has a copy."""
        _, assignment = self.out[attempt]
        failures = self.queue.pending.find(attempt).piece.failures
        return (
            assignment.epoch == epoch
            and len(self.holders_of(assignment)) == 1
            and failures < self.settings.attempts_limit
        )

    # events

    @rule(trainer=st.sampled_from(TRAINERS), wait_s=st.floats(0, 3))
    def request(self, trainer, wait_s):
        self.now += wait_s
        holding = [a for a, (holder, _) in self.out.items() if holder == trainer]
        revision = self.queue.revision
        answer = self.queue.request(trainer, self.now, HOLDING_LIMIT)
        if isinstance(answer, EpochsDone):
            assert self.is_finished()
        elif isinstance(answer, NoTaskNow):
            assert answer.retry_after_s > 0
            assert not self.is_finished()
        else:
            given = answer.assignment
            assert len(holding) < HOLDING_LIMIT
            holders = {holder for holder, _ in self.out.values()}
            if len(holding) >= 2:
                # An equal share of the rest if tasks are short, otherwise half of a share of the unassigned tasks.
                todo, average_s, count = self.whole_todo(given.epoch), self.queue.average_s, len(holding)
                is_short = average_s is not None and average_s < 0.1 and count < 4
                is_share = is_short and count * len(holders) < todo + len(self.out)
                assert is_share or todo >= 2 * len(holders) * (count + 1), "enough for all others"
            assert given.attempt not in self.out
            assert given.batch_count == batch_counts(given.task)
            assert not any(self.is_open(epoch) for epoch in range(given.epoch)), "epochs are a barrier"
            for batch in self.batches_of(given):
                if answer.is_copy:
                    assert not holding
                    assert len(self.model[batch]) == 1
                    assert not self.model[batch] & set(holding)
                    self.model[batch] = self.model[batch] | {given.attempt}
                else:
                    assert self.model[batch] == "todo"
                    self.model[batch] = {given.attempt}
            self.out[given.attempt] = (trainer, given)
            if answer.is_copy and self.model[batch] & self.running.keys():
                others = {attempt for attempt in self.out if attempt not in self.running and attempt != given.attempt}
                assert not any(self.is_alone(other, given.epoch) for other in others), "waiting pieces are copied first"
        self.note_running()
        assert (self.queue.revision > revision) == isinstance(answer, TaskGiven)

    @precondition(lambda self: self.out)
    @rule(pick=picks, wait_s=st.floats(0, 3))
    def finish(self, pick, wait_s):
        self.now += wait_s
        attempt = sorted(self.out)[pick % len(self.out)]
        trainer, assignment = self.out[attempt]
        where = (assignment.epoch, assignment.position)
        with pytest.raises(FencedError):
            self.queue.finish("somebody else", *where, attempt, self.now)
        answer = self.queue.finish(trainer, *where, attempt, self.now)
        assert isinstance(answer, Finished)
        losers = self.holders_of(assignment) | {attempt}
        for batch in self.batches_of(assignment):
            assert self.model[batch] == "done" or attempt in self.model[batch]
            self.model[batch] = "done"
        for loser in losers:
            trainer, other = self.out.pop(loser)
            repeated = self.queue.finish(trainer, other.epoch, other.position, loser, self.now)
            assert repeated == AlreadyDone()
        self.heed(answer.effects)
        self.note_running()

    @precondition(lambda self: self.out)
    @rule(pick=picks, knows=st.booleans())
    def fail(self, pick, knows):
        attempt = sorted(self.out)[pick % len(self.out)]
        trainer, assignment = self.out[attempt]
        size = assignment.end_batch - assignment.first_batch
        batch = assignment.first_batch + pick % size if knows else None
        effects = self.queue.fail(
            trainer, assignment.epoch, assignment.position, attempt, self.now, error="\ud800 bad", batch=batch
        )
        self.lost(attempt)
        self.heed(effects)
        self.note_running()

    @precondition(lambda self: self.out)
    @rule(pick=picks)
    def give_back(self, pick):
        attempt = sorted(self.out)[pick % len(self.out)]
        trainer, assignment = self.out[attempt]
        effects = self.queue.give_back(trainer, assignment.epoch, assignment.position, attempt, self.now)
        self.lost(attempt)
        self.heed(effects)
        self.note_running()
        if not any(self.model[batch] == "todo" for batch in self.batches_of(assignment)):
            return
        with pytest.raises(FencedError):
            self.queue.finish(trainer, assignment.epoch, assignment.position, attempt, self.now)

    @rule(trainer=st.sampled_from(TRAINERS), is_graceful=st.booleans())
    def trainer_departed(self, trainer, is_graceful):
        effects = self.queue.trainer_departed(trainer, self.now, is_graceful)
        for attempt in self.held_by(trainer):
            self.lost(attempt)
        self.heed(effects)
        self.note_running()

    @rule(wait_s=st.floats(0, 15), progressed=st.sets(st.sampled_from(TRAINERS)))
    def tick(self, wait_s, progressed=()):
        self.now += wait_s
        self.note_running()
        timeout_s = self.queue.timeout_s
        self.progress |= {self.held_by(trainer)[0]: self.now for trainer in progressed if self.held_by(trainer)}
        since = self.running
        if self.queue.average_s is None or not self.settings.is_deduplicated:
            since = {attempt: max(began, self.progress.get(attempt, began)) for attempt, began in since.items()}
        late = {attempt for attempt, since_s in since.items() if self.now - since_s > timeout_s}
        for effect in self.queue.tick(self.now, progressed=progressed):
            if isinstance(effect, Expired):
                assert self.out[effect.assignment.attempt] == (effect.trainer, effect.assignment)
                late.remove(effect.assignment.attempt)
                for attempt in self.held_by(effect.trainer):
                    self.lost(attempt)
            else:
                self.heed([effect])
        assert not late, "no other piece expires: waiting pieces have no timeout"
        self.note_running()

    @precondition(lambda self: self.out)
    @rule(pick=picks, first=st.integers(0, 3), size=st.integers(1, 4))
    def note_done(self, pick, first, size):
        attempt = sorted(self.out)[pick % len(self.out)]
        trainer, assignment = self.out[attempt]
        self.queue.note_done(trainer, attempt, [(first, first + size)], self.now)
        self.note_running()
        if self.settings.is_deduplicated:
            return
        meant = [each for each in self.batches_of(assignment) if first <= each[2] < first + size]
        if any(self.model[each] != "done" for each in meant):
            self.progress[self.held_by(trainer)[0]] = self.now
        self.model.update(dict.fromkeys(meant, "done"))

    @precondition(lambda self: not self.settings.is_deduplicated)
    @rule()
    def declare_a_model(self):
        self.settings = replace(self.settings, is_deduplicated=True)
        self.queue.deduplicate()
        for attempt, (_, assignment) in self.out.items():
            self.model.update({batch: {attempt} for batch in self.batches_of(assignment)})

    @precondition(lambda self: self.settings.is_deduplicated)
    @rule(data=st.data())
    def reopen(self, data):
        epoch = data.draw(st.integers(0, self.epoch))
        if epoch == self.settings.epochs:
            return
        known = {task for e, task, _ in self.model if e == epoch}
        whole = data.draw(st.frozensets(st.sampled_from(sorted(known)))) if known else frozenset()
        rest = sorted(known - whole)
        parts = {}
        for task in data.draw(st.lists(st.sampled_from(rest), max_size=2, unique=True)) if rest else []:
            first = data.draw(st.integers(0, batch_counts(task) - 1))
            parts[task] = [(first, data.draw(st.integers(first + 1, batch_counts(task))))]
        meant = {(epoch, task, b) for task in whole for b in range(batch_counts(task))}
        meant |= {(epoch, task, b) for task, [(first, end)] in parts.items() for b in range(first, end)}
        done = {batch for batch in meant if self.model[batch] == "done"}
        count = self.queue.reopen(epoch, [(task, task + 1) for task in whole], parts)
        assert count == len({task for _, task, _ in done})
        self.model.update(dict.fromkeys(done, "todo"))

    @rule(more=st.integers(1, 3))
    def grow(self, more):
        if not self.is_following or self.epoch == self.settings.epochs:
            with pytest.raises(FlightedlError):
                self.queue.grow(self.tasks + more)
            return
        self.tasks += more
        self.queue.grow(self.tasks)
        self.begin_epoch(self.tasks)

    @precondition(lambda self: self.is_following)
    @rule()
    def end_growth(self):
        self.is_following = False
        self.heed(self.queue.end_growth())

    @precondition(lambda self: "failed" in self.model.values())
    @rule(data=st.data(), drops=st.booleans())
    def retry_or_drop(self, data, drops):
        failed = sorted(batch for batch, state in self.model.items() if state == "failed")
        epoch, task, batch = data.draw(st.sampled_from(failed))
        selector = data.draw(
            st.sampled_from([FailedSelector(), FailedSelector(epoch=epoch), FailedSelector(epoch, task, batch)])
        )
        meant = [
            key
            for key in failed
            if all(
                w is None or w == k for w, k in zip((selector.epoch, selector.task, selector.batch), key, strict=True)
            )
        ]
        action = self.queue.drop_failed if drops else self.queue.retry_failed
        assert action(selector) == len(meant)
        self.model.update(dict.fromkeys(meant, "dropped" if drops else "todo"))

    @rule(in_parts=st.booleans())
    def restart(self, in_parts):
        """Another master continues from the stored state, with another clock."""
        self.now = 5.0
        self.running = {}
        before = self.figures()
        stored = self.queue.encode_parts() if in_parts else (self.queue.encode(), None)
        self.settings = replace(self.settings, task_count=self.tasks)
        self.queue = TaskQueue.decode(stored[0], self.settings, stored[1])
        again = self.queue.encode_parts() if in_parts else (self.queue.encode(), None)
        assert again == stored
        assert self.figures() == before

    @rule(seed=st.integers(0, 2), shuffle=st.booleans())
    def resume(self, seed, shuffle):
        """A new master may change the shuffling of epochs that have not begun."""
        self.now = 5.0
        self.running = {}
        before, shuffled_by = self.figures(), self.settings.shuffled_by
        begun = [self.queue.seed_of(epoch) for epoch in range(self.queue.first_unbegun_epoch)]
        stored = self.queue.encode()
        self.settings = replace(self.settings, task_count=self.tasks, seed=seed, shuffle=shuffle)
        self.queue = TaskQueue.decode(stored, self.settings, may_reseed=True)
        assert self.figures() == before
        assert (self.queue.encode() == stored) == (self.settings.shuffled_by == shuffled_by)
        assert [self.queue.seed_of(epoch) for epoch in range(len(begun))] == begun
        assert self.queue.seed_of(len(begun)) == self.settings.shuffled_by

    def figures(self):
        queue = self.queue
        return (
            queue.counts(),
            tuple(queue.failed.details),
            queue.revision,
            queue.average_s,
            queue.timeout_s,
            queue.task_count,
        )

    @rule(epoch=st.integers(0, 3), position=st.integers(0, 15), attempt=st.integers(0, 400))
    def nonsense(self, epoch, position, attempt):
        """Reports of pieces that are not held change nothing."""
        if attempt in self.out:
            return
        before = self.queue.encode()
        for report in (self.queue.finish, self.queue.give_back):
            with suppress(FencedError):
                assert report("a", epoch, position, attempt, self.now) in (AlreadyDone(), ())
        assert self.queue.encode() == before
        # Except for the clocks, which are stopped after a restart until the first event.
        self.note_running()

    @rule(seed=st.integers(0, 2**32), failing=st.sampled_from([0, 1, 6]), wait_s=st.sampled_from([0.1, 1.0, 3.0]))
    def storm(self, seed, failing, wait_s):
        """Run many events, to get deep into an epoch; hypothesis' own histories are short."""
        chance = random.Random(seed)
        for _ in range(25):
            self.request(chance.choice(TRAINERS), chance.random() * wait_s)
            kinds = {"finish": 9, "fail": failing, "back": 1, "gone": failing, "tick": 1, "done": 3, "none": 6}
            kind = chance.choices([*kinds], [*kinds.values()])[0]
            if kind == "gone":
                self.trainer_departed(chance.choice(TRAINERS), is_graceful=False)
            elif kind == "tick":
                self.tick(wait_s)
            elif kind != "none" and self.out:
                pick = chance.randrange(100)
                if kind == "finish":
                    self.finish(pick, chance.random() * wait_s)
                elif kind == "fail":
                    self.fail(pick, knows=chance.random() < 0.5)
                elif kind == "done":
                    self.note_done(pick, chance.randrange(4), chance.randrange(1, 4))
                else:
                    self.give_back(pick)
            self.queue.check()

    # invariants

    @invariant()
    def is_out_once_without_a_model(self):
        if hasattr(self, "queue") and not self.settings.is_deduplicated:
            assert all(len(state) == 1 for state in self.model.values() if isinstance(state, set))

    @invariant()
    def agrees(self):
        if not hasattr(self, "queue"):
            return
        self.queue.check()
        assert self.queue.epoch == self.epoch
        assert self.queue.is_done == self.is_finished()
        assert self.queue.holders() == self.holders()
        states = {}
        for epoch, task in {key[:2] for key in self.model}:
            found = self.queue.batches(epoch, task)
            for state in ("todo", "pending", "done", "failed", "dropped"):
                for first, end in getattr(found, state):
                    states.update({(epoch, task, batch): state for batch in range(first, end)})
        wanted = {key: "pending" if isinstance(state, set) else state for key, state in self.model.items()}
        assert states == wanted
        for _, assignment in self.out.values():
            wanted.update(dict.fromkeys(self.batches_of(assignment), "pending"))
        self.check_counts(wanted)

    def check_counts(self, states):
        counts = self.queue.counts()
        epoch = min(self.epoch, self.settings.epochs - 1)
        tasks = {}
        for (e, task, _), state in states.items():
            if e == epoch:
                tasks.setdefault(task, set()).add(state)
        found = dict.fromkeys(("pending", "todo", "failed", "done"), 0)
        for task_states in tasks.values():
            found[next((state for state in found if state in task_states), "done")] += 1
        assert (counts.epoch, counts.total) == (epoch, len(tasks))
        assert {state: getattr(counts, state) for state in found} == found
        assert counts.failed_batches == list(states.values()).count("failed")
        assert counts.dropped_batches == list(states.values()).count("dropped")
        earlier = {key[:2] for key, state in states.items() if key[0] < epoch and state in ("todo", "pending")}
        assert counts.reopened == len(earlier)
        stored = progress_of(self.queue.encode())
        if stored[0] == counts.epoch:
            assert stored[1:] == (counts.done + counts.failed, counts.total)
        else:
            assert (stored[0], counts.todo) == (counts.epoch - 1, counts.total)

    def holders(self):
        held = {}
        for trainer, assignment in (self.out[attempt] for attempt in sorted(self.out)):
            held.setdefault(trainer, []).append(assignment)
        return {trainer: tuple(assignments) for trainer, assignments in held.items()}

    def teardown(self):
        """From any state, the queue comes to its end, with every batch done or failed."""
        if not hasattr(self, "queue"):
            return
        self.heed(self.queue.end_growth())
        self.is_following = False
        for _ in range(10_000):
            if self.queue.is_done:
                break
            for trainer in TRAINERS:
                self.request(trainer, 0.0)
                for attempt in [a for a, (holder, _) in self.out.items() if holder == trainer]:
                    _, assignment = self.out[attempt]
                    answer = self.queue.finish(trainer, assignment.epoch, assignment.position, attempt, self.now)
                    for batch in self.batches_of(assignment):
                        for loser in self.model[batch] if isinstance(self.model[batch], set) else (attempt,):
                            self.out.pop(loser, None)
                        self.model[batch] = "done"
                    self.heed(answer.effects)
                    self.note_running()
        self.agrees()
        assert self.queue.is_done
        assert set(self.ended) == set(range(self.settings.epochs))
        assert set(self.model.values()) <= {"done", "failed", "dropped"}


QueueAgainstModel.TestCase.settings = settings(max_examples=24, stateful_step_count=40, deadline=None)
TestQueueAgainstModel = QueueAgainstModel.TestCase
