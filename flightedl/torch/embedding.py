"""Embedding modules whose rows are stored in tables on the servers. They are used like PyTorch's own embeddings.

::

    users = job.table("users", dim=16, optimizer=fe.RowAdagrad(lr=0.05), init=fe.Uniform(0.01))
    net = nn.Sequential(fe.torch.Embedding(users), nn.Linear(16, 1))
    optimizer = fe.torch.Optimizer(net, job, fe.Adam(lr=1e-3))

``forward`` looks up rows, ``backward`` computes their gradients, and ``optimizer.step()`` pushes these gradients with
the batch's identity (see ``rows``). Ids are integers of up to 64 bits in a tensor, or anything else that ``Table.pull``
accepts, such as strings or an Arrow column. All computation on the rows is performed by PyTorch's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from flightedl.client.tables.table import Nulls, Table
from flightedl.errors import UsageError
from flightedl.torch.rows import Found, OnTable, RowRequest, leave_uncompiled, look_up

Combination = Literal["sum", "mean", "max"]


class Embedding(OnTable):
    """Looks up rows by id, like ``torch.nn.Embedding``, but in a table without a fixed size.

    Args:
        table: The result of ``job.table``.
        padding_idx: Id of the padding, which gets no gradient. It reads as its row if the table has one, otherwise as
            zeros.
        nulls: "padding" to treat nulls in an Arrow column as padding, "error" to reject them.
        max_norm: Maximum norm: rows with a greater norm are scaled down to it when they are read. The table keeps the
            original row, and the gradient belongs to the scaled row.
        norm_type: Exponent p of this norm.
        scale_grad_by_freq: True to divide the gradient of an id by its number of occurrences.
    """

    def forward(self, ids: Any) -> torch.Tensor:
        """Return the rows of ids. Ids may have any shape; the result has the shape (*shape, dim).

        Raises:
            UsageError: the ids are invalid, an id has no row although the table requires one, or no optimizer trains
                this module.
            UnavailableError: for the same reasons as ``Table.pull``.
        """
        request = self.request(ids)
        (found,) = look_up([request])
        return self.result(request, found)

    def request(self, ids: Any) -> RowRequest:
        asked = self.asked(ids, reads_padding=True)
        if asked.found.offsets is not None:
            raise UsageError(f"ids of table {self.table.name!r} are lists, that is, bags: use fe.torch.EmbeddingBag")
        return RowRequest(self, asked)

    def result(self, request: RowRequest, found: Found) -> torch.Tensor:
        """Return the result of ``forward`` for these rows."""
        rows = functional.embedding(
            found.places.reshape(request.asked.found.shape),
            found.weight,
            padding_idx=found.padding,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
        return rows.to(self.rows.dtype)


class EmbeddingBag(OnTable):
    """Combines each bag of rows into one row, like ``torch.nn.EmbeddingBag``.

    Args:
        table: The result of ``job.table``.
        mode: Combination of a bag's rows: "sum", "mean" or "max".
        include_last_offset: True if the last offset is the end of the last bag.
        padding_idx: Id of the padding, which does not count in its bag.
        nulls: As in ``Embedding``.
        max_norm: As in ``Embedding``.
        norm_type: As in ``Embedding``.
        scale_grad_by_freq: As in ``Embedding``.
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
        if mode == "max" and scale_grad_by_freq:
            raise UsageError(f"table {table.name!r}: scale_grad_by_freq cannot be combined with mode 'max'")
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return one row per bag, as (bags, dim). An empty bag yields zeros.

        Args:
            ids: (bags, n), or (n,) with ``offsets``, or an Arrow column of lists.
            offsets: (bags,) start of each bag.
            per_sample_weights: Weight of each id in a sum, in the shape of ``ids``.

        Raises:
            UsageError: for the same reasons as ``Embedding``, or the bags are invalid.
            UnavailableError: for the same reasons as ``Table.pull``.
        """
        request = self.request(ids)
        (found,) = look_up([request])
        return self.result(request, found, offsets, per_sample_weights)

    def request(self, ids: Any) -> RowRequest:
        return RowRequest(self, self.asked(ids, reads_padding=False))

    def result(
        self, request: RowRequest, found: Found, offsets: Any = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the result of ``forward`` for these rows."""
        ids, device = request.asked.found, found.places.device
        places = found.places
        if ids.offsets is not None:
            starts = torch.from_numpy(ids.offsets).to(device)
        else:
            places = places.reshape(ids.shape)
            starts = None if offsets is None else torch.as_tensor(offsets, device=device)
        ends_too = self.include_last_offset and ids.offsets is None
        try:
            if offsets is not None and ids.offsets is not None:
                raise ValueError("the ids are a column of lists, which needs no offsets")  # noqa: TRY301
            if starts is not None:
                starts = _checked_offsets(starts, places.numel())
            weights = None if per_sample_weights is None else per_sample_weights.to(device, torch.float32)
            rows = functional.embedding_bag(
                places,
                self._scaled(found.weight, places),
                starts,
                mode=self.mode,
                per_sample_weights=weights,
                include_last_offset=ends_too,
                padding_idx=found.padding,
            )
        except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UsageError(f"the bags of table {self.table.name!r} are invalid: {reason:.200}") from None
        return rows.to(self.rows.dtype)

    def _scaled(self, weight: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the rows, with gradients that are divided by the number of occurrences in ``places`` if required."""
        if not self.scale_grad_by_freq or not weight.requires_grad:
            return weight
        counts = torch.bincount(places.reshape(-1), minlength=len(weight)).clamp(min=1).unsqueeze(1)
        # PyTorch's own option counts wrongly for bags.
        scaled = weight.view_as(weight)
        scaled.register_hook(lambda gradient: gradient / counts)
        return scaled


def _checked_offsets(offsets: torch.Tensor, id_count: int) -> torch.Tensor:
    """Return the offsets as integers. PyTorch does not check all of this: invalid offsets read other memory."""
    if offsets.numel() and (offsets.is_floating_point() or offsets.dtype == torch.bool):
        raise ValueError(f"offsets must be whole numbers, not {offsets.dtype}")
    found = offsets.to(torch.int64)
    if found.ndim == 1 and found.numel():
        bounds = torch.stack([found[0], found[-1], torch.diff(found).min() if len(found) > 1 else found[0]])
        first, last, step = bounds.tolist()
        if first != 0 or last > id_count or step < 0:
            raise ValueError(f"offsets must begin with 0, must not decrease, and must not exceed {id_count}")
    return found


class EmbeddingCollection(nn.Module):
    """Several embeddings that are looked up in one round trip. Embeddings on the same table share its rows.

    ::

        embeddings = fe.torch.EmbeddingCollection(
            {"user": fe.torch.Embedding(users), "liked": fe.torch.EmbeddingBag(items)}
        )
        rows = embeddings({"user": user_ids, "liked": (liked_ids, offsets)})

    Args:
        embeddings: Embeddings by name.
    """

    def __init__(self, embeddings: Mapping[str, Embedding | EmbeddingBag]) -> None:
        super().__init__()
        if not embeddings or not all(isinstance(each, OnTable) for each in embeddings.values()):
            raise UsageError("a collection needs at least one fe.torch.Embedding or fe.torch.EmbeddingBag, by name")
        self.embeddings = nn.ModuleDict(embeddings)
        leave_uncompiled(type(self))

    def forward(self, ids: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return rows by name.

        Args:
            ids: Name of some or all embeddings -> the argument of its ``forward``, or a tuple of arguments.

        Raises:
            UsageError: for the same reasons as the embeddings, or there is no embedding with this name.
            UnavailableError: for the same reasons as ``Table.pull``.
        """
        if not ids:
            return {}
        requests: dict[str, RowRequest] = {}
        more: dict[str, tuple[Any, ...]] = {}
        for name, given in ids.items():
            if name not in self.embeddings:
                raise UsageError(f"there is no embedding {name!r:.80}, only {', '.join(self.embeddings):.200}")
            first, *rest = given if isinstance(given, tuple) else (given,)
            requests[name], more[name] = self._of(name).request(first), tuple(rest)
        found = look_up(list(requests.values()))
        return {
            name: self._of(name).result(requests[name], rows, *more[name])
            for name, rows in zip(requests, found, strict=True)
        }

    def _of(self, name: str) -> Any:
        return self.embeddings[name]
