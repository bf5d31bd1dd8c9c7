"""Lives of a model: which evaluations, saved files and ``once`` names belong to the current model.

A life begins when the model is initialized. Results of one life are invalid in the next one, whose model has different
values. The number of a life is that of the election whose winner initialized the model, so it increases from life to
life. 0 means unknown: either the job has no model yet, or the name was stored before lives were introduced. Such a name
belongs to the first life that asks for it.
"""

from __future__ import annotations

from flightedl.errors import BegunAnewError


class PresentLife:
    """The current life of the model, as known to one owner of names."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def enter(self, life: int) -> bool:
        """Use a name in a life. True if the life is new, in which case names of the previous life must be dropped.

        Raises:
            BegunAnewError: ``life`` is over.
        """
        if 0 < life < self.number:
            raise BegunAnewError("the model was initialized again: restart this trainer")
        is_new = 0 < self.number < life
        self.number = max(life, self.number)
        return is_new

    def end(self, life: int) -> None:
        """End a life. The number of the next life is not known yet."""
        self.number = max(self.number, life + 1)


def name_in(life: int, name: str) -> str:
    """Return the key of a name in a life."""
    return f"{life}/{name}" if life else name
