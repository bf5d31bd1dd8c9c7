"""Lives of a model: which results, files and names of ``once`` belong to the model that is trained now.

A model that begins anew has other values than its former life. The result of an evaluation, a saved file and a name
that a trainer won say something about one life only. A life is known by the election that gave it its first values, so
a later life has a higher number. 0 is unknown: the job has no model yet, or a version of flightedl stored it that knew
no lives. What is of an unknown life belongs to the first life that asks for it.
"""

from __future__ import annotations

from flightedl.errors import BegunAnewError


class PresentLife:
    """The life that the names in one place belong to."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def enter(self, life: int) -> bool:
        """Take a name for a life. True if the names known so far belong to a former life and have to be forgotten.

        Raises:
            BegunAnewError: ``life`` is over.
        """
        if 0 < life < self.number:
            raise BegunAnewError("the model has begun anew: start this trainer again")
        is_new = 0 < self.number < life
        self.number = max(life, self.number)
        return is_new

    def end(self, life: int) -> None:
        """End a life; the next one has no number yet."""
        self.number = max(self.number, life + 1)


def name_in(life: int, name: str) -> str:
    """The key of a name that belongs to a life."""
    return f"{life}/{name}" if life else name
