"""Values shown to the user's function where they lie when they come: no copy of the model in this process.

Who trains on a device has the model there, and needs no other one. Where trainer and pserver share memory, what is
shown lies in the pserver's own; nothing is copied on the way then.

Rules. A piece is a part of one parameter. It may be shown again, as it is or newer, because a stream broke off; it may
have changed while it was shown before, then. When the call that brought it returns, what was shown last was of one
version, and counts. A piece is lent until the function returns. Whoever keeps it would see other values there later, so
that is found out and refused; a copy may be kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError

#: Called with the parameter's name, the place of the first element in the flat parameter, and (n,) values, read-only.
Show = Callable[[str, int, npt.NDArray[Any]], object]


class Lending:
    """Shows pieces, one at a time, whatever thread they come on.

    Args:
        show: The user's function.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def show(self, name: str, start: int, data: memoryview, dtype: np.dtype[Any]) -> None:
        """Show what lies there. What goes wrong is kept for ``require``: the call goes on, so that others do, too."""
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
                    f"values of {name!r} were kept that were only lent: copy them, and wait until that is done, "
                    "before the function of model.lend_to returns"
                )

    def require(self) -> None:
        """Raise what went wrong, once: not all values that came were shown."""
        error, self._error = self._error, None
        if error is not None:
            raise error
