"""Embeddings whose rows lie in tables on the servers: in a module as PyTorch's own are.

::

    users = job.table("users", dim=16, optimizer=fe.RowAdagrad(lr=0.05), init=fe.Uniform(0.01))
    net = nn.Sequential(fe.torch.Embedding(users), nn.Linear(16, 1))
    optimizer = fe.torch.Optimizer(net, job, fe.Adam(lr=1e-3))

``forward`` looks rows up, ``backward`` gives them gradients, and ``optimizer.step()`` pushes these with the step,
under the identity of the batch (``rows`` tells how). Ids are whole numbers of up to 64 bits in a tensor, or what
``Table.pull`` takes: texts, or an Arrow column. What is done with the rows is done by PyTorch's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from flightedl.client.tables.table import Nulls, Table
from flightedl.errors import UsageError
from flightedl.torch.rows import Found, OnTable, Wanted, leave_uncompiled, look_up

Combination = Literal["sum", "mean", "max"]


class Embedding(OnTable):
    """Rows by id, as ``torch.nn.Embedding``, of a table that has no size.

    Args:
        table: What ``job.table`` returned.
        padding_idx: An id that stands for nothing: its row is zeros, and gets no gradient.
        nulls: "padding": nulls in an Arrow column stand for nothing, too; else they are refused.
        max_norm: Rows whose norm is greater are scaled to it, as they are read; what the table has stays, and the
            gradient is that of the scaled row.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide the gradient of an id by how often it is there.
    """

    def forward(self, ids: Any) -> torch.Tensor:
        """Rows of ids of any shape: (*shape, dim).

        Raises:
            UsageError: these are no ids, or one has no row where that is an error, or nobody trains this module.
            UnavailableError: as of ``Table.pull``.
        """
        wanted = self.wanted(ids)
        (found,) = look_up([wanted])
        return self.of(wanted, found)

    def wanted(self, ids: Any) -> Wanted:
        """What is to be looked up. Errors as of ``forward``."""
        asked = self.asked(ids)
        if asked.found.offsets is not None:
            raise UsageError(f"ids of table {self.table.name!r} are lists, which are bags: use fe.torch.EmbeddingBag")
        return Wanted(self, asked)

    def of(self, wanted: Wanted, found: Found) -> torch.Tensor:
        """What ``forward`` gives, of rows that were found."""
        rows = functional.embedding(
            found.places.reshape(wanted.asked.found.shape),
            found.weight,
            padding_idx=found.padding,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
        return rows.to(self.rows.dtype)


class EmbeddingBag(OnTable):
    """Several rows put together as one, as ``torch.nn.EmbeddingBag``.

    Args:
        table: What ``job.table`` returned.
        mode: "sum", "mean" or "max" of a bag.
        include_last_offset: The last offset is the end of the last bag.
        padding_idx: An id that stands for nothing: it is no part of its bag.
        nulls: As of ``Embedding``.
        max_norm: Likewise.
        norm_type: Likewise.
        scale_grad_by_freq: Likewise.
    """

    def __init__(
        self,
        table: Table,
        *,
        mode: Combination = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        nulls: Nulls = "error",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
    ) -> None:
        super().__init__(
            table,
            padding_idx=padding_idx,
            nulls=nulls,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
        )
        if mode not in get_args(Combination):
            raise UsageError(
                f"table {table.name!r}: mode is {mode!r:.40}, but must be one of {', '.join(get_args(Combination))}"
            )
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        """One row for each bag: (bags, dim); zeros for an empty one.

        Args:
            ids: (bags, n), or (n,) with ``offsets``, or an Arrow column of lists.
            offsets: (bags,): where each bag begins.
            per_sample_weights: Of the shape of ``ids``: what each counts in a sum.

        Raises:
            UsageError: as of ``Embedding``, or these are no bags.
            UnavailableError: as of ``Table.pull``.
        """
        wanted = self.wanted(ids)
        (found,) = look_up([wanted])
        return self.of(wanted, found, offsets, per_sample_weights)

    def wanted(self, ids: Any) -> Wanted:
        """What is to be looked up. Errors as of ``forward``."""
        return Wanted(self, self.asked(ids))

    def of(
        self, wanted: Wanted, found: Found, offsets: Any = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What ``forward`` gives, of rows that were found."""
        ids, device = wanted.asked.found, found.places.device
        places = found.places
        if ids.offsets is not None:
            starts = torch.from_numpy(ids.offsets).to(device)
        else:
            places = places.reshape(ids.shape)
            starts = None if offsets is None else torch.as_tensor(offsets, dtype=torch.int64, device=device)
        ends_too = self.include_last_offset and ids.offsets is None
        try:
            weights = None if per_sample_weights is None else per_sample_weights.to(device, torch.float32)
            rows = functional.embedding_bag(
                places,
                found.weight,
                starts,
                scale_grad_by_freq=self.scale_grad_by_freq,
                mode=self.mode,
                per_sample_weights=weights,
                include_last_offset=ends_too,
                padding_idx=found.padding,
            )
        except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UsageError(f"the bags of table {self.table.name!r} make no sense: {reason:.200}") from None
        return rows.to(self.rows.dtype)


class EmbeddingCollection(nn.Module):
    """Several embeddings whose rows come in one round trip; those on the same table share its rows.

    ::

        embeddings = fe.torch.EmbeddingCollection(
            {"user": fe.torch.Embedding(users), "liked": fe.torch.EmbeddingBag(items)}
        )
        rows = embeddings({"user": user_ids, "liked": (liked_ids, offsets)})

    Args:
        embeddings: By the name of what they are of.
    """

    def __init__(self, embeddings: Mapping[str, Embedding | EmbeddingBag]) -> None:
        super().__init__()
        if not embeddings or not all(isinstance(each, OnTable) for each in embeddings.values()):
            raise UsageError("a collection is of one or more fe.torch.Embedding and fe.torch.EmbeddingBag by name")
        self.embeddings = nn.ModuleDict(embeddings)
        leave_uncompiled(type(self))

    def forward(self, ids: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Rows by name.

        Args:
            ids: By name, of some or all: what the embedding's ``forward`` takes, a tuple where that is several.

        Raises:
            UsageError: as of the embeddings, or there is no such name.
            UnavailableError: as of ``Table.pull``.
        """
        if not ids:
            return {}
        wanted: dict[str, Wanted] = {}
        more: dict[str, tuple[Any, ...]] = {}
        for name, given in ids.items():
            if name not in self.embeddings:
                raise UsageError(f"there is no embedding {name!r:.80}, only {', '.join(self.embeddings):.200}")
            first, *rest = given if isinstance(given, tuple) else (given,)
            wanted[name], more[name] = self._of(name).wanted(first), tuple(rest)
        found = look_up(list(wanted.values()))
        return {
            name: self._of(name).of(wanted[name], rows, *more[name]) for name, rows in zip(wanted, found, strict=True)
        }

    def _of(self, name: str) -> Any:
        return self.embeddings[name]
