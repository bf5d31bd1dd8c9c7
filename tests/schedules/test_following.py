"""Every order in which a follower's parameters are read while a pserver's message is applied."""

from __future__ import annotations

import numpy as np
import pytest

from flightedl.client.following import copy
from flightedl.client.following.copy import FollowedModel
from flightedl.domain.feed.follower import Use
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.messages.feed import ChangesHeader, Position
from flightedl.wire.changes import Change
from tests.support.planting import Planted, bug, rewrites

from .scheduler import Run, explore, finds

NAMES = "w", "b"
SHAPE = 2, 3


class Follower:
    """A copy of two parameters. Every message of the only pserver sets both to the message's number."""

    def __init__(self) -> None:
        plan = plan_shards([ParameterSpec(name, SHAPE) for name in NAMES], 1)
        self.blocks = plan.block_count
        self.model = FollowedModel(plan)
        self.apply(1)

    def apply(self, number: int) -> None:
        position = Position(life=1, generation=5, placement=1, number=number)
        header = ChangesHeader(position=position, since=number - 1 or None, blocks=[(0, self.blocks)], buckets=[])
        received = self.model.begin(header, 1.0)
        values = np.full(6, number, np.float32)
        received.add([Change("values", name, block, 0, 6, number, values=values) for block, name in enumerate(NAMES)])
        received.add([Change("end", block=len(NAMES))])
        assert self.model.apply(0, received) is Use.APPLY

    def read(self) -> None:
        arrays = self.model.arrays()
        assert {array.shape for array in arrays.values()} == {SHAPE}
        found = {name: set(array.reshape(-1).tolist()) for name, array in arrays.items()}
        assert found["w"] == found["b"], "parameters of two messages were mixed"
        assert len(found["w"]) == 1, "a parameter changed while it was read"


def reading(run: Run) -> None:
    """All parameters of one reading come from the same message."""
    follower = Follower()
    run.threads(lambda: follower.apply(2), follower.read)
    assert follower.model.array("b").tolist() == [[2.0] * 3] * 2


def test_parameters_are_read_after_the_same_message() -> None:
    assert explore(reading, [copy]).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug(
            "each parameter is looked up on its own",
            rewrites(
                "client.following.copy:FollowedModel.arrays",
                "arrays = self._arrays",
                "return {name: self._arrays[name].reshape(shape) for name, shape in self._shapes.items()}",
            ),
        ),
        bug(
            "arrays are changed in place",
            rewrites(
                "client.following.copy:FollowedModel.apply",
                "self._arrays = {**self._arrays, **arrays}",
                "for name in arrays:\n    self._arrays[name] = arrays[name]",
            ),
        ),
    ],
    ids=lambda value: value.what,
)
def test_a_mixture_of_two_messages_is_found(flaw: Planted) -> None:
    finds(flaw, reading, [copy])
