"""A different declaration is refused, and the error names the differences."""

from __future__ import annotations

import pytest

from flightedl.domain.master.differences import require_same
from flightedl.errors import DeclarationError
from flightedl.messages.declarations import DatasetDeclaration, ModelDeclaration, ParameterDeclaration


def _model(rows: int, lr: float) -> ModelDeclaration:
    parameter = ParameterDeclaration(name="w", shape=[rows, 3], dtype="float32")
    return ModelDeclaration(parameters=[parameter], optimizer={"kind": "SGD", "lr": lr}, mode={"kind": "Sync"})


def test_equal_declarations_are_accepted() -> None:
    require_same("model", _model(2, 0.1), _model(2, 0.1))


def test_the_difference_is_named() -> None:
    with pytest.raises(DeclarationError) as caught:
        require_same("model", _model(2, 0.1), _model(4, 0.5))
    assert "optimizer.lr is 0.1, not 0.5" in str(caught.value)
    assert "parameters.w.shape[0] is 2, not 4" in str(caught.value)
    assert "another job name" in str(caught.value)


def test_few_differences_are_not_counted() -> None:
    known = DatasetDeclaration(urls=["a"], batch_size=1)
    declared = DatasetDeclaration(urls=["a"], batch_size=2, epochs=3, shuffle=True, seed=4)
    with pytest.raises(DeclarationError, match=r"not True\. Declare the same"):
        require_same("dataset", known, declared)


def test_many_differences_are_counted() -> None:
    known = DatasetDeclaration(urls=["a"], batch_size=1)
    declared = DatasetDeclaration(urls=["b"], batch_size=2, epochs=3, shuffle=True, seed=4, format="csv")
    with pytest.raises(DeclarationError, match=r"and 2 more"):
        require_same("dataset", known, declared)


def test_lists_of_different_lengths_are_compared_as_single_values() -> None:
    known = DatasetDeclaration(urls=["a", "b"], batch_size=1)
    with pytest.raises(DeclarationError, match=r"urls is \['a', 'b'\], not \['a'\]"):
        require_same("dataset", known, DatasetDeclaration(urls=["a"], batch_size=1))
    columns = DatasetDeclaration(urls=["a", "b"], batch_size=1, columns=["x"])
    with pytest.raises(DeclarationError, match=r"columns is None, not \['x'\]"):
        require_same("dataset", known, columns)


def _with_tables(**dims: int) -> ModelDeclaration:
    tables = [{"kind": "TableSpec", "name": name, "dim": dim} for name, dim in dims.items()]
    return ModelDeclaration(parameters=[], optimizer={}, mode={}, tables=tables)


def test_differences_of_tables_name_the_table() -> None:
    with pytest.raises(DeclarationError, match=r"tables\.items\.dim is 8, not 4; tables\.users is \{"):
        require_same("model", _with_tables(items=8, users=2), _with_tables(items=4))
    with pytest.raises(DeclarationError, match=r"tables\.items is None, not \{"):
        require_same("model", _with_tables(), _with_tables(items=4))


def _of(*names: str) -> ModelDeclaration:
    parameters = [ParameterDeclaration(name=name, shape=[3], dtype="float32") for name in names]
    return ModelDeclaration(parameters=parameters, optimizer={}, mode={})


def test_a_different_order_of_parameters_is_a_different_model() -> None:
    with pytest.raises(DeclarationError, match=r"the order of the parameters is \['a', 'b'\], not \['b', 'a'\]"):
        require_same("model", _of("a", "b"), _of("b", "a"))
    with pytest.raises(DeclarationError, match=r"model: parameters\.b is None, not \{'name': 'b'"):
        require_same("model", _of("a"), _of("b", "a"))
