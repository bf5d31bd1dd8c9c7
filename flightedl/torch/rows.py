"""Rows of tables as parameters of the current batch: modules look them up, and the optimizer pushes their gradients.

When a module looks up rows in training mode, the rows become a parameter of the module and of the optimizer's groups
until the step: a leaf tensor of shape (distinct ids, dim). So everything that works with parameters and gradients also
works with rows. Autograd adds up the gradients of repeated ids, ``zero_grad`` clears them, ``clip_grad_norm_`` includes
them, and a ``GradScaler`` unscales them and detects overflows.

* Each module also has a permanent parameter without elements, named ``rows``. ``forward`` returns rows on its device
  and in its dtype, and its ``requires_grad`` can freeze the rows. A ``state_dict`` contains none of these parameters,
  because the servers store the rows.
* Rows that are only read are not parameters. This applies in ``eval()`` mode, under ``no_grad``, to frozen rows, and
  without a current batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

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
    """Rows that a module has looked up for the current batch."""

    ids: Ids
    #: Number of rows of ``leaf`` that are padding, and precede the others.
    first: int
    #: (first + ids, dim).
    leaf: nn.Parameter

    def gradients(self, array: Floats) -> Floats:
        """Return the leaf's gradient, (ids, dim), in memory that later steps do not overwrite."""
        # The next step reuses the memory of copies from accelerators, but a sum of batches keeps its gradients longer.
        is_kept = self.leaf.device.type == "cpu"
        return np.array(array[self.first :], np.float32, order="C", copy=None if is_kept else True)


class OnTable(nn.Module):
    """A module whose rows are stored in a table.

    Args:
        table: The result of ``job.table``.
        padding_idx: As in ``Table.pull``.
        nulls: As in ``Table.pull``.
        max_norm: Maximum norm: rows with a greater norm are scaled down to it when they are read.
        norm_type: Exponent p of this norm.
        scale_grad_by_freq: True to divide the gradient of an id by its number of occurrences.
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
            raise UsageError(f"{table!r:.80} is not a table: pass the result of job.table(name, dim, ...)")
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise UsageError(f"table {table.name!r}: max_norm is {max_norm!r:.40}, but must be greater than 0")
        self.table = table
        self.padding_idx = padding_idx
        self.nulls = nulls
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.rows = nn.Parameter(torch.empty(0, table.dim))
        self._in_use: list[InUse] = []
        #: Batch to which the rows in ``_in_use`` belong.
        self._batch: object = None
        #: None if no optimizer contains this module.
        self.listener: RowGroups | None = None
        leave_uncompiled(type(self))

    @property
    def in_use(self) -> Sequence[InUse]:
        """Rows that this module has looked up for the current batch, in order."""
        return self._in_use

    def asked(self, ids: Any, *, reads_padding: bool) -> Asked:
        """Return the lookup for these ids: a tensor, or anything else that ``Table.pull`` accepts."""
        if isinstance(ids, torch.Tensor):
            if ids.layout != torch.strided or ids.is_nested:
                raise UsageError(f"ids of table {self.table.name!r} are sparse or nested, but must be a dense tensor")
            if ids.is_floating_point() or ids.is_complex():
                kind = str(ids.dtype).removeprefix("torch.")
                raise UsageError(f"ids of table {self.table.name!r} are {kind}, but must be whole numbers or texts")
            ids = ids.detach().cpu().numpy()
        return self.table.asked(ids, padding_idx=self.padding_idx, nulls=self.nulls, reads_padding=reads_padding)

    def is_training(self, batch: object) -> bool:
        """True if rows that are looked up now will be trained.

        Raises:
            UsageError: the module is in training mode, but no optimizer would push its gradients.
        """
        if self.training and self.listener is None:
            raise UsageError(
                f"an embedding on table {self.table.name!r} would not be trained, because no fe.torch.Optimizer has "
                "it: make the optimizer of the complete module before the first batch, or call eval() to only read"
            )
        return self.training and batch is not None and self.rows.requires_grad and torch.is_grad_enabled()

    def keep(self, batch: object, used: InUse) -> None:
        if self._batch is not batch:
            self.drop()
            self._batch = batch
        self._in_use.append(used)
        self.register_parameter(f"{_EMPTY}_{len(self._in_use)}", used.leaf)
        if self.listener is not None:
            self.listener.rows_added(self, used.leaf)

    def drop(self) -> None:
        self._in_use.clear()
        for name in [name for name in self._parameters if name != _EMPTY]:
            del self._parameters[name]
        if self.listener is not None:
            self.listener.rows_dropped(self)

    def extra_repr(self) -> str:
        more = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.table.dim}{more}"

    # overrides of nn.Module

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing, because the servers store the rows."""

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        """Load nothing, because the servers store the rows."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy of the module on the same table. The copy belongs to no optimizer."""
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        for name, value in self.__dict__.items():
            if not isinstance(value, dict):
                made.__dict__[name] = value
        made._in_use, made._batch, made.listener = [], None, None
        made.rows = nn.Parameter(torch.empty_like(self.rows), self.rows.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"an embedding on table {self.table.name!r} cannot be pickled, because the servers have its rows: save "
            "net.state_dict(), and use the job's checkpoints for the rows"
        )


