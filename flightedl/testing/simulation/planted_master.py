"""Bugs planted in what a master decides: work, members, checkpoints, recovery, evaluations. See ``planted``."""

from __future__ import annotations

from flightedl.testing.simulation.planted import Planted, answers, bug, drops, rewrites, swaps

_QUEUE = "domain.queue.tasks:TaskQueue."
_STATE = "domain.queue.state:QueueState."
_WORK = "domain.master.work:Work."
_PSERVERS = "domain.master.pservers:Pservers."
_MEMBERS = "domain.master.members:Members."
_MEMBERSHIP = "domain.consistency.membership:Membership."
_CHECKPOINTS = "domain.checkpoint.checkpoints:Checkpoints."
_RECOVERY = "domain.recovery.replay:PserverRecovery."
_EVALUATIONS = "domain.master.evaluations:Evaluations."
_AFTER_FAILURE = "domain.queue.bisection:after_failure"

MASTER_BUGS: dict[str, Planted] = {
    "no generation check": bug(
        "reports of work that a past process of a pserver acknowledged count", answers(f"{_PSERVERS}counts", "True")
    ),
    "stale completion accepted": bug(
        "a report under an old attempt closes whatever is there now",
        rewrites(
            f"{_QUEUE}finish",
            "pending = self._held(trainer, generation, epoch, position, attempt)",
            """
            there = [] if self.pending.find(attempt) is not None else list(self.pending.at(epoch, position))
            pending = there[0] if there else self._held(trainer, generation, epoch, position, attempt)
            attempt = pending.holders[0].attempt if there else attempt
            """,
        ),
    ),
    "nothing is reopened": bug("what a pserver lost is not dispatched again", answers(f"{_PSERVERS}_reopen", "0")),
    "only this epoch is reopened": bug(
        "... but only what it lost of the present epoch",
        swaps(f"{_PSERVERS}_reopen", "in lacking.items()", "in lacking.items() if epoch == queue.epoch"),
    ),
    "a stopped job is torn": bug(
        "a job that was stopped ends while some blocks lack what others have", answers(f"{_PSERVERS}_claim_torn", "0")
    ),
    "a stopped job forgets": bug(
        "a job that was stopped ends without what was done and lost",
        swaps(
            f"{_STATE}next_epoch",
            "min({*self.due, *self.pending.epochs}, default=None)",
            "self.pending.lowest_epoch",
        ),
    ),
    "results of a former life are served": bug(
        "a model that begins anew is told what was measured of the one before",
        answers("domain.recovery.lives:PresentLife.enter", "False"),
        answers(f"{_EVALUATIONS}begin_anew"),
    ),
    "done before settled": bug(
        "all is said to be done before it is known what a new pserver process has",
        answers("domain.master.ending:Ending._may_end", "work is not None and work.queue.is_over"),
    ),
    "delete before publish": bug(
        "old checkpoints are deleted when the next one is ordered",
        rewrites(
            "domain.master.checkpointing:Checkpointing.perform",
            "self._outbox.wake(index)",
            "self._outbox.wake(index)\nself._outbox.effects.append(StoreWork(Sweep(), 0))",
        ),
        rewrites(
            f"{_CHECKPOINTS}deletable",
            "",
            """
            if (end := self.under_way) is not None:
                numbers = ((name, manifests.number_of(name)) for name in sorted(names))
                return tuple(name for name, number in numbers if number is not None and number < end)
            """,
        ),
    ),
    "only the lost ones begin anew": bug(
        "first values are elected again while some pservers keep grown ones, and go on with them",
        swaps(
            "domain.recovery.reinitialization:next_step",
            "RestartServers(having) if having",
            "Reinitialize(election, {}) if having",
        ),
        rewrites("domain.pserver.life:PserverLife._look", "", "if self.is_serving:\n    return ()"),
        rewrites("domain.pserver.life:PserverLife._begin_first_values", "", "if self.is_serving:\n    return ()"),
    ),
    "a member before all have agreed": bug(
        "a trainer is a member as soon as a view with it is made",
        swaps(f"{_MEMBERSHIP}member_id_of", "member is not None and member.is_admitted", "member is not None"),
    ),
    "idle members are waited for": bug(
        "a trainer without work stays a member", answers("domain.master.training:Training.should_leave", "False")
    ),
    "the dead are waited for": bug("a trainer whose lease has ended stays a member", answers(f"{_MEMBERS}leave")),
    "a lost view is forgotten": bug(
        "a view that may not have arrived is not sent again", answers(f"{_MEMBERS}view_lost")
    ),
    "new members begin in the past": bug(
        "a trainer is admitted at a round that may have closed without it", answers(f"{_MEMBERSHIP}_first_round", "0")
    ),
    "an epoch ends early": bug(
        "an epoch is over while a trainer still has a task of it",
        rewrites(
            f"{_STATE}is_complete",
            "",
            """
            counts = self.counts()
            if not self.is_past_last and counts.todo == 0 and counts.pending == 1 and counts.total > 1:
                return True
            """,
        ),
    ),
    "views before they are stored": bug(
        "pservers hear of members that a successor does not know",
        swaps("domain.master.control:PserverControl.next_call", "view, revision=revision)", "view)"),
    ),
    "any answer admits": bug(
        "a pserver's answer to a view from before counts for a member that was not in it",
        swaps(f"{_MEMBERSHIP}_has_answered", ">= serial", "> 0"),
    ),
    "nobody joins again": bug(
        "members are not proposed again when a pserver has lost rounds", answers(f"{_MEMBERSHIP}rejoin", "[]")
    ),
    "a manifest that failed is written": bug(
        "the pointer moves although the manifest could not be written",
        answers(f"{_CHECKPOINTS}manifest_failed", 'self.manifest_written(number, "0" * 64)'),
    ),
    "only the first pserver is compared": bug(
        "a report counts that names a past process of another pserver than the first",
        swaps(f"{_RECOVERY}accepts", "enumerate(pservers)", "enumerate(pservers[:1])"),
    ),
    "settled unasked": bug(
        "a new process of a pserver counts before it has said what it has",
        answers(f"{_RECOVERY}is_settled", "index in self._known"),
    ),
    "the present epoch is not reopened": bug(
        "what a pserver lacks of the epoch that goes on is not done again",
        swaps(f"{_RECOVERY}announced", "(summary, begun_epochs,", "(summary, begun_epochs - 1,"),
    ),
    "answered before it is stored": bug(
        "a trainer is given work that a successor does not know of",
        rewrites(
            "domain.master.core:MasterCore.apply",
            "return self._outbox.take()",
            """
            from dataclasses import replace
            effects = self._outbox.take()
            return [replace(each, revision=0) if isinstance(each, out.Answer) else each for each in effects]
            """,
        ),
    ),
    "the last checkpoint is not waited for": bug(
        "all is said to be done before a checkpoint has all of it", answers(f"{_CHECKPOINTS}is_over", "True")
    ),
    "an older state is gone on from": bug(
        "a master goes on from the state of an etcd that was restored from an older backup",
        answers("domain.recovery.store_history:older_than", '""'),
    ),
    "what is promised counts as done": bug(
        "the tasks that trainers were promised of the next epoch are not handed out when it begins",
        drops(f"{_QUEUE}_advance", "self.waiting.put_run(self.epoch, 0, count, 0)"),
    ),
    "a promise is kept twice": bug(
        "a task that a trainer was promised waits for others after it was given",
        rewrites(
            f"{_QUEUE}_take",
            "piece = self.waiting.take_whole(epoch, position)",
            """
            piece = self.waiting.take_whole(epoch, position)
            if piece is not None:
                self.waiting.put_run(epoch, position, position + 1, piece.failures)
            """,
        ),
    ),
    "the middle batch is dropped": bug(
        "of a failing piece that is halved, the first batch of the second half is in neither",
        swaps(_AFTER_FAILURE, "(middle, end, limit)", "(middle + 1, end, limit)"),
    ),
    "what follows a failing batch is dropped": bug(
        "of a piece that is split around a failing batch, what is behind it is not handed out again",
        swaps(_AFTER_FAILURE, ", (batch + 1, end, limit - 1)]", "]"),
    ),
    "a failing piece is set aside whole": bug(
        "a piece that fails too often is not narrowed down",
        swaps(_AFTER_FAILURE, "if start < stop", "if not start < stop"),
    ),
    "nothing is ever set aside": bug(
        "a batch that nobody can train is handed out for ever",
        swaps(_AFTER_FAILURE, "if piece.failures < limit + confirmations else ()", "if True else ()"),
    ),
    "the batch before is set aside too": bug(
        "what is set aside is one batch longer than what failed",
        swaps(
            "domain.queue.failed:FailedPieces.quarantine",
            "piece.position), piece.first_batch,",
            "piece.position), max(piece.first_batch - 1, 0),",
        ),
    ),
    "a task that failed is left out of later epochs": bug(
        "a task with a batch that was set aside is not trained in the epochs that follow",
        rewrites(
            f"{_QUEUE}_take",
            "if piece is not None:",
            """
            if piece and any(e < epoch and at == piece.position for (e, at), _ in self.failed.failed):
                return self._take(epoch, trainer, is_idle)
            if piece is not None:
            """,
        ),
    ),
    "attempts are numbered again": bug(
        "a new master gives out numbers that its predecessor has given out",
        rewrites(
            "domain.queue.storage:restore",
            "_restore_pieces(state, dispatch)",
            """
            _restore_pieces(state, dispatch)
            state.next_attempt = 1 + max((h.attempt for each in state.pending for h in each.holders), default=0)
            """,
        ),
    ),
    "only the first stretch is reopened": bug(
        "of what a pserver lacks, only the first tasks in a row are done again",
        swaps(
            "domain.queue.reopening:reopen", "_checked(state, epoch, tasks,", "_checked(state, epoch, list(tasks)[:1],"
        ),
    ),
    "what waits is lost with its trainer": bug(
        "of a trainer that is gone only what it was at goes back",
        rewrites(
            f"{_QUEUE}trainer_gone",
            "now = self._time(now)",
            """
            now = self._time(now)
            for attempt, pending in tuple(self.pending.held_by(trainer).items())[1:]:
                place, generation = pending.piece, self.registrations()[trainer]
                self.finish(trainer, place.epoch, place.position, attempt, now, generation=generation)
            """,
        ),
    ),
    "metrics of a copy are added": bug(
        "the metrics of a piece that is reported again are added up again",
        rewrites(
            f"{_WORK}take_reports",
            "answer = take(finished, queue.finish)",
            """
            answer = take(finished, queue.finish)
            if self._evaluation and not isinstance(answer, Finished):
                self._finished.append(finished.metrics)
            """,
        ),
    ),
    "metrics are not stored": bug(
        "a new master goes on with an evaluation's queue, and without its sums",
        rewrites(
            f"{_EVALUATIONS}encode",
            "return encode(",
            """
            from msgspec.structs import replace
            known = [one if one.is_done else replace(one, sums={}) for one in known]
            return encode(
            """,
        ),
    ),
    "an evaluation is resumed as if done": bug(
        "a checkpoint has what an evaluation has come to as its result",
        rewrites(
            f"{_EVALUATIONS}encode_results",
            "done = [each.record for each in self._known.values() if each.is_done]",
            """
            from msgspec.structs import replace
            done = [replace(each.stored(), is_done=True) for each in self._known.values()]
            """,
        ),
    ),
    "an evaluation ends early": bug(
        "an evaluation is over when its last piece is handed out",
        swaps(f"{_EVALUATIONS}settle", "found.work.queue.is_done", "not found.work.queue.counts().todo"),
    ),
    "what the dead evaluate is not taken back": bug(
        "an evaluation waits for ever for a trainer that died",
        answers(f"{_EVALUATIONS}trainer_gone"),
        answers(f"{_EVALUATIONS}tick", "False"),
        swaps(
            f"{_WORK}forget_the_dead",
            "alive.get(name) != generation]",
            "alive.get(name) != generation and not self._evaluation]",
        ),
    ),
    "tasks weigh the same": bug(
        "the result of an evaluation is the mean of the tasks, however many records each has",
        swaps(
            "domain.master.evaluations:Evaluation.add",
            "(known[0] + total, known[1] + weight)",
            "(known[0] + total / weight, known[1] + 1.0)",
        ),
    ),
}
