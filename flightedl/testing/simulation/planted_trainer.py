"""Bugs planted in what a trainer decides; see ``planted``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from flightedl.domain.exactly_once.accumulation import BatchGroup, Settled
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.feed import Feed
from flightedl.domain.trainer.first_values import Confirm, ElectionOfFirstValues, FollowedElection, Upload
from flightedl.domain.trainer.membership import Joined, TrainerMembership
from flightedl.domain.trainer.readings import BatchLoop, Handed, ReadBatch, Reading
from flightedl.domain.trainer.sums import BatchSums
from flightedl.domain.trainer.transfers import AskAgain, Over, ShardTransfer
from flightedl.errors import FlightedlError, OutcomeUnknownError
from flightedl.messages.parameters import Outcome
from flightedl.messages.tasks import JoinReply

Original = Callable[..., Any]
#: Name -> what goes wrong, and (class, method, original -> what takes its place).
TrainerBugs = dict[str, tuple[str, tuple[tuple[type, str, Callable[[Original], Original]], ...]]]


def _nothing(_original: Original) -> Original:
    return lambda *_arguments, **_more: None


def _by_attempt(_original: Original) -> Original:
    return lambda self, task: task.assignment.attempt in self._held


def _forgets_with_the_answer(original: Original) -> Original:
    """What is neither held nor handed back is told again, under the same number."""

    def ask_failed(self: Feed, error: Exception, now: float) -> None:
        original(self, error, now)
        self._held.clear()
        self._ready.clear()

    return ask_failed


def _drops_everything(_original: Original) -> Original:
    def denied(self: BatchLoop[Any], handed: Handed[Any]) -> None:
        handed.current.must_repeat = True
        feed = self._feed.feed  # type: ignore[attr-defined]
        for task in feed.held:
            feed._held.pop(task.assignment.attempt)  # noqa: SLF001 - as the feed itself would
        feed._ready.clear()  # noqa: SLF001 - likewise

    return denied


def _only_the_last_counts(_original: Original) -> Original:
    return property(lambda self: self.task.assignment.end_batch - 1 in self._settled)  # type: ignore[return-value]


def _any_reading_counts(_original: Original) -> Original:
    return property(lambda _self: True)  # type: ignore[return-value]


def _lost_answer(original: Original) -> Original:
    def answered(self: Feed, ask: Any, reply: Any, now: float) -> None:
        before = self._reports
        original(self, ask, reply, now)
        if self._is_closing or ask.registration != self._registration:
            self._reports = before.without(ask.reports)

    return answered


def _settled_all_the_same(*, waiting: bool) -> Callable[[Original], Original]:
    def make(original: Original) -> Original:
        def settle(self: BatchLoop[Any], reading: Reading[Any]) -> Handed[Any] | None:
            if waiting and not self._is_at_end:
                return original(self, reading)  # type: ignore[no-any-return]
            for handed in list(reading.handed):
                if waiting or handed.current.must_repeat:
                    handed.current.must_repeat = handed.current.waits = False
            return original(self, reading)  # type: ignore[no-any-return]

        return settle

    return make


def _newest(self: CurrentBatch, base_versions: Mapping[int, int], pserver: int, generation: int) -> None:
    self.answered.update(base_versions)
    self.generations[pserver] = max(generation, self.generations.get(pserver, generation))


def _newest_of_the_sum(self: CurrentBatch, pushed: CurrentBatch) -> None:
    self.waits = False
    self.generations.update(pushed.generations)


def _newest_of_all(self: Reading[Any], number: int, generations: Mapping[int, int]) -> None:
    self._settled.add(number)
    self._generations.update(generations)


def _refusals_are_ignored(original: Original) -> Original:
    return lambda self, together, _refusals: original(self, together, ())


def _lost_sums_count(original: Original) -> Original:
    def settle(self: BatchGroup[Any], refusals: Any, *, is_lost: bool) -> Settled[Any]:
        return original(self, () if is_lost else refusals, is_lost=False)  # type: ignore[no-any-return]

    return settle


def _first_batch_is_skipped(original: Original) -> Original:
    """What was read first while the task before was at its end."""

    def take(self: BatchLoop[Any], item: Any) -> None:
        before = self.reading
        original(self, item)
        if before is not None and before is not self.reading and isinstance(item, ReadBatch):
            self._due.pop()
            self.reading.handed.clear()  # type: ignore[union-attr]

    return take


def _kept_in_the_queue(_original: Original) -> Original:
    def lose(self: Feed, attempts: set[int], _now: float) -> None:
        self._held = {attempt: held for attempt, held in self._held.items() if attempt not in attempts}
        self._ready = deque(self._ready)

    return lose


def _all_but_the_first(original: Original) -> Original:
    def answered(self: ShardTransfer, *arguments: Any, **more: Any) -> None:
        whole = self._whole
        before, whole.refusals = whole.refusals, set()
        original(self, *arguments, **more)
        whole.refusals = before | {places[1:] for places in whole.refusals}

    return answered


def _unknown_is_settled(original: Original) -> Original:
    def failed(self: ShardTransfer, error: FlightedlError) -> Any:
        if isinstance(error, OutcomeUnknownError):
            for block in sorted(self.pushes):
                self.answered(range(block, block + 1), Outcome.ACCEPTED)
        return original(self, error)

    return failed


def _refused_is_settled(original: Original) -> Original:
    def answered(self: ShardTransfer, blocks: range, outcome: int, *arguments: Any, **more: Any) -> None:
        is_refused = outcome in {Outcome.STALE, Outcome.NOT_MEMBER} and self.pushes
        original(self, blocks, Outcome.ACCEPTED if is_refused else outcome, *arguments, **more)

    return answered


def _the_first_is_enough(original: Original) -> Original:
    def failed(self: ShardTransfer, error: FlightedlError) -> Any:
        verdict = original(self, error)
        others = [shard for shard in self._whole.shards if shard is not self]
        has_answer = any(shard.generation and not shard.pushes for shard in others)
        return Over() if isinstance(verdict, AskAgain) and has_answer else verdict

    return failed


def _failed_is_settled(_original: Original) -> Original:
    def push_failed(self: BatchSums, _error: BaseException) -> None:
        for member in self._group.clear():
            member.waits = False

    return push_failed


def _old_mode(original: Original) -> Original:
    def join_answered(self: TrainerMembership, reply: JoinReply) -> Any:
        joined = original(self, reply)
        return Joined(None) if isinstance(joined, Joined) else joined

    return join_answered


def _after_the_first(original: Original) -> Original:
    def uploaded(self: ElectionOfFirstValues, generation: int, initialized: int, blocks: int) -> None:
        original(self, generation, initialized, blocks)
        if isinstance(self._step, Upload):
            self._step = Confirm(self._step.election, (generation,))

    return uploaded


def _promised_is_given(original: Original) -> Original:
    """What may be read of the next epoch is trained, too."""

    def answered(self: Feed, ask: Any, reply: Any, now: float) -> None:
        original(self, ask, structs.replace(reply, assignments=[*reply.assignments, *reply.ahead]), now)

    return answered


TRAINER_BUGS: TrainerBugs = {
    "what is promised is trained": (
        "a trainer works on tasks of the next epoch when it may read them",
        ((Feed, "answered", _promised_is_given),),
    ),
    "first values on one pserver": (
        "the election is done when the first pserver has the values",
        ((ElectionOfFirstValues, "uploaded", _after_the_first),),
    ),
    "the old model is trained on": (
        "a trainer stays when the model has got other first values",
        ((FollowedElection, "require_same", _nothing),),
    ),
    "the first batch of a refused sum is lost": (
        "what a block lacks of a sum is pushed again, but for the sum's first batch",
        ((ShardTransfer, "answered", _all_but_the_first),),
    ),
    "an unknown outcome counts as settled": (
        "a push that nobody answered is not sent again",
        ((ShardTransfer, "failed", _unknown_is_settled),),
    ),
    "a refused push counts as settled": (
        "a gradient that came too late, or of somebody who is no member, is not computed again",
        ((ShardTransfer, "answered", _refused_is_settled),),
    ),
    "a batch settles when the first pserver has answered": (
        "a pserver that does not answer is passed over when another one has",
        ((ShardTransfer, "failed", _the_first_is_enough),),
    ),
    "a sum that failed counts as taken": (
        "a sum whose push failed half-way is not done again",
        ((BatchSums, "push_failed", _failed_is_settled),),
    ),
    "a batch that failed arrives all the same": (
        "a batch whose push failed half-way arrives without its gradient where that is missing",
        ((CurrentBatch, "push_failed", _nothing),),
    ),
    "sums of an old mode": (
        "a trainer goes on under the mode that it had",
        ((TrainerMembership, "join_answered", _old_mode),),
    ),
    "what is told again goes on where it was": (
        "an attempt told again under the same number counts for the first reading, of which the rest was dropped",
        (
            (Feed, "is_held", _by_attempt),
            (Feed, "ask_failed", _forgets_with_the_answer),
            (Reading, "is_settled", _any_reading_counts),
            (Feed, "check", _nothing),
        ),
    ),
    "the first batches are dropped": (
        "a task is reported although its first batches were passed over",
        ((BatchLoop, "take", _first_batch_is_skipped), (Reading, "is_settled", _only_the_last_counts)),
    ),
    "an answer that comes too late is forgotten": (
        "what was told to a loop that was left is neither held nor handed back",
        ((Feed, "answered", _lost_answer),),
    ),
    "work of an old registration is kept": (
        "what was told to an earlier registration is held under the new one",
        ((Feed, "registered_again", _nothing),),
    ),
    "a denial is about everything": (
        "a join's answer about one attempt drops all work",
        ((BatchLoop, "denied", _drops_everything),),
    ),
    "reported before the sum is pushed": (
        "a task is reported while its last batches wait in the trainer",
        ((BatchLoop, "_settle", _settled_all_the_same(waiting=True)),),
    ),
    "done before ack": (
        "a batch that was refused counts as settled",
        ((BatchLoop, "_settle", _settled_all_the_same(waiting=False)),),
    ),
    "newest generation is reported": (
        "a trainer reports the pservers as they are, not as they acknowledged",
        (
            (CurrentBatch, "note_answers", lambda _: _newest),
            (CurrentBatch, "note_sum", lambda _: _newest_of_the_sum),
            (Reading, "settle", lambda _: _newest_of_all),
        ),
    ),
    "a refused sum counts as taken": (
        "a trainer does not push the batches again that a block lacks",
        ((BatchSums, "settle", _refusals_are_ignored),),
    ),
    "a lost sum counts as taken": (
        "a sum whose push met the end of the membership is not done again",
        ((BatchGroup, "settle", _lost_sums_count),),
    ),
    "what is lost is begun": ("a task that the master took away is still read", ((Feed, "_lose", _kept_in_the_queue),)),
}
