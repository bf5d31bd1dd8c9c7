"""Bugs in the decisions of trainers."""

from __future__ import annotations

from tests.support.planting import Planted, answers, bug, drops, rewrites, swaps

_FEED = "domain.trainer.feed:Feed."
_LOOP = "domain.trainer.readings:BatchLoop."
_READING = "domain.trainer.readings:Reading."
_BATCH = "domain.trainer.batches:CurrentBatch."
_SUMS = "domain.trainer.sums:BatchSums."
_TRANSFER = "domain.trainer.transfers:TransferState."

TRAINER_BUGS: dict[str, Planted] = {
    "what is promised is trained": bug(
        "a trainer works on tasks of the next epoch when it may read them",
        swaps(
            f"{_FEED}answered",
            "for assignment in reply.assignments:",
            "for assignment in reply.assignments + reply.ahead:",
        ),
    ),
    "first values on one pserver": bug(
        "the election is done when the first pserver has the values",
        swaps("domain.trainer.first_values:ElectionOfFirstValues.uploaded", "< self._pserver_count", "< 1"),
    ),
    "the old model is trained on": bug(
        "a trainer continues after the model has started over",
        answers("domain.trainer.first_values:FollowedElection.require_same"),
    ),
    "the first batch of a refused sum is lost": bug(
        "the batches that a block lacks of a sum are pushed again, except the sum's first batch",
        swaps(f"{_TRANSFER}_apply_answer", "1 + len(current.pushed.others))", "1 + len(current.pushed.others))[1:]"),
    ),
    "an unknown outcome counts as settled": bug(
        "a push without an answer is not sent again",
        rewrites(
            f"{_TRANSFER}handle",
            "shard = self.shards[index]",
            """
            from flightedl.errors import OutcomeUnknownError

            shard = self.shards[index]
            if isinstance(error, OutcomeUnknownError):
                answers = [*answers, *(Answer(block, block + 1, Outcome.ACCEPTED) for block in sorted(shard.pushes))]
            """,
        ),
    ),
    "a refused push counts as settled": bug(
        "a gradient that came too late, or from a non-member, is not computed again",
        rewrites(
            f"{_TRANSFER}_apply_answer",
            "blocks = range(answer.begin, answer.end)",
            """
            blocks = range(answer.begin, answer.end)
            outcome = Outcome.ACCEPTED if outcome in _TOO_LATE and shard.pushes else outcome
            """,
        ),
    ),
    "a batch settles when the first pserver has answered": bug(
        "a batch settles although one of the pservers has not answered",
        swaps(
            f"{_TRANSFER}handle",
            "if shard.must_repeat or",
            "if (error and self.pushes and any(not each.pushes for each in self.shards)) or shard.must_repeat or",
        ),
    ),
    "a sum that failed counts as taken": bug(
        "a sum whose push failed halfway is not repeated",
        rewrites(
            f"{_SUMS}push_failed",
            "",
            """
            for member in self._group.clear():
                member.waits = False
            return
            """,
        ),
    ),
    "a batch that failed arrives all the same": bug(
        "a batch whose push failed halfway arrives without its gradient at the other blocks",
        answers(f"{_BATCH}push_failed"),
    ),
    "sums of an old mode": bug(
        "a trainer continues in its old mode after a change",
        swaps("domain.trainer.membership:TrainerMembership.join_answered", "mode if is_new else None", "None"),
    ),
    "what is told again goes on where it was": bug(
        "an attempt that is assigned twice continues the first reading, the rest of which was dropped",
        answers(f"{_FEED}is_held", "task.assignment.attempt in self._held"),
        rewrites(f"{_FEED}ask_failed", "", "self._held.clear()\nself._ready.clear()"),
        answers(f"{_READING}is_settled", "True"),
        answers(f"{_FEED}check"),
    ),
    "the first batches are dropped": bug(
        "a task is reported as finished although its first batches were skipped",
        rewrites(
            f"{_LOOP}accept",
            "self._reading = Reading(item.task)",
            """
            is_next = self._reading is not None
            self._reading = Reading(item.task)
            if is_next and not isinstance(item, TaskEnd | ReadFailure):
                return _NEED_ITEM
            """,
        ),
        answers(f"{_READING}is_settled", "self.task.assignment.end_batch - 1 in self._settled"),
    ),
    "an answer that comes too late is forgotten": bug(
        "tasks assigned to a loop that was left are neither held nor returned",
        drops(f"{_FEED}answered", "self._return(reply.assignments)"),
    ),
    "work of an old registration is kept": bug(
        "tasks of an earlier registration are held under the new one", answers(f"{_FEED}registered_again")
    ),
    "a denial is about everything": bug(
        "a denied join for one attempt drops all tasks",
        rewrites(
            f"{_FEED}hand_back",
            "",
            """
            self._held.clear()
            self._ready.clear()
            """,
        ),
    ),
    "reported before the sum is pushed": bug(
        "a task is reported as finished while its last batches wait in the trainer",
        rewrites(
            f"{_LOOP}_settle",
            "",
            """
            for handed in reading.handed if self._is_at_end else ():
                state = handed.state
                handed.state = BatchState(state.reading, state.number, generations=state.generations)
            """,
        ),
    ),
    "done before ack": bug(
        "a rejected batch counts as settled",
        rewrites(
            f"{_LOOP}_settle",
            "",
            """
            for handed in reading.handed:
                if handed.state.must_repeat:
                    state = handed.state
                    handed.state = BatchState(state.reading, state.number, generations=state.generations)
            """,
        ),
    ),
    "newest generation is reported": bug(
        "a trainer reports the newest generations of pservers instead of those that acknowledged",
        swaps(f"{_TRANSFER}_apply_answer", "min(generation", "max(generation"),
        swaps(f"{_BATCH}note_sum", "min(generation", "max(generation"),
        swaps(f"{_READING}settle", "min(generation", "max(generation"),
    ),
    "a refused sum counts as taken": bug(
        "a trainer does not push again the batches that a block lacks of a sum",
        swaps(f"{_SUMS}settle", "settle(refusals,", "settle((),"),
    ),
    "a lost sum counts as taken": bug(
        "a sum that was pushed after the end of the membership is not repeated",
        swaps(
            "domain.exactly_once.accumulation:BatchGroup.settle",
            "return Settled((), (members,))",
            "return Settled(tuple(members), ())",
        ),
    ),
    "what is lost is begun": bug(
        "a task that the master took away is still read",
        swaps(
            f"{_FEED}_lose",
            "deque(task for task in self._ready if task.assignment.attempt in self._held)",
            "deque(self._ready)",
        ),
    ),
    "a part is divided by itself": bug(
        "batches that a block lacks of a mean are divided by their own records when pushed again",
        swaps(f"{_SUMS}_repeat", "self._divisors if self._keeps_shares else {}", "{}"),
    ),
    "divided by the batches": bug(
        "the mean of several batches is divided by their number instead of their records",
        swaps(f"{_SUMS}take", ", self._divisors", ", dict.fromkeys(self._divisors, len(members))"),
    ),
    "records of the sum before": bug(
        "the records of a sum are also counted in the next one", drops(f"{_SUMS}begin", "self._weights = {}")
    ),
    "divided by all records": bug(
        "a parameter is divided also by the records of batches that have no gradient for it",
        swaps(f"{_SUMS}take", ", self._divisors", ", dict.fromkeys(self._divisors, self._weight)"),
    ),
}
