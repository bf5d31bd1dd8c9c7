"""The one place that decides which errors are worth another attempt, and for how long to try.

Errors of this package say it by their class, those of file systems and of stores' libraries by type, errno and HTTP
status. An error that nobody has classified counts as transient: another attempt does no harm, and attempts are bounded.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from flightedl.errors import FlightedlError, OutcomeUnknownError, ReplacedError, UnregisteredError

#: A store's library found no credentials.
CREDENTIALS_ERRORS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})

_PERMANENT_OF_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_MISTAKES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_PERMANENT_NAMES = CREDENTIALS_ERRORS | {"ParamValidationError"}
_PERMANENT_ERRNOS = frozenset({errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS})
#: Request timeout, too early, too many requests.
_TRANSIENT_CLIENT_STATUSES = frozenset({408, 425, 429})


def is_transient(error: BaseException) -> bool:
    """True if an attempt that looks up server and registration again may succeed.

    It may if nothing answered, if the outcome is unknown, and if only the addressee or the trainer's registration was
    out of date. Any other FencedError is permanent: the attempt stands for something that is over.
    """
    if isinstance(error, FlightedlError):
        return error.retryable or isinstance(error, OutcomeUnknownError | ReplacedError | UnregisteredError)
    if isinstance(error, (*_PERMANENT_OF_FILES, *_MISTAKES)) or type(error).__name__ in _PERMANENT_NAMES:
        return False
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _TRANSIENT_CLIENT_STATUSES
    return not (isinstance(error, OSError) and error.errno in _PERMANENT_ERRNOS)


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry policy: pauses that double, and a bound.

    Args:
        limit_s: No attempt begins later than this after the first one.
        first_pause_s: Seconds between the first two attempts.
        longest_pause_s: The longest pause between two attempts.
    """

    limit_s: float
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(self, error: BaseException, failures: int, elapsed_s: float) -> float | None:
        """Seconds to wait before the next attempt; None to give up.

        Args:
            error: Of the last attempt.
            failures: Failed attempts in a row, at least 1.
            elapsed_s: Since the first attempt began.
        """
        # The exponent is bounded as a float's is.
        pause_s = min(self.first_pause_s * 2.0 ** min(failures - 1, 100), self.longest_pause_s)
        return pause_s if is_transient(error) and elapsed_s + pause_s <= self.limit_s else None


#: For what a job cannot go on without.
PATIENT = Patience(limit_s=60.0)
#: For what can be done without, and for answers that a user waits for.
BRIEF = Patience(limit_s=2.0)
