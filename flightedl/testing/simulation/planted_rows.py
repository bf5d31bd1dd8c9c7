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
from flightedl.domain.tables.reference import ReferenceTable, Row
from flightedl.domain.tables.restoring import TakenSpans

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


def _no_removal(_original: Original) -> Original:
    return lambda _self, _row_ids: None


def _no_admission_counts(original: Original) -> Original:
    def restore(self: ReferenceTable, row_id: int, row: Row) -> None:
        if row.values:
            original(self, row_id, row)

    return restore


def _removed_since_the_last(original: Original) -> Original:
    """What a cut removed that came to nothing is in no later increment."""

    def cut(self: ChangesSince[Any], file: str, after: str, since_newest: Any) -> Any:
        found = original(self, file, after, since_newest)
        return found if found is None else found._replace(removed=since_newest.removed)

    return cut


def _one_more(original: Original) -> Original:
    def oldest_of(self: TakenSpans[Any], table: int, numbers: range) -> int:
        found = int(original(self, table, numbers))
        return found + 1 if found else 0

    return oldest_of


def _the_highest(_original: Original) -> Original:
    def oldest_of(self: TakenSpans[Any], table: int, numbers: range) -> int:
        return max((oldest for _, oldest, _ in self._found(table, numbers)), default=0)

    return oldest_of


def _of_all_epochs(_original: Original) -> Original:
    return lambda _self, _numbers: 0


def _a_version_longer(original: Original) -> Original:
    return lambda self, row, version, epoch: original(self, row, max(0, version - 1), epoch)


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
    "removed rows return": (
        "a restore takes no notice of what an increment says was removed",
        ((ReferenceTable, "remove", _no_removal),),
    ),
    "a failed increment swallows removals": (
        "what a cut removed whose file came to nothing is in no later increment",
        ((ChangesSince, "cut", _removed_since_the_last),),
    ),
    "admission begins anew": (
        "how often an id was pushed that waits for admission is lost by a restore",
        ((ReferenceTable, "restore", _no_admission_counts),),
    ),
    "rows go a version too early": (
        "a restore gives up rows of one version more than their file had given up",
        ((TakenSpans, "oldest_of", _one_more),),
    ),
    "what one file gave up is gone in all": (
        "rows that come from several files go by the rule of the one that has given up most",
        ((TakenSpans, "oldest_of", _the_highest),),
    ),
    "rows forget the epoch": (
        "a restore does not know of which epoch its rows are",
        ((TakenSpans, "epoch_of", _of_all_epochs),),
    ),
    "rows live a version too long": (
        "a row that has expired is there for one version more",
        ((ReferenceTable, "exists", _a_version_longer),),
    ),
    "bases are deleted": (
        "retention deletes what kept checkpoints are increments on",
        ((manifests, "since_of", _no_increment),),
    ),
}
