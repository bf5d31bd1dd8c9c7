"""Bugs planted in weights, means and step numbers; and in slots, which are in these models alone. See ``planted``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Apply, Arrival, Arrived, Closing
from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.master.evaluations import Evaluation
from flightedl.domain.pserver.block_values import AddGradient, Effect, Restored
from flightedl.domain.pserver.blocks import BlockProtocol, BlockSpan
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.sums import BatchSums
from flightedl.testing.simulation.planted_queue import Bugs, Original
from flightedl.testing.simulation.shard import Shard

Blocks = BlockProtocol


def _by_members(original: Original) -> Original:
    def close(self: BlockRounds) -> Closing:
        closing: Closing = original(self)
        return dataclasses.replace(closing, total_weight=float(len(closing.contributors)))

    return close


def _repeated_counts(original: Original) -> Original:
    """Whoever brings what a block has adds the weight of it to the mean."""

    def arrive(
        self: BlockRounds, member: int, base: int, weight: float, *, already_applied: bool, **more: Any
    ) -> Arrival:
        arrival: Arrival = original(self, member, base, weight, already_applied=already_applied, **more)
        if already_applied and isinstance(arrival, Arrived) and self._contributors:
            self._contributors[member] = self._contributors.get(member, 0.0) + weight
            self._total_weight += weight
        return arrival

    return arrive


def _late_is_light(original: Original) -> Original:
    def arrive_late(self: BlockRounds, member: int, base: int, weight: float, *more: Any) -> Arrival:
        arrival: Arrival = original(self, member, base, min(weight, 1.0), *more)
        return arrival

    return arrive_late


def _unweighted(original: Original) -> Original:
    def take(self: Blocks, span: BlockSpan, push: Any, arrival: Any, weight: float, effects: list[Effect]) -> None:
        original(self, span, push, arrival, weight, effects)
        effects[:] = [each._replace(weight=1.0) if isinstance(each, AddGradient) else each for each in effects]

    return take


def _keeps(name: str) -> Any:
    """What the first mode said is never changed."""

    def make(original: Original) -> Original:
        def set_mode(self: Blocks, mode: Mode) -> None:
            first = getattr(self, name, None)
            original(self, mode)
            if first is not None:
                setattr(self, name, first)

        return set_mode

    return make


def _one_more(original: Original) -> Original:
    def arrive(self: BlockRounds, *arguments: Any) -> Arrival:
        arrival: Arrival = original(self, *arguments)
        return Apply(arrival.staleness + 1) if isinstance(arrival, Apply) else arrival

    return arrive


def _from_the_first_step(original: Original) -> Original:
    def restore(self: Blocks, applied: Any, blocks: Restored) -> Any:
        return original(self, applied, {number: (version, 0) for number, (version, _) in blocks.items()})

    return restore


def _divided_by_the_rest(original: Original) -> Original:
    def repeat(self: BatchSums, members: Sequence[CurrentBatch]) -> None:
        original(self, members)
        for member in members:
            assert member.again is not None, "it is done again in a sum"
            member.again = SumAgain(member.again.first, member.again.batch_count, {})

    return repeat


def _by_batches(original: Original) -> Original:
    def take(self: BatchSums) -> tuple[CurrentBatch, Mapping[str, int]]:
        together, divisors = original(self)
        return together, dict.fromkeys(divisors, 1 + len(together.further))

    return take


def _never_forgotten(original: Original) -> Original:
    def begin(self: BatchSums, current: CurrentBatch) -> None:
        known = self._weights
        original(self, current)
        self._weights = known

    return begin


def _by_all_records(original: Original) -> Original:
    """A parameter that had no gradient of some batches is divided by the records of all."""

    def take(self: BatchSums) -> tuple[CurrentBatch, Mapping[str, int]]:
        together, divisors = original(self)
        return together, dict.fromkeys(divisors, together.record_count)

    return take


def _tasks_weigh_the_same(original: Original) -> Original:
    def take(self: Evaluation, metrics: Mapping[str, tuple[float, float]]) -> None:
        original(self, {name: (total / weight, 1.0) for name, (total, weight) in metrics.items()})

    return take


def _without_slots(original: Original) -> Original:
    def restore(self: Shard, found: Any) -> None:
        original(self, found)
        for block in self.blocks:
            block.slot = 0

    return restore


def _slots_of_the_end(original: Original) -> Original:
    """What is saved as slots is what they are when the file is written."""

    def save(self: Shard, *arguments: Any) -> None:
        self._copies = {at: (*copy[:3], self.blocks[at].slot, copy[4]) for at, copy in self._copies.items()}
        original(self, *arguments)

    return save


def _slots_of_a_neighbour(original: Original) -> Original:
    def restore(self: Shard, found: Iterable[Any]) -> None:
        original(self, [(part, dataclasses.replace(shard, slots=shard.slots[::-1])) for part, shard in found])

    return restore


WEIGHT_BUGS: Bugs = {
    "divided by the members": (
        "the mean of a round is divided by the number of its members, not by their weights",
        ((BlockRounds, "close", _by_members),),
    ),
    "repeated weights count": (
        "a batch that a block has already adds its weight to the divisor of the round",
        ((BlockRounds, "arrive", _repeated_counts),),
    ),
    "late gradients weigh one": (
        "what comes after its round counts with another weight in the divisor than in the sum",
        ((BlockRounds, "_arrive_late", _late_is_light),),
    ),
    "added without its weight": (
        "a gradient counts once in the sum of its round, and with its weight in the divisor",
        ((BlockProtocol, "_take", _unweighted),),
    ),
    "the mean of the first mode": (
        "after a change of the mode gradients are still added up, or still averaged, as before",
        ((BlockProtocol, "_set_mode", _keeps("_is_mean")),),
    ),
    "scaled as in the first mode": (
        "after a change of the mode the learning rate is still divided by the staleness, or still is not",
        ((BlockProtocol, "_set_mode", _keeps("_scales_by_staleness")),),
    ),
    "its own update makes it stale": (
        "the update that a gradient makes counts among those that it did not see",
        ((BlockRounds, "_arrive_unsynchronized", _one_more),),
    ),
    "the first step again": (
        "the optimizer counts its steps from the beginning after a checkpoint was loaded",
        ((BlockProtocol, "restore", _from_the_first_step),),
    ),
    "a part is divided by itself": (
        "what a block lacks of a mean is divided by its own records when it is pushed again",
        ((BatchSums, "_repeat", _divided_by_the_rest),),
    ),
    "divided by the batches": (
        "the mean of several batches is divided by their number, not by their records",
        ((BatchSums, "take", _by_batches),),
    ),
    "records of the sum before": (
        "the records of a sum are counted in the next one, too",
        ((BatchSums, "begin", _never_forgotten),),
    ),
    "divided by all records": (
        "a parameter that some batches of a sum have no gradient for is divided by their records, too",
        ((BatchSums, "take", _by_all_records),),
    ),
    "tasks weigh the same": (
        "the result of an evaluation is the mean of the tasks, however many records each has",
        ((Evaluation, "take", _tasks_weigh_the_same),),
    ),
    "slots are not restored": (
        "a pserver begins with the values of a checkpoint and with empty slots",
        ((Shard, "restore", _without_slots),),
    ),
    "slots of another version": (
        "a checkpoint has the slots that there were when it was written, beside values copied before",
        ((Shard, "_save", _slots_of_the_end),),
    ),
    "slots of another block": (
        "blocks get each other's slots when they are restored",
        ((Shard, "restore", _slots_of_a_neighbour),),
    ),
}
