"""Rows of tables as parameters that a batch has: looked up by modules, pushed by the optimizer.

What a module looks up in training becomes a parameter of it, and of the optimizer's groups, until the step: one of
(distinct ids, dim) with the rows as they came. So whatever PyTorch and others do with parameters and their gradients
works with rows, too: autograd adds up the gradients of an id that is there twice, ``zero_grad`` clears them,
``clip_grad_norm_`` counts them, a ``GradScaler`` scales them back and finds what overflowed.

* Beside these a module has one parameter without elements, ``rows``, which is always there: by its device rows are
  given out, by its type, and with its ``requires_grad`` they are frozen. No ``state_dict`` has any of them: rows are
  the servers'.
* Rows that are only read (in ``eval()``, under ``no_grad``, frozen, or without a current batch) are no parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flightedl.client.tables.requests import DistinctIds, Ids
from flightedl.client.tables.table import Asked, Nulls, Table
from flightedl.client.tables.traffic import require_known
from flightedl.domain.model.optimizers import Optimizer as Rule
from flightedl.errors import UsageError

Floats = npt.NDArray[np.float32]

_EMPTY = "rows"


class InUse(NamedTuple):
    """Rows that a module looked up for the current batch."""

    ids: Ids
    #: 1 where the first row stands for padding, else 0.
    first: int
    #: (first + ids, dim).
    leaf: nn.Parameter

    def gradients(self, array: Floats) -> Floats:
        """(ids, dim) of the leaf's gradient, an array that stays as it is."""
        # What came from an accelerator lies in memory that the next step uses again, and a sum keeps its gradients.
        is_kept = self.leaf.device.type == "cpu"
        return np.array(array[self.first :], np.float32, order="C", copy=None if is_kept else True)


class Taker(Protocol):
    """Who pushes the gradients of rows."""

    def rows_came(self, module: OnTable, leaf: nn.Parameter) -> None:
        """A module has looked up rows."""
        ...

    def rows_gone(self, module: OnTable) -> None:
        """They belong to a batch that is over."""
        ...


class OnTable(nn.Module):
    """A module whose rows lie in a table.

    Args:
        table: What ``job.table`` returned.
        padding_idx: As of ``Table.pull``.
        nulls: Likewise.
        max_norm: Rows whose norm is greater are scaled to it, as they are read.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide the gradient of an id by how often it is there.
    """

    def __init__(
        self,
        table: Table,
        *,
        padding_idx: int | None = None,
        nulls: Nulls = "error",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise UsageError(f"{table!r:.80} is no table: give what job.table(name, dim, ...) returned")
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"table {table.name!r}: max_norm is {max_norm!r:.40}, but must be greater than 0")
        self.table = table
        self.padding_idx = padding_idx
        self.nulls = nulls
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.rows = nn.Parameter(torch.empty(0, table.dim))
        self._in_use: list[InUse] = []
        #: The batch that these are of.
        self._batch: object = None
        #: None: no optimizer has this module.
        self.taker: Taker | None = None
        leave_uncompiled(type(self))

    @property
    def in_use(self) -> Sequence[InUse]:
        """What the current batch has looked up here, in order."""
        return self._in_use

    def asked(self, ids: Any) -> Asked:
        """Which rows are meant by ids, a tensor or what ``Table.pull`` takes."""
        given = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids
        return self.table.asked(given, padding_idx=self.padding_idx, nulls=self.nulls)

    def is_training(self, batch: object) -> bool:
        """Whether rows that are looked up now for a batch are trained.

        Raises:
            UsageError: nobody would push their gradients.
        """
        if self.training and self.taker is None:
            raise UsageError(
                f"an embedding on table {self.table.name!r} is in no module that an fe.torch.Optimizer has, so it "
                "would not be trained: make the optimizer of the whole module before the first batch, or call eval() "
                "to read"
            )
        return self.training and batch is not None and self.rows.requires_grad and torch.is_grad_enabled()

    def keep(self, batch: object, used: InUse) -> None:
        """Have rows as a parameter until the batch's step."""
        if self._batch is not batch:
            self.drop()
            self._batch = batch
        self._in_use.append(used)
        self.register_parameter(f"{_EMPTY}_{len(self._in_use)}", used.leaf)
        if self.taker is not None:
            self.taker.rows_came(self, used.leaf)

    def drop(self) -> None:
        """What is in use belongs to a batch that is over."""
        self._in_use.clear()
        for name in [name for name in self._parameters if name != _EMPTY]:
            del self._parameters[name]
        if self.taker is not None:
            self.taker.rows_gone(self)

    def extra_repr(self) -> str:
        more = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.table.dim}{more}"

    # what PyTorch does with modules

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Rows are the servers'."""

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        """Likewise."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Of the same table; a copy reads, and no optimizer has it."""
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        for name, value in self.__dict__.items():
            if not isinstance(value, dict):
                made.__dict__[name] = value
        made._in_use, made._batch, made.taker = [], None, None
        made.rows = nn.Parameter(torch.empty_like(self.rows), self.rows.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"an embedding on table {self.table.name!r} cannot be pickled, for its rows are the servers': keep "
            "net.state_dict() and the job's checkpoints, which have the rows"
        )


