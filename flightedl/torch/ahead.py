"""Detect batches that are requested before the step, because the gradient would then count for the wrong batch.

A batch is current from the time it is yielded until the next one is requested. Wrappers that prefetch violate this rule
and are detected as follows:

* If a wrapper reads in another thread, it is recognized by that thread.
* Wrappers of accelerate and Lightning are recognized by their stack frames.
* Any other wrapper is detected at the first step, if an earlier batch has been yielded whose tensors are still in use
  and for which no gradient has been computed.

A custom wrapper that prefetches and keeps only copies, for example on another device, is not detected. Its last step
fails, because no batch is current anymore.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.errors import UsageError

_WRONG_BATCH = "the gradient of a step would count for the batch after the right one"


class _Newest(threading.local):
    """Thread -> tensors of the batch that the thread received last."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []


_newest = _Newest()


def handed_out(tensors: Any) -> None:
    """Record the tensors of the batch that this thread is receiving."""
    _newest.tensors = [weakref.ref(tensor) for tensor in tensors_in(tensors)]


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts, lists and tuples."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from tensors_in(each)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from tensors_in(each)


class Seen:
    """Gradients that existed at the last step and have not been recomputed or changed since then."""

    def __init__(self, gradients: Iterable[torch.Tensor]) -> None:
        self._found = {id(each): (weakref.ref(each), each._version) for each in gradients}

    def __contains__(self, gradient: torch.Tensor) -> bool:
        known = self._found.get(id(gradient))
        if known is None:
            return False
        ref, version = known
        is_same: bool = ref() is gradient
        return is_same and version == gradient._version


class PrefetchDetector:
    """Checks that each batch is finished before the next one is requested. Must be created in the step's thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        #: Error message about the caller's mistake; empty if none has been detected.
        self._wrong = ""
        #: The previous batch and its tensors, if that batch had no step.
        self._left_out = ""
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def batch_ends(self, current: CurrentBatch, *, was_used: bool) -> None:
        """Record that this thread is requesting the next batch.

        Args:
            current: The batch before the next one.
            was_used: True if gradients were computed for ``current``, even if they were not pushed.

        Raises:
            UsageError: a loader requests batches ahead of the step.
        """
        self._left_out = "" if was_used else str(current)
        self._tensors = [] if was_used else _newest.tensors
        self._wrong = self._wrong or self._found_wrong(was_used=was_used)
        if self._wrong:
            raise UsageError(self._wrong)

    def _found_wrong(self, *, was_used: bool) -> str:
        if threading.get_ident() != self._thread:
            return (
                f"batches are requested by another thread than the one that trains, as by a loader that prefetches: "
                f"{_WRONG_BATCH}; loop over the batches directly, because the dataset itself reads ahead"
            )
        return "" if was_used else _known_wrapper()

    def require_in_order(self) -> None:
        """Check before a step that its gradients belong to the current batch.

        Raises:
            UsageError: the gradients may belong to another batch.
        """
        if self._wrong:
            raise UsageError(self._wrong)
        if not self._is_used():
            return
        # Tensors that are only waiting for garbage collection are not in use.
        gc.collect()
        if self._is_used():
            raise UsageError(
                f"{self._left_out} was handed out and had no gradient, and its tensors are still in use: if batches "
                f"are requested ahead of the step (by a wrapper that prefetches, or into a list), {_WRONG_BATCH}; "
                "request them one by one, and keep only clones of a batch that you skip"
            )

    def _is_used(self) -> bool:
        return any(ref() is not None for ref in self._tensors)


def _known_wrapper() -> str:
    """Return the error message about a known prefetching loader on the current stack; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "accelerate.data_loader":
            return (
                f"accelerate's prepared loaders request a batch ahead, so that {_WRONG_BATCH}: pass only the module "
                "and the optimizer to accelerator.prepare, and loop over the batches directly"
            )
        if module.endswith("pytorch.loops.fetchers") and _asks_ahead(frame.f_locals.get("self")):
            return (
                f"Lightning requests a batch ahead, so that {_WRONG_BATCH}: use training_step(self, dataloader_iter) "
                "and get its batch with next(dataloader_iter)"
            )
        frame = frame.f_back
    return ""


def _asks_ahead(fetcher: object) -> bool:
    return type(fetcher).__name__ == "_PrefetchDataFetcher" and getattr(fetcher, "length", None) is None
