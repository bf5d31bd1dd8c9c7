"""Count calls instead of time, because the number does not depend on the machine."""

import sys


def calls_of(function):
    """Return the number of calls of Python and C functions that ``function`` makes."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
