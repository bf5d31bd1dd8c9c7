"""Whoever asks for a batch ahead of the step is found out: the step's gradient would count for the wrong batch.

A batch is current from the moment it is handed out until the next one is asked for. Wrappers that prefetch break that:

* those that read in a thread of their own are seen by it;
* those of accelerate and Lightning are known by where they ask from;
* any other one is seen at its first step: before it a batch was handed out without any gradient being computed, and its
  tensors are still used.

What is not seen: a wrapper of one's own that asks ahead and keeps only copies, on another device for example. Its last
step fails, because no batch is current any more.
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

_WRONG_BATCH = "the gradient of a step would count for the batch behind the one that it is of"


class _Newest(threading.local):
    """Of each thread: the tensors of the batch that it got last."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []


_newest = _Newest()


def handed_out(tensors: Any) -> None:
    """These are the tensors of the batch that this thread gets now."""
    _newest.tensors = [weakref.ref(tensor) for tensor in tensors_in(tensors)]


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    """All in dicts, lists and tuples."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from tensors_in(each)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from tensors_in(each)


class Seen:
    """The gradients that were pushed last, or that were there before: until they are computed anew or changed."""

    def __init__(self, gradients: Iterable[torch.Tensor]) -> None:
        self._found = {id(each): (weakref.ref(each), each._version) for each in gradients}

    def __contains__(self, gradient: torch.Tensor) -> bool:
        known = self._found.get(id(gradient))
        if known is None:
            return False
        ref, version = known
        is_same: bool = ref() is gradient
        return is_same and version == gradient._version


class OneByOne:
    """Sees that each batch is through before the next one is asked for. Made in the thread that steps."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        #: What is wrong with who asks; empty: nothing.
        self._wrong = ""
        #: The batch that had no step, if the one before the current one had none, and its tensors.
        self._left_out = ""
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def batch_ends(self, current: CurrentBatch, *, was_used: bool) -> None:
        """The next batch is asked for, by this thread.

        Args:
            current: The batch before it.
            was_used: Gradients were computed while it was current, whatever became of them.

        Raises:
            UsageError: by a loader that asks ahead.
        """
        self._left_out = "" if was_used else str(current)
        self._tensors = [] if was_used else _newest.tensors
        self._wrong = self._wrong or self._found_wrong(was_used=was_used)
        if self._wrong:
            raise UsageError(self._wrong)

    def _found_wrong(self, *, was_used: bool) -> str:
        if threading.get_ident() != self._thread:
            return (
                f"another thread asks for batches than the one that trains, as a loader that reads ahead does: "
                f"{_WRONG_BATCH}; loop over the batches themselves, for the dataset reads ahead by itself"
            )
        return "" if was_used else _known_wrapper()

    def require_is_through(self) -> None:
        """A step is about to be made.

        Raises:
            UsageError: it might be of another batch than the current one.
        """
        if self._wrong:
            raise UsageError(self._wrong)
        if not self._is_used():
            return
        # What only waits for the garbage collector is used by nobody.
        gc.collect()
        if self._is_used():
            raise UsageError(
                f"{self._left_out} was handed out and had no gradient, and its tensors are still in use: if batches "
                f"are asked for ahead of the step (by a wrapper that prefetches, or into a list), {_WRONG_BATCH}; "
                "take them one by one, and of a batch that you leave out keep clones"
            )

    def _is_used(self) -> bool:
        return any(ref() is not None for ref in self._tensors)


def _known_wrapper() -> str:
    """What is wrong with a loader that asks right now, and is known to ask for a batch ahead; empty: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "accelerate.data_loader":
            return (
                f"accelerate's prepared loaders ask for a batch ahead, so that {_WRONG_BATCH}: give "
                "accelerator.prepare the module and the optimizer alone, and loop over the batches themselves"
            )
        if module.endswith("pytorch.loops.fetchers") and _asks_ahead(frame.f_locals.get("self")):
            return (
                f"Lightning asks for a batch ahead, so that {_WRONG_BATCH}: let training_step(self, dataloader_iter) "
                "take its batch with next(dataloader_iter)"
            )
        frame = frame.f_back
    return ""


def _asks_ahead(fetcher: object) -> bool:
    return type(fetcher).__name__ == "_PrefetchDataFetcher" and getattr(fetcher, "length", None) is None