def leave_uncompiled(kind: type[nn.Module]) -> None:
    """Exclude the ``forward`` method of this class from compilation, because it communicates with servers."""
    if not getattr(kind.forward, "_torchdynamo_disable", False):
        kind.forward = torch.compiler.disable(kind.forward)


class RowRequest(NamedTuple):
    """A lookup of rows for one module."""

    module: OnTable
    asked: Asked


class Found(NamedTuple):
    """Rows that have been looked up for one module."""

    #: (rows, dim).
    weight: torch.Tensor
    #: (n,) row of each id.
    places: torch.Tensor
    #: Index of the padding row; None if there is no padding.
    padding: int | None


def look_up(requests: Sequence[RowRequest]) -> list[Found]:
    """Look up rows for several modules, in one round trip."""
    by_table: dict[Table, list[int]] = {}
    for number, (module, _) in enumerate(requests):
        module.is_training(None)
        by_table.setdefault(module.table, []).append(number)
    declared = {table: table.declared for table in by_table}
    first, *others = [traffic for _, traffic in declared.values()]
    if any(other is not first for other in others):
        raise UsageError("the tables of one lookup belong to different jobs: make all of them with the same job")
    distinct = {table: _together([requests[number].asked for number in numbers]) for table, numbers in by_table.items()}
    lookup = first.look_up({declared[table][0]: ids for table, ids in distinct.items()})
    found: dict[int, Found] = {}
    for table, numbers in by_table.items():
        number = declared[table][0]
        require_known(table.name, lookup.unknown.get(number, ()))
        found.update(
            _found_in(distinct[table], lookup.rows(number), {n: requests[n] for n in numbers}, first.current_batch)
        )
    return [found[number] for number in range(len(requests))]


def _together(asked: Sequence[Asked]) -> DistinctIds:
    if len(asked) == 1:
        return asked[0].distinct
    optional = np.unique(np.concatenate([each.distinct.optional for each in asked]))
    return DistinctIds(np.concatenate([each.distinct.given for each in asked]), optional=optional)


def _found_in(
    distinct: DistinctIds, rows: Floats, requests: Mapping[int, RowRequest], batch: object
) -> Iterator[tuple[int, Found]]:
    """Yield the rows for each module that uses this table."""
    optional = len(distinct.optional)
    # Nulls, and padding in bags, use a row of zeros.
    has_zeros = not len(rows) or any(
        asked.kept is not None and not asked.distinct.optional.size for _, asked in requests.values()
    )
    matrix = np.concatenate([np.zeros((1, rows.shape[1]), np.float32), rows]) if has_zeros else rows
    owner = next((module for module, _ in requests.values() if module.is_training(batch)), None)
    weight = torch.from_numpy(matrix)
    if owner is not None:
        leaf = nn.Parameter(weight.to(owner.rows.device))
        owner.keep(batch, InUse(distinct.ids[optional:], has_zeros + optional, leaf))
        weight = leaf
    start = 0
    for number, (module, asked) in requests.items():
        places = distinct.places[start : start + len(asked.distinct.given)] + int(has_zeros)
        start += len(asked.distinct.given)
        padding = None
        if asked.kept is not None:
            own = asked.distinct.optional
            padding = has_zeros + int(np.searchsorted(distinct.optional, own[0])) if own.size else 0
            every = np.full(len(asked.kept), padding, np.int64)
            every[asked.kept] = places
            places = every
        seen = weight if module.is_training(batch) else weight.detach()
        seen = _within(seen.to(module.rows.device), module.max_norm, module.norm_type)
        yield number, Found(seen, torch.from_numpy(places).to(module.rows.device), padding)


def _within(rows: torch.Tensor, max_norm: float | None, p: float) -> torch.Tensor:
    if max_norm is None:
        return rows
    norms = torch.linalg.vector_norm(rows, p, dim=1, keepdim=True)
    # Like PyTorch, add this constant to the norm before dividing by it.
    return torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


class RowGroups:
    """Parameter groups of the optimizer for rows: one group per module that uses a table.

    Args:
        modules: Modules by name.
    """

    def __init__(self, modules: Mapping[str, OnTable]) -> None:
        self._modules = dict(modules)
        self._groups: dict[int, dict[str, Any]] = {}

    @property
    def modules(self) -> Mapping[str, OnTable]:
        return self._modules

    def owns(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for module in self._modules.values() for each in module.parameters())

    def rules(self) -> Iterator[tuple[OnTable, Rule]]:
        for module in self._modules.values():
            yield module, module.table.spec.optimizer

    def add_group(self, module: OnTable, group: dict[str, Any]) -> None:
        self._groups[id(module)] = group
        module.drop()
        module.listener = self

    def rows_added(self, module: OnTable, leaf: nn.Parameter) -> None:
        """Add rows that a module has looked up for the current batch."""
        self._groups[id(module)]["params"].append(leaf)

    def rows_dropped(self, module: OnTable) -> None:
        del self._groups[id(module)]["params"][1:]

    def gradients(self) -> dict[str, tuple[Table, InUse]]:
        """Return the rows that have a gradient, as a dict from parameter name to (table, rows)."""
        return {
            f"{name}.{_EMPTY}_{number}": (module.table, used)
            for name, module in self._modules.items()
            for number, used in enumerate(module.in_use, 1)
            if used.leaf.grad is not None
        }

    def drop(self) -> None:
        for module in self._modules.values():
            module.drop()
