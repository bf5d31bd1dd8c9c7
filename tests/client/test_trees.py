"""Nested models: dicts, lists, tuples and named tuples of arrays."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from flightedl.client.model.trees import Tree, tree_of
from flightedl.domain.consistency.modes import Sync
from flightedl.errors import GradientError, UsageError

from .pserver_bench import Cluster


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def array(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.float32)


NESTED = {
    "layers": [Layer(array(1, 2, 2), array(2, 2)), Layer(array(3, 2), None)],
    "scale": (array(4), OrderedDict(deep=array(5, 1))),
    "table": [[1.0, 2.0], [3.0, 4.0]],
}
NAMES = ["layers.0.bias", "layers.0.kernel", "layers.1.kernel", "scale.0", "scale.1.deep", "table"]


def test_names_are_paths() -> None:
    tree = tree_of(NESTED)
    assert tree is not None
    assert sorted(tree.leaves) == NAMES
    assert tree.leaves["table"] == [[1.0, 2.0], [3.0, 4.0]]


def test_values_are_returned_in_the_same_structure() -> None:
    tree = Tree(NESTED)
    back = tree.restored({name: name for name in tree.leaves})
    assert back == {
        "layers": [Layer("layers.0.kernel", "layers.0.bias"), Layer("layers.1.kernel", None)],
        "scale": ("scale.0", OrderedDict(deep="scale.1.deep")),
        "table": "table",
    }
    assert type(back["layers"][0]) is Layer
    assert type(back["scale"][1]) is OrderedDict


@pytest.mark.parametrize("flat", [{"w": array(1, 2)}, {"w": [1.0, 2.0], "b": 0.5}, {}, array(1, 2), [1.0], "w", None])
def test_a_mapping_of_arrays_is_not_a_tree(flat: Any) -> None:
    assert tree_of(flat) is None


def test_a_list_of_arrays_is_a_tree() -> None:
    tree = tree_of([array(1, 2), array(2, 3)])
    assert tree is not None
    assert list(tree.leaves) == ["0", "1"]


def test_two_arrays_with_one_name_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"two arrays of the model would both be called 'a.b'"):
        Tree({"a": {"b": 1}, "a.b": 2})


def test_steps_accept_the_same_structure_or_names() -> None:
    with Cluster({"a.0": (2,), "a.1": (3,)}, Sync(reduce="sum")) as cluster:
        trainer = cluster.trainer(tree=Tree({"a": [array(0, 2), array(0, 3)]}))
        model = trainer.parameters
        trainer.begin(0)
        trainer.step(0, {"a": [array(-1, 2), array(-2, 3)]})
        trainer.begin(1)
        trainer.step(1, {"a.1": array(-1, 3)})
        assert {name: value.tolist() for name, value in model.items()} == {"a.0": [1, 1], "a.1": [3, 3, 3]}
        assert [part.tolist() for part in model.tree["a"]] == [[1, 1], [3, 3, 3]]
        trainer.begin(2)
        with pytest.raises(GradientError, match=r"there is no parameter 'b'; declared are a.0, a.1"):
            model.step({"b": array(1, 2)})


def test_a_model_of_names_has_a_tree() -> None:
    with Cluster({"w": (2,)}, Sync()) as cluster:
        tree = cluster.trainer().parameters.tree
        assert {name: value.tolist() for name, value in tree.items()} == {"w": [0, 0]}


class Jax:
    """The functions of JAX in use, for a class that only JAX knows."""

    def __init__(self) -> None:
        self.tree_util = self
        self.begun: list[str] = []

    def all_leaves(self, values: list[Any]) -> bool:
        return not any(isinstance(value, Mapping | MappingProxyType | list) for value in values)

    def tree_flatten_with_path(self, tree: Mapping[str, Any], is_leaf: Any) -> Any:
        assert is_leaf([1.0, 2.0])
        assert not is_leaf([array(1, 1)])

        class Key:
            def __init__(self, key: str) -> None:
                self.key = key

        class Structure:
            def unflatten(self, leaves: list[Any]) -> Any:
                return MappingProxyType({"a": MappingProxyType(dict(zip(tree["a"], leaves, strict=True)))})

        return [((Key("a"), Key(name)), leaf) for name, leaf in tree["a"].items()], Structure()


def test_jax_defines_containers_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", Jax())
    begun: list[str] = []

    class OnDevice:
        shape = (1,)

        def copy_to_host_async(self) -> None:
            begun.append("copy")

    tree = tree_of(MappingProxyType({"a": {"w": OnDevice(), "b": array(1, 2)}}))
    assert tree is not None
    assert sorted(tree.leaves) == ["a.b", "a.w"]
    assert begun == []
    assert sorted(tree.flattened({"a": {"w": OnDevice(), "b": array(1, 2)}})) == ["a.b", "a.w"]
    assert begun == ["copy"]
    assert tree.restored({"a.w": 1, "a.b": 2}) == {"a": {"w": 1, "b": 2}}
