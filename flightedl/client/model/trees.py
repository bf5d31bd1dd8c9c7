"""Nested models: dicts, lists, tuples and named tuples of arrays, as is common in JAX.

An array's name is its path, for example ``layers.0.kernel``. If JAX is loaded, JAX decides what counts as a container,
so classes registered with it are supported; otherwise, only dicts, lists, tuples and named tuples are recognized. None
is an empty container. A list of numbers is an array, not a container.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from flightedl.errors import UsageError

Rebuild = Callable[[Mapping[str, Any]], Any]


class Tree:
    """The containers of a model.

    Args:
        tree: The model with its initial values.

    Raises:
        UsageError: two arrays have the same name.
    """

    def __init__(self, tree: Any) -> None:
        found, self._rebuild = _flattened(tree)
        self.leaves = dict(found)
        if len(self.leaves) != len(found):
            names = [name for name, _ in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"two arrays of the model would both be called {twice!r:.80}: rename one of them")

    def flattened(self, gradients: Any) -> Any:
        """Return gradients as a mapping by name. Nested containers are flattened; mappings by name are unchanged."""
        if isinstance(gradients, Mapping) and gradients.keys() <= self.leaves.keys():
            return gradients
        found, _ = _flattened(gradients)
        for _, leaf in found:
            # Start all copies from an accelerator before waiting for any of them.
            if begin := getattr(leaf, "copy_to_host_async", None):
                begin()
        return dict(found)

    def restored(self, values: Mapping[str, Any]) -> Any:
        return self._rebuild(values)


def tree_of(initial: Any) -> Tree | None:
    """Return the container structure of a nested model, or None if the model is not nested."""
    if isinstance(initial, Mapping):
        is_nested = any(_is_container(value) for value in initial.values()) or not all(
            isinstance(name, str) for name in initial
        )
    else:
        is_nested = _is_container(initial)
    return Tree(initial) if is_nested else None


def _is_container(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_container(part) or (hasattr(part, "shape") and not np.isscalar(part)) for part in value)
    if isinstance(value, Mapping):
        return True
    jax = sys.modules.get("jax")
    return value is not None and jax is not None and not jax.tree_util.all_leaves([value])


def _flattened(tree: Any) -> tuple[list[tuple[str, Any]], Rebuild]:
    """Return the arrays by name, and a function that rebuilds the tree from values by name."""
    jax = sys.modules.get("jax")
    if jax is None:
        found = list(_walk(tree, ()))
        return found, lambda values: _rebuilt(tree, (), values)
    is_array: Callable[[Any], bool] = lambda part: isinstance(part, list | tuple) and not _is_container(part)  # noqa: E731
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array)
    named = [(_name([_step(key) for key in path]), leaf) for path, leaf in pairs]
    return named, lambda values: structure.unflatten([values[name] for name, _ in named])


def _step(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def _name(path: list[str] | tuple[str, ...]) -> str:
    return ".".join(path) or "value"


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if node is None:
        return
    parts = _parts(node)
    if parts is None:
        yield _name(path), node
        return
    for step, part in parts:
        yield from _walk(part, (*path, str(step)))


def _parts(node: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    return list(enumerate(node)) if isinstance(node, list | tuple) and _is_container(node) else None


def _rebuilt(node: Any, path: tuple[str, ...], values: Mapping[str, Any]) -> Any:
    if node is None:
        return None
    parts = _parts(node)
    if parts is None:
        return values[_name(path)]
    made = {step: _rebuilt(part, (*path, str(step)), values) for step, part in parts}
    if isinstance(node, Mapping):
        return type(node)(made)  # type: ignore[call-arg]
    return type(node)(*made.values()) if hasattr(node, "_fields") else type(node)(made.values())