def leave_uncompiled(kind: type[nn.Module]) -> None:
    """Compiled code is broken up around the ``forward`` of modules of this class: it talks to servers."""
    if not getattr(kind.forward, "_torchdynamo_disable", False):
        kind.forward = torch.compiler.disable(kind.forward)


class Wanted(NamedTuple):
    """What a module looks up."""

    module: OnTable
    asked: Asked


class Found(NamedTuple):
    """Where the rows are that were wanted."""

    #: (rows, dim).
    weight: torch.Tensor
    #: (n,) of each id, its row.
    places: torch.Tensor
    #: The row of what stands for nothing; None: there is none.
    padding: int | None


def look_up(wanted: Sequence[Wanted]) -> list[Found]:
    """Rows for several modules, in one round trip."""
    by_table: dict[Table, list[int]] = {}
    for number, (module, _) in enumerate(wanted):
        module.is_training(None)
        by_table.setdefault(module.table, []).append(number)
    declared = {table: table.declared for table in by_table}
    first, *others = [traffic for _, traffic in declared.values()]
    if any(other is not first for other in others):
        raise UsageError("tables of different jobs are looked up together: make all of them with the same job")
    distinct = {table: _together([wanted[number].asked for number in numbers]) for table, numbers in by_table.items()}
    lookup = first.look_up({declared[table][0]: ids for table, ids in distinct.items()})
    found: dict[int, Found] = {}
    for table, numbers in by_table.items():
        number = declared[table][0]
        require_known(table.name, lookup.unknown.get(number, ()))
        found.update(
            _found_in(distinct[table], lookup.rows(number), {n: wanted[n] for n in numbers}, first.current_batch)
        )
    return [found[number] for number in range(len(wanted))]


def _together(asked: Sequence[Asked]) -> DistinctIds:
    if len(asked) == 1:
        return asked[0].distinct
    return DistinctIds(np.concatenate([each.distinct.given for each in asked]))


def _found_in(
    distinct: DistinctIds, rows: Floats, wanted: Mapping[int, Wanted], batch: object
) -> Iterator[tuple[int, Found]]:
    """One table's rows for all that want some of them."""
    needs_padding = not len(rows) or any(asked.kept is not None for _, asked in wanted.values())
    matrix = np.concatenate([np.zeros((1, rows.shape[1]), np.float32), rows]) if needs_padding else rows
    owner = next((module for module, _ in wanted.values() if module.is_training(batch)), None)
    weight = torch.from_numpy(matrix)
    if owner is not None:
        leaf = nn.Parameter(weight.to(owner.rows.device))
        owner.keep(batch, InUse(distinct.ids, int(needs_padding), leaf))
        weight = leaf
    start = 0
    for number, (module, asked) in wanted.items():
        places = distinct.places[start : start + len(asked.distinct.given)] + int(needs_padding)
        start += len(asked.distinct.given)
        if asked.kept is not None:
            every = np.zeros(len(asked.kept), np.int64)
            every[asked.kept] = places
            places = every
        seen = weight if module.is_training(batch) else weight.detach()
        seen = _within(seen.to(module.rows.device), module.max_norm, module.norm_type)
        padding = 0 if asked.kept is not None else None
        yield number, Found(seen, torch.from_numpy(places).to(module.rows.device), padding)


def _within(rows: torch.Tensor, max_norm: float | None, p: float) -> torch.Tensor:
    """Rows scaled down to a norm."""
    if max_norm is None:
        return rows
    norms = torch.linalg.vector_norm(rows, p, dim=1, keepdim=True)
    # As PyTorch's own, which adds this to a norm that it divides by.
    return torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


class RowGroups:
    """The groups of an optimizer whose parameters are rows of tables: one for each module.

    Args:
        modules: By name.
    """

    def __init__(self, modules: Mapping[str, OnTable]) -> None:
        self._modules = dict(modules)
        self._groups: dict[int, dict[str, Any]] = {}

    @property
    def modules(self) -> Mapping[str, OnTable]:
        """By name."""
        return self._modules

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter of a module on a table."""
        return any(tensor is each for module in self._modules.values() for each in module.parameters())

    def rules(self) -> Iterator[tuple[OnTable, Rule]]:
        """Of each module, how its rows are updated."""
        for module in self._modules.values():
            yield module, module.table.spec.optimizer

    def has(self, module: OnTable, group: dict[str, Any]) -> None:
        """A module's rows are in this group from now on."""
        self._groups[id(module)] = group
        module.drop()
        module.taker = self

    def rows_came(self, module: OnTable, leaf: nn.Parameter) -> None:
        self._groups[id(module)]["params"].append(leaf)

    def rows_gone(self, module: OnTable) -> None:
        del self._groups[id(module)]["params"][1:]

    def gradients(self) -> dict[str, tuple[Table, InUse]]:
        """What got a gradient, by names as of parameters."""
        return {
            f"{name}.{_EMPTY}_{number}": (module.table, used)
            for name, module in self._modules.items()
            for number, used in enumerate(module.in_use, 1)
            if used.leaf.grad is not None
        }

    def drop(self) -> None:
        """The batch is over."""
        for module in self._modules.values():
            module.drop()
