"""Contents of a declaration: parameters, tables, and the shard plan."""

from __future__ import annotations

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.tables.spec import TableSpec
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration


def parameters_of(declaration: ModelDeclaration) -> list[ParameterSpec]:
    """The declared parameters. UsageError: one is not valid."""
    return [ParameterSpec(p.name, tuple(p.shape), p.dtype) for p in declaration.parameters]


def tables_of(declaration: ModelDeclaration) -> list[TableSpec]:
    """The declared tables. UsageError: one is not valid."""
    return [TableSpec.from_json(table) for table in declaration.tables]


def plan_of(model: DeclaredModel) -> ShardPlan:
    """Return the shard plan of a declared model. UsageError: something declared is not valid."""
    declared = model.declaration
    return plan_for(parameters_of(declared), model.pservers, model.cut_for, tables_of(declared), model.placement)
