"""Lives of a model. They show whether an evaluation, a saved file or a ``once`` name belongs to the current model.

A life begins when the model is initialized. Its results are invalid in the next life, in which the model has other
values. A life's number is the election whose winner initialized the model, so numbers increase from life to life.

The number 0 means unknown: there is no model yet, or the name was stored by a version without lives. Names with number
0 belong to the first life that asks for them.
"""

from __future__ import annotations

from flightedl.errors import BegunAnewError


class PresentLife:
    """The current life of the model, as known to an owner of names."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def enter(self, life: int) -> bool:
        """Use a name in a life. True if the life is new; the caller must then drop the names of the previous life.

        Raises:
            BegunAnewError: ``life`` is over.
        """
        if 0 < life < self.number:
            raise BegunAnewError("the model was initialized again: restart this trainer")
        is_new = 0 < self.number < life
        self.number = max(life, self.number)
        return is_new

    def end(self, life: int) -> None:
        """End a life. The next life's number is not known yet."""
        self.number = max(self.number, life + 1)


def name_in(life: int, name: str) -> str:
    """Return the key under which a life stores a name."""
    return f"{life}/{name}" if life else name
