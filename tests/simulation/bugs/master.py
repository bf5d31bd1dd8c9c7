"""Bugs in the decisions of masters (work, members, checkpoints, recovery, evaluations)."""

from __future__ import annotations

from tests.support.planting import Planted, answers, bug, drops, rewrites, swaps

_SCHEDULE = "domain.master.deterministic_schedule:DeterministicSchedule."
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
    "one broken stream is a death": bug(
        "a process is presumed dead when one of its connections breaks",
        swaps("domain.master.presence:_Streams.has_broken", "not self.open", "len(self.open) < self.wanted"),
    ),
    "a deadline is a death": bug(
        "a process whose streams end at their deadlines is presumed dead",
        drops("domain.master.presence:Presences.ended", "known.is_judged &= is_broken"),
    ),
    "records are excluded in one order only": bug(
        "a record that kills ranks is excluded only from epochs with the order in which it was found",
        swaps("domain.groups.incarnation:excluded", "elif its_epoch == epoch:", "elif False:"),
    ),
    "no generation check": bug(
        "reports count although an earlier process of a pserver acknowledged the work",
        answers(f"{_PSERVERS}counts", "True"),
    ),
    "stale completion accepted": bug(
        "a report under an old attempt closes the current attempt",
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
    "a suspect is left to nobody": bug(
        "a suspect piece waits for a trainer that is no witness although there is none",
        answers("domain.queue.blame:Blame.leaves", "True"),
    ),
    "nothing is reopened": bug("work that a pserver lost is not repeated", answers(f"{_PSERVERS}_reopen", "0")),
    "only this epoch is reopened": bug(
        "of the work that a pserver lost, only the current epoch's is repeated",
        swaps(f"{_PSERVERS}_reopen", "in lacking.items()", "in lacking.items() if epoch == queue.epoch"),
    ),
    "a deterministic run repeats nothing": bug(
        "the schedule of a deterministic run ignores tasks that were lost or returned",
        swaps(f"{_SCHEDULE}pieces_for", "queue.has_todo", "queue.cursor < queue.epoch_size(queue.epoch)"),
    ),
    "a stopped job is torn": bug(
        "a stopped job ends while some blocks lack batches that others have", answers(f"{_PSERVERS}_claim_torn", "0")
    ),
    "a stopped job forgets": bug(
        "a stopped job ends without repeating work that was lost",
        swaps(
            f"{_STATE}next_epoch",
            "min({*self.due, *self.pending.epochs}, default=None)",
            "self.pending.lowest_epoch",
        ),
    ),
    "results of a former life are served": bug(
        "a model that starts over gets the evaluation results of the model before",
        answers("domain.recovery.lives:PresentLife.enter", "False"),
        answers(f"{_EVALUATIONS}reinitialize"),
    ),
    "done before settled": bug(
        "the job is reported as done before a new pserver process has reported its batches",
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
        "first values are elected again while some pservers keep and use trained values",
        swaps(
            "domain.recovery.reinitialization:next_step",
            "RestartServers(having) if having",
            "Reinitialize(election, {}) if having",
        ),
        rewrites("domain.pserver.life:PserverLife._look", "", "if self.is_serving:\n    return ()"),
        rewrites("domain.pserver.life:PserverLife._begin_first_values", "", "if self.is_serving:\n    return ()"),
    ),
    "a member before all have agreed": bug(
        "a trainer is a member before all pservers have accepted it",
        swaps(f"{_MEMBERSHIP}member_id_of", "member is not None and member.is_admitted", "member is not None"),
    ),
    "idle members are waited for": bug(
        "a trainer without work stays a member", answers("domain.master.training:Training.should_leave", "False")
    ),
    "the dead are waited for": bug("a trainer whose lease has ended stays a member", answers(f"{_MEMBERS}leave")),
    "a lost view is forgotten": bug(
        "a view whose delivery is unknown is not sent again", answers(f"{_MEMBERS}view_lost")
    ),
    "new members begin in the past": bug(
        "a trainer is admitted at a round that may have closed without it", answers(f"{_MEMBERSHIP}_first_round", "0")
    ),
    "an epoch ends early": bug(
        "an epoch ends while a trainer still holds one of its tasks",
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
        "pservers get members that a successor of the master does not know",
        swaps("domain.master.control:PserverControl.next_call", "view, revision=revision)", "view)"),
    ),
    "any answer admits": bug(
        "a pserver's answer to an older view admits a member that was not in that view",
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
        "a report counts although it names an earlier process of a pserver other than the first",
        swaps(f"{_RECOVERY}accepts", "accepts(pservers, placement)", "accepts(pservers[:1], placement)"),
    ),
    "settled unasked": bug(
        "a new pserver process counts as settled before it has reported its batches",
        answers(f"{_RECOVERY}is_settled", "index in self._known"),
    ),
    "the present epoch is not reopened": bug(
        "batches of the current epoch that a pserver lacks are not repeated",
        swaps(f"{_RECOVERY}announced", "(summary, begun_epochs,", "(summary, begun_epochs - 1,"),
    ),
    "answered before it is stored": bug(
        "a trainer gets work that a successor of the master does not know",
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
        "the job is reported as done before a checkpoint has everything", answers(f"{_CHECKPOINTS}is_over", "True")
    ),
    "an older state is gone on from": bug(
        "a master continues from an etcd that was restored from an older backup",
        answers("domain.recovery.store_history:older_than", '""'),
    ),
    "what is promised counts as done": bug(
        "tasks that were promised to trainers for the next epoch are never assigned",
        drops(f"{_QUEUE}_advance", "self.waiting.put_run(self.epoch, 0, count, 0)"),
    ),
    "a promise is kept twice": bug(
        "a promised task still waits for other trainers after it was assigned",
        rewrites(
            f"{_QUEUE}_next_piece",
            "piece = self.waiting.take_complete(epoch, position)",
            """
            piece = self.waiting.take_complete(epoch, position)
            if piece is not None:
                self.waiting.put_run(epoch, position, position + 1, piece.failures)
            """,
        ),
    ),
    "the middle batch is dropped": bug(
        "when a failing piece is halved, the first batch of the second half is lost",
        swaps(_AFTER_FAILURE, "(middle, end, limit)", "(middle + 1, end, limit)"),
    ),
    "what follows a failing batch is dropped": bug(
        "when a piece is split around a failing batch, the batches after it are lost",
        swaps(_AFTER_FAILURE, ", (batch + 1, end, limit - 1)]", "]"),
    ),
    "a failing piece is set aside whole": bug(
        "a piece that fails too often is not narrowed down",
        swaps(_AFTER_FAILURE, "if start < stop", "if not start < stop"),
    ),
    "nothing is ever set aside": bug(
        "a batch that cannot be trained is never quarantined",
        swaps(_AFTER_FAILURE, "if piece.failures < limit + confirmations else ()", "if True else ()"),
    ),
    "the batch before is set aside too": bug(
        "the batch before a failed one is quarantined, too",
        swaps(
            "domain.queue.failed:FailedPieces.quarantine",
            "piece.position), piece.first_batch,",
            "piece.position), max(piece.first_batch - 1, 0),",
        ),
    ),
    "a task that failed is left out of later epochs": bug(
        "a task with a quarantined batch is not trained in later epochs",
        rewrites(
            f"{_QUEUE}_next_piece",
            "if piece is None and avoided:",
            """
            if piece and any(e < epoch and at == piece.position for (e, at), _ in self.failed.failed):
                return self._next_piece(epoch, trainer, now, avoided, is_idle)
            if piece is None and avoided:
            """,
        ),
    ),
    "attempts are numbered again": bug(
        "a new master uses attempt numbers of its predecessor again",
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
        "of the tasks that a pserver lacks, only the first run is repeated",
        swaps(
            "domain.queue.reopening:reopen", "_checked(state, epoch, tasks,", "_checked(state, epoch, list(tasks)[:1],"
        ),
    ),
    "what waits is lost with its trainer": bug(
        "only the running task of a lost trainer is assigned again",
        rewrites(
            f"{_QUEUE}trainer_departed",
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
        "the metrics of a piece that is reported twice are added twice",
        rewrites(
            f"{_WORK}apply_reports",
            "answer = take(finished, queue.finish)",
            """
            answer = take(finished, queue.finish)
            if self._evaluation and not isinstance(answer, Finished):
                self._finished.append(finished.metrics)
            """,
        ),
    ),
    "metrics are not stored": bug(
        "a new master continues an evaluation without its sums",
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
        "a checkpoint stores the sums of an unfinished evaluation as its result",
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
        "an evaluation ends when its last piece is assigned",
        swaps(f"{_EVALUATIONS}settle", "found.work.queue.is_done", "not found.work.queue.counts().todo"),
    ),
    "what the dead evaluate is not taken back": bug(
        "an evaluation waits forever for a trainer that died",
        answers(f"{_EVALUATIONS}trainer_departed"),
        answers(f"{_EVALUATIONS}tick", "False"),
        swaps(
            f"{_WORK}forget_the_dead",
            "alive.get(name) != generation]",
            "alive.get(name) != generation and not self._evaluation]",
        ),
    ),
    "tasks weigh the same": bug(
        "the result of an evaluation is the mean over tasks instead of records",
        swaps(
            "domain.master.evaluations:Evaluation.add",
            "(known[0] + total, known[1] + weight)",
            "(known[0] + total / weight, known[1] + 1.0)",
        ),
    ),
}
