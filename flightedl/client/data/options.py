"""Options of ``job.dataset``, ``job.mixture`` and ``job.indexed`` that control how a trainer reads data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from msgspec.structs import replace

from flightedl.client import arguments
from flightedl.client.data.read_queue import READ_AHEAD_MB
from flightedl.client.data.readers import Transforming
from flightedl.client.data.transforms import Transform
from flightedl.domain.groups.plan import Remainder
from flightedl.domain.groups.shuffling import Shuffling
from flightedl.domain.topics import is_topic
from flightedl.errors import UsageError
from flightedl.formats.json_records import JsonRecords
from flightedl.formats.lines import Lines, Svmlight
from flightedl.formats.reader import Decode
from flightedl.formats.recordio import RecordIO
from flightedl.messages.declarations import DatasetDeclaration


class ReadingOptions(TypedDict, total=False):
    """Options that are not part of the declaration, so trainers may differ in them. ``Job.dataset`` documents them."""

    decode: Decode | None
    explicit_done: bool
    group: Any
    global_batch: int | None
    remainder: str
    lanes: int | None
    shuffle_block: int
    shuffle_bytes: int
    explicit_commit: bool
    read_ahead_mb: int
    transform: Transform | None
    readers: int
    data_moved: Mapping[str, str]
    on_lost: str
    short_pushes: bool


#: Options of groups, and those of them that "torchft" does not have.
_OF_GROUPS = ("remainder", "explicit_commit", "global_batch", "lanes", "shuffle_block", "shuffle_bytes")
_NOT_NUMBERED = (*_OF_GROUPS[:4], "readers", "on_lost")
_DEFAULTS = {"remainder": "split", "explicit_commit": False, "readers": 0}


def decoding(declaration: DatasetDeclaration, decode: Decode | None) -> tuple[DatasetDeclaration, Decode | None]:
    """Return what to declare, and the function that remains. Types are inferred once, in the index."""
    if decode is json.loads and declaration.format in ("", RecordIO.name) and not is_topic(*declaration.urls):
        return replace(declaration, format=JsonRecords.name), None
    if declaration.format == Lines.name and isinstance(decode, Svmlight):
        return replace(declaration, format=decode.name), None
    return declaration, decode


def batch_size_of(batch_size: Any, given: Mapping[str, Any]) -> Any:
    """Return ``batch_size``, or the option ``global_batch``. Raises UsageError unless exactly one of them is given."""
    global_batch = given.get("global_batch")
    if (batch_size is None) == (global_batch is None):
        raise UsageError("give either batch_size, or global_batch for all ranks of a group together")
    return batch_size if global_batch is None else arguments.positive("global_batch", global_batch)


class Reading:
    """Checked options.

    Args:
        given: Options that the script has passed.

    Raises:
        UsageError: an option is unknown, has a wrong type, is out of range, or conflicts with another option.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        if unknown := sorted(given.keys() - ReadingOptions.__annotations__.keys()):
            raise UsageError(f"there is no option {unknown[0]}=: leave it out")
        self.decode: Decode | None = given.get("decode")
        if self.decode is not None:
            arguments.function_of("decode", self.decode)
        transform = given.get("transform")
        if transform is not None:
            arguments.function_of("transform", transform)
        self.transforming = Transforming(transform, arguments.natural("readers", given.get("readers", 0)))
        self.read_ahead_bytes = arguments.positive("read_ahead_mb", given.get("read_ahead_mb", READ_AHEAD_MB)) << 20
        self.data_moved = arguments.folders_of("data_moved", given.get("data_moved", {}))
        self.explicit_done = arguments.flag("explicit_done", given.get("explicit_done", False))
        self.short_pushes = arguments.flag("short_pushes", given.get("short_pushes", False))
        self.explicit_commit = arguments.flag("explicit_commit", given.get("explicit_commit", False))
        on_lost = given.get("on_lost", "raise")
        if on_lost not in ("raise", "continue"):
            raise UsageError(f"on_lost is {on_lost!r:.80}, but must be one of raise, continue")
        self.may_lose = on_lost == "continue"
        self.group = given.get("group")
        self._remainder = given.get("remainder", "split")
        self.has_global_batch = given.get("global_batch") is not None
        shuffling = Shuffling()
        self.shuffling = Shuffling(
            arguments.positive("lanes", given["lanes"]) if given.get("lanes") is not None else 0,
            arguments.positive("shuffle_block", given.get("shuffle_block", shuffling.block)),
            arguments.positive("shuffle_bytes", given.get("shuffle_bytes", shuffling.size_bytes)),
        )
        chosen = [name for name in {*_OF_GROUPS, *_NOT_NUMBERED} if given.get(name) not in (None, _DEFAULTS.get(name))]
        self.has_shuffle_bytes = "shuffle_bytes" in chosen
        if self.group is None and (wrong := [name for name in _OF_GROUPS[:-1] if name in chosen]):
            raise UsageError(
                f'options of a group were given ({", ".join(wrong)}): leave them out, or give group="auto"'
            )
        if self.is_numbered and (wrong := [name for name in _NOT_NUMBERED if name in chosen]):
            raise UsageError(f'group="torchft" has no {" or ".join(wrong)}: leave it out')

    @property
    def is_numbered(self) -> bool:
        return isinstance(self.group, str) and self.group == "torchft"

    def remainder_for(self, declaration: DatasetDeclaration) -> Remainder:
        """Return the ``remainder`` option of a group's data. Raises UsageError if the data cannot be read in rounds."""
        return arguments.remainder_of(self._remainder, declaration, explicit_done=self.explicit_done)
