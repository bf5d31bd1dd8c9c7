"""Bugs to plant in what is done with rows of tables: runs with one of them are runs with rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from flightedl.domain.checkpoint import manifest as manifests
from flightedl.domain.checkpoint.chains import Chains
from flightedl.domain.checkpoint.changes import ChangesSince
from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import ShardFile

Original = Callable[..., Any]
RowBugs = dict[str, tuple[str, tuple[tuple[Any, str, Callable[[Any], Any]], ...]]]


def _only_the_newest(original: Original) -> Original:
    """What had changed up to a cut that came to nothing is forgotten."""

    def cut(self: ChangesSince[Any], file: str, after: str, since_newest: Any) -> Any:
        found = original(self, file, after, since_newest)
        return None if found is None else since_newest

    return cut


def _one_too_far(original: Original) -> Original:
    """A cut counts as soon as it is made: the next increment is on it, whatever became of its file."""

    def cut(self: ChangesSince[Any], file: str, after: str, since_newest: Any) -> Any:
        return original(self, file, self._newest if self.knows(after) else after, since_newest)

    return cut


def _whatever_is_asked(_original: Original) -> Original:
    return lambda _self, file: bool(file)


def _since_any_cut(original: Original) -> Original:
    """Where it is not known what has changed since a file, that is said which changed since the last cut."""

    def cut(self: ChangesSince[Any], file: str, after: str, since_newest: Any) -> Any:
        found = original(self, file, after, since_newest)
        return since_newest if found is None and after else found

    return cut


def _to_any_process(original: Original) -> Original:
    def offer(self: Chains, index: int, generation: int, *arguments: Any) -> Any:
        known = self._files.get(index)
        return original(self, index, generation if known is None else known.generation, *arguments)

    return offer


def _without_links(original: Original) -> Any:
    def restore(*arguments: Any) -> Any:
        *others, files = arguments
        return original(*others, [replace(file, links=(), after="") for file in files])

    return staticmethod(restore)


def _no_links(_original: Any) -> Any:
    return property(lambda self: (self,))


def _no_increment(_original: Original) -> Original:
    return lambda _name: None


ROW_BUGS: RowBugs = {
    "a failed increment swallows changes": (
        "what had changed up to a cut whose file came to nothing is in no later increment",
        ((ChangesSince, "cut", _only_the_newest),),
    ),
    "increments are on whatever was cut": (
        "an increment has what has changed since a cut whose file is in no checkpoint",
        ((ChangesSince, "cut", _one_too_far),),
    ),
    "increments on a file that a pserver does not have": (
        "a chain goes on with whatever process has the index, which does not look whether it knows what has changed",
        (
            (Chains, "offer", _to_any_process),
            (ChangesSince, "knows", _whatever_is_asked),
            (ChangesSince, "cut", _since_any_cut),
        ),
    ),
    "a new master takes increments for bases": (
        "what the newest checkpoint's files are built on is forgotten when another master takes over",
        ((Checkpoints, "restore", _without_links),),
    ),
    "increments are read alone": ("rows are restored without the base", ((ShardFile, "chain", _no_links),)),
    "bases are deleted": (
        "retention deletes what kept checkpoints are increments on",
        ((manifests, "since_of", _no_increment),),
    ),
}
