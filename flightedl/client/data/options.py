"""Options of ``job.dataset``, ``job.mixture`` and ``job.indexed`` that control how a trainer reads data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from flightedl.client import arguments
from flightedl.client.data.read_queue import READ_AHEAD_MB
from flightedl.client.data.readers import Transforming
from flightedl.client.data.transforms import Transform
from flightedl.domain.groups.plan import Remainder
from flightedl.errors import UsageError
from flightedl.formats.reader import Decode
from flightedl.messages.declarations import DatasetDeclaration


class ReadingOptions(TypedDict, total=False):
    """Options that are not part of the declaration, so trainers may differ in them. ``Job.dataset`` documents them."""

    decode: Decode | None
    explicit_done: bool
    group: Any
    remainder: str
    explicit_commit: bool
    read_ahead_mb: int
    transform: Transform | None
    readers: int


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
        self.explicit_done = arguments.flag("explicit_done", given.get("explicit_done", False))
        self.explicit_commit = arguments.flag("explicit_commit", given.get("explicit_commit", False))
        self.group = given.get("group")
        self._remainder = given.get("remainder", "split")
        if self.group is None and self._has_rounds:
            raise UsageError('remainder and explicit_commit are for the ranks of a group: give group="auto"')
        if self.is_numbered and (self._has_rounds or self.transforming.has_readers):
            raise UsageError('group="torchft" takes neither remainder, explicit_commit nor readers: leave them out')

    @property
    def is_numbered(self) -> bool:
        return isinstance(self.group, str) and self.group == "torchft"

    @property
    def _has_rounds(self) -> bool:
        return self._remainder != "split" or self.explicit_commit

    def remainder_for(self, declaration: DatasetDeclaration) -> Remainder:
        """Return the ``remainder`` option of a group's data. Raises UsageError if the data cannot be read in rounds."""
        return arguments.remainder_of(self._remainder, declaration, explicit_done=self.explicit_done)
