"""Count calls in place of time: the count does not depend on the machine."""

import sys


def calls_of(function):
    """Return the number of calls of Python's and C's functions that ``function`` makes."""
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
