"""Shows values to the user's function in the memory in which they arrive, without a copy in this process.

A script that trains on a device keeps the model there and needs no other copy. If the trainer and a pserver share
memory, the values shown are in the pserver's memory and are never copied.

A piece is a part of one parameter. If a stream breaks, a piece may be shown again, with the same or newer values; in
that case, its values may have changed while it was shown the first time. When the call that requested the values
returns, each piece that was shown last is consistent and valid. A piece is lent until the function returns. Keeping it
longer is detected and is an error, because its memory will be overwritten; a copy may be kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError

#: Called with the parameter's name, the index of the first element in the flat parameter, and (n,) values, read-only.
Show = Callable[[str, int, npt.NDArray[Any]], object]


class Lending:
    """Shows pieces, one at a time, from any thread.

    Args:
        show: The user's function.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def show(self, name: str, start: int, data: memoryview, dtype: np.dtype[Any]) -> None:
        """Show values in place. ``require`` raises errors later, so that the call can finish for all pservers."""
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
        """Raise the stored error of ``show``, once. After an error, some values were not shown."""
        error, self._error = self._error, None
        if error is not None:
            raise error
