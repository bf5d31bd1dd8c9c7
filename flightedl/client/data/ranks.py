"""Rank of this process among the processes that share the data, and the number of ranks."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from flightedl.errors import UsageError
from flightedl.process import machine

#: Pattern that matches the default names of all independent trainers except the first one.
_ANOTHER_TRAINER = re.compile(r"trainer-[1-9]\d*")
_WANTED = (
    'group is "auto", "torchft", (rank, number of ranks), or one dimension of a DeviceMesh such as mesh["dp"]; '
    "None shares the data without rounds"
)


def rank_and_size(group: Any, name: str = "") -> tuple[int, int]:
    """Return (rank, number of ranks) for the ``group`` argument of ``job.dataset``.

    "auto" uses PyTorch's process group if it is initialized, otherwise JAX's, otherwise the variables ``RANK`` and
    ``WORLD_SIZE``. Without any of these, the process is a group of one.

    Args:
        group: The argument of ``job.dataset``.
        name: Name of this process, if a launcher gave it one.

    Raises:
        UsageError: the argument or a variable is malformed, or this is one of several independent trainers.
    """
    if isinstance(group, str):
        if group != "auto":
            raise UsageError(f"group is {group!r:.80}: {_WANTED}")
        return _of_torch() or _of_jax() or _of_environment(name)
    if isinstance(group, tuple | list):
        return _checked("group", *group) if len(group) == 2 else _refused(group)
    if getattr(group, "ndim", None) == 1 and hasattr(group, "get_local_rank"):
        return _checked("group", group.get_local_rank(), group.size())
    if callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None)):
        return _checked("group", group.rank(), group.size())
    return _refused(group)


def lasting_name(name: str) -> str:
    """Return a name for this process that a process in its place will have, too: ``name``, its rank, or its host."""
    rank = os.environ.get("RANK", "")  # noqa: TID251 - set by other launchers, such as torchrun
    return name or (f"rank-{rank[:20]}" if rank else machine.host_name()[:100])


def _refused(group: Any) -> tuple[int, int]:
    raise UsageError(f"group is {group!r:.80}: {_WANTED}")


def _checked(what: str, rank: Any, size: Any) -> tuple[int, int]:
    try:
        found = int(rank), int(size)
    except (TypeError, ValueError):
        found = -1, 0
    if not 0 <= found[0] < found[1]:
        raise UsageError(f"{what} says rank {rank!r:.20} of {size!r:.20}: a rank is from 0 to the number of ranks - 1")
    return found


def initialized_torch() -> Any | None:
    """Return the module ``torch.distributed`` if the script has initialized its process group, otherwise None."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_initialized else None


def _of_torch() -> tuple[int, int] | None:
    distributed = initialized_torch()
    return None if distributed is None else (distributed.get_rank(), distributed.get_world_size())


def _of_jax() -> tuple[int, int] | None:
    # Asking JAX for its processes before it has connected to a cluster would initialize JAX for this process alone.
    jax = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", bool)
    return (jax.process_index(), jax.process_count()) if jax is not None and is_initialized() else None


def _of_environment(name: str) -> tuple[int, int]:
    names = os.environ  # noqa: TID251 - launchers set them, such as torchrun
    if "RANK" not in names and "WORLD_SIZE" not in names:
        if _ANOTHER_TRAINER.fullmatch(name):
            raise UsageError(
                "these trainers are not a group: each would get all of the data. Start them with "
                "`flightedl run --nproc-per-node N`, or leave out group="
            )
        return 0, 1
    return _checked("the environment (RANK, WORLD_SIZE)", names.get("RANK"), names.get("WORLD_SIZE"))
