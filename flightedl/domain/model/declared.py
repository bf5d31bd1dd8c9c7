"""Contents of a model's declaration: its parameters, its tables, and the shard plan that follows from them."""

from __future__ import annotations

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.tables.spec import TableSpec
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration


def parameters_of(declaration: ModelDeclaration) -> list[ParameterSpec]:
    """Return the declared parameters. Raises UsageError if one is invalid."""
    return [ParameterSpec(p.name, tuple(p.shape), p.dtype) for p in declaration.parameters]


def tables_of(declaration: ModelDeclaration) -> list[TableSpec]:
    """Return the declared tables. Raises UsageError if one is invalid."""
    return [TableSpec.from_json(table) for table in declaration.tables]


def plan_of(model: DeclaredModel) -> ShardPlan:
    """Return the shard plan of a declared model. Raises UsageError if the declaration is invalid."""
    declared = model.declaration
    return plan_for(parameters_of(declared), model.pservers, model.cut_for, tables_of(declared), model.placement)
