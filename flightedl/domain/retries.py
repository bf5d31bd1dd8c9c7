"""Decides which errors are worth retrying, and limits the retries.

Errors of this package are classified by class. Errors of file systems and of stores' libraries are classified by type,
errno and HTTP status. Unknown errors count as transient, because another attempt does no harm and the number of
attempts is limited.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from flightedl.errors import (
    ExhaustedError,
    Fault,
    FlightedlError,
    MachineError,
    OutcomeUnknownError,
    ReplacedError,
    UnregisteredError,
    UnsupportedError,
)

#: Errors of a store's library that has found no credentials.
CREDENTIALS_ERRORS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})

_PERMANENT_OF_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_MISTAKES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_PERMANENT_NAMES = CREDENTIALS_ERRORS | {"ParamValidationError"}
_PERMANENT_ERRNOS = frozenset({errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS})
#: Errors of a machine's memory, open files and disks, which neither a store nor the content of a file has caused.
_MACHINE_ERRNOS = frozenset(
    {errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
)
#: HTTP status codes: request timeout, too early, too many requests.
_TRANSIENT_CLIENT_STATUSES = frozenset({408, 425, 429})


def is_transient(error: BaseException) -> bool:
    """True if another attempt, which looks up the server and the registration again, may succeed.

    A retry may succeed if there was no answer, if the outcome is unknown, or if only the recipient or the trainer's
    registration was outdated. Any other FencedError is permanent, because the sender itself is outdated.
    """
    if isinstance(error, FlightedlError):
        return error.retryable or isinstance(error, OutcomeUnknownError | ReplacedError | UnregisteredError)
    if isinstance(error, (*_PERMANENT_OF_FILES, *_MISTAKES)) or type(error).__name__ in _PERMANENT_NAMES:
        return False
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _TRANSIENT_CLIENT_STATUSES
    return not (isinstance(error, OSError) and error.errno in _PERMANENT_ERRNOS)


def machine_error(error: BaseException, what: str) -> MachineError | None:
    """Return the error to raise if this machine has caused ``error``, otherwise None. ``what`` begins the message."""
    text = (" ".join(str(error).split()) or type(error).__name__)[:300]
    if isinstance(error, MachineError):
        return error
    if isinstance(error, MemoryError):
        return ExhaustedError(f"{what}: this machine has too little free memory ({text})")
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS:
        return ExhaustedError(f"{what}: this machine's limits or disks prevent it ({text})")
    if isinstance(error, ImportError):
        return UnsupportedError(f"{what}: this machine lacks a package ({text}); install it")
    return None


def fault_of(error: BaseException) -> Fault:
    """Return what is at fault for an error that occurred while a batch was read or processed; empty if unknown."""
    found = error if isinstance(error, FlightedlError) else machine_error(error, "")
    return "" if found is None else found.fault


@dataclass(frozen=True, slots=True)
class Patience:
    """A retry policy: pauses that double, and a time limit.

    Args:
        limit_s: Maximum seconds between the starts of the first and the last attempt.
        first_pause_s: Seconds between the first two attempts.
        longest_pause_s: Maximum seconds between two attempts.
    """

    limit_s: float
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(self, error: BaseException, failures: int, elapsed_s: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        Args:
            error: Error of the last attempt.
            failures: Number of consecutive failed attempts, at least 1.
            elapsed_s: Seconds since the start of the first attempt.
        """
        # Limit the exponent, because a float cannot exceed about 2**1024.
        pause_s = min(self.first_pause_s * 2.0 ** min(failures - 1, 100), self.longest_pause_s)
        return pause_s if is_transient(error) and elapsed_s + pause_s <= self.limit_s else None


#: Policy for data without which a job cannot continue.
PATIENT = Patience(limit_s=60.0)
#: Policy for optional data, and for replies that a user is waiting for.
BRIEF = Patience(limit_s=2.0)
