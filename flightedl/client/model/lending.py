"""Show values to the user's function in the memory where they arrive, without copying them in this process.

A script that trains on a device keeps the model there, so a second copy in host memory would be useless. If the trainer
and a pserver share memory, the function reads the values in the pserver's memory, and they are never copied.

A piece is a range of one parameter's values. If a stream breaks, a piece may be shown again, with the same or newer
values. In this case, its values may have changed while they were shown the first time. When the call that requested the
values returns, the values shown last are consistent for every piece.

The user's function may use the memory of a piece only until it returns, because the memory will be overwritten. It may
keep a copy. Keeping the memory itself is detected and raises an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError

#: The user's function. Its arguments are the parameter's name, the index of the first element in the flattened
#: parameter, and (n,) read-only values.
Show = Callable[[str, int, npt.NDArray[Any]], object]


class Lending:
    """Passes pieces to the user's function, one at a time. Any thread may call it.

    Args:
        show: The user's function.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def show(self, name: str, start: int, data: memoryview, dtype: np.dtype[Any]) -> None:
        """Show values in place. Store errors for ``require``, so that the call can finish for all pservers."""
        with self._lock:
            if self._error is not None:
                return
            values = np.frombuffer(data, dtype)
            values.flags.writeable = False
            alive = weakref.ref(values)
            try:
                self._show(name, start, values)
            except Exception as error:  # noqa: BLE001 - raised in the user's thread
                self._error = error
            del values
            if alive() is not None and self._error is None:
                self._error = UsageError(
                    f"values of {name!r} were kept, but were only lent: copy them, and wait until the copy is done, "
                    "before the function of model.lend_to returns"
                )

    def require(self) -> None:
        """Raise and forget the first error of ``show``, if any. After an error, some values were not shown."""
        error, self._error = self._error, None
        if error is not None:
            raise error
