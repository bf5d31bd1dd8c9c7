"""All error classes as one tree.

Every error that flightedl raises deliberately has one of these classes. ``code`` identifies the class on the wire.
``retryable`` is true if the *same* request may be sent again unchanged. *Rejected* (the request had no effect) and
*outcome unknown* (it may have had one) are separate branches, because callers with state must handle them differently.

::

    FlightedlError
    ├── UsageError              usage            the caller's input is wrong; says what to do
    │   ├── DataError           data             a file, chunk or record cannot be used
    │   └── GradientError       gradient         a gradient of wrong name, shape, dtype, or not finite
    ├── DeclarationError        declaration      another process declared the job differently
    ├── NotFoundError           not_found        the requested object does not exist
    ├── FencedError             fenced           the request belongs to something that is over (an attempt, a plan, an
    │   │                                        election, a lock): never repeat it; read the current state first
    │   ├── ReplacedError       replaced         the server is not, or no longer, the intended one: look its successor
    │   │                                        up and send the same request there
    │   ├── StalePlacementError stale_placement  the blocks are not where the sender expects: read the job's placement
    │   │                                        again and send the same request to their owner
    │   └── UnregisteredError   unregistered     the trainer's registration is over: register again, then retry
    ├── CorruptError            corrupt          a checksum or a structure is violated
    ├── MessageError            message          a message violates the protocol
    ├── AuthenticationError     authentication   the sender is not authenticated, or not authorized
    ├── JobFailedError          job_failed       the job cannot continue; the text gives the reason
    │   └── RolledBackError     rolled_back      etcd has gone back: continue from the checkpoint with --resume
    ├── BegunAnewError          begun_anew       the model was initialized again: restart this trainer
    ├── UnavailableError        unavailable      (retryable) not reachable or not ready; nothing happened
    │   ├── BusyError           busy             (retryable) admission limit; nothing happened
    │   ├── DamagedError        damaged          (retryable, also a CorruptError) a message was damaged in transit
    │   └── NotReadyError       not_ready        (retryable) the server is starting or waiting; the text says why
    ├── OutcomeUnknownError     outcome_unknown  the request may or may not have been executed
    │   └── DeadlineError       deadline         ... because its deadline passed
    └── InternalError           internal         a bug; the server logged it under ``incident``
"""

from __future__ import annotations

from typing import ClassVar


class FlightedlError(Exception):
    """Base class of all errors raised deliberately. ``str(error)`` is one sentence that says what to do."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False


class UsageError(FlightedlError):
    """The caller's input is wrong, so a retry cannot help."""

    code = "usage"


class DataError(UsageError):
    """A file, chunk or record is unusable. The message names the file and the location in the file."""

    code = "data"


class GradientError(UsageError):
    """A gradient has a wrong name, shape or dtype, or is not finite. The message names the parameter and the batch."""

    code = "gradient"


class DeclarationError(FlightedlError):
    """Another trainer has declared this job differently. The message names the difference."""

    code = "declaration"


class NotFoundError(FlightedlError):
    """The requested object does not exist."""

    code = "not_found"


class FencedError(FlightedlError):
    """The sender's registration, view or plan is outdated. The request had no effect and can never succeed."""

    code = "fenced"


class ReplacedError(FencedError):
    """The server is not the intended process. The request had no effect and may be sent to that process's successor."""

    code = "replaced"


class StalePlacementError(FencedError):
    """The pserver does not own the blocks, or not yet. Read the placement, and send the request to their owner."""

    code = "stale_placement"


class UnregisteredError(FencedError):
    """The sender's lease has ended, or it has registered again. The request had no effect; retry after registering."""

    code = "unregistered"


class CorruptError(FlightedlError):
    """Stored or received bytes do not match their checksum or have a wrong structure. Nothing was applied."""

    code = "corrupt"


class MessageError(FlightedlError):
    """A message violates the protocol. Nothing was applied."""

    code = "message"


class AuthenticationError(FlightedlError):
    """The sender is not authenticated, or may not send this request."""

    code = "authentication"


class JobFailedError(FlightedlError):
    """The job cannot continue. The message says why, and what to do."""

    code = "job_failed"


class RolledBackError(JobFailedError):
    """etcd is another cluster, or its state is older than before. This process must not use that state."""

    code = "rolled_back"


class BegunAnewError(FlightedlError):
    """The model was initialized again after its values were lost. This process has the old state. Restart it."""

    code = "begun_anew"


class UnavailableError(FlightedlError):
    """The peer is unreachable or not ready. The call had no effect and can be retried."""

    code = "unavailable"
    retryable = True


class BusyError(UnavailableError):
    """The peer is at its admission limit. The call had no effect and can be retried later."""

    code = "busy"


class DamagedError(CorruptError, UnavailableError):
    """A message does not match its checksum. No part of it was applied, and it can be sent again."""

    code = "damaged"


class NotReadyError(UnavailableError):
    """The peer is starting, or waiting for something that the message names. The call can be retried."""

    code = "not_ready"


class OutcomeUnknownError(FlightedlError):
    """The request may or may not have been executed. It may be repeated only if it is idempotent."""

    code = "outcome_unknown"


class DeadlineError(OutcomeUnknownError):
    """The reply did not arrive before the deadline."""

    code = "deadline"


class InternalError(FlightedlError):
    """The peer has a bug. The peer has logged the error under the incident number in the message."""

    code = "internal"


def _tree(root: type[FlightedlError]) -> dict[str, type[FlightedlError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


#: Wire code -> error class.
ERRORS_BY_CODE: dict[str, type[FlightedlError]] = _tree(FlightedlError)


#: Exit codes of all processes. 1: failed, but a retry may succeed. 2: the input must be changed. 3: the job cannot
#: continue. 75 (EX_TEMPFAIL in sysexits.h): the job continues, but this process must be restarted.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_JOB_FAILED = 3
EXIT_START_AGAIN = 75


def exit_code_of(error: FlightedlError) -> int:
    """Return the exit code of a process that ends because of this error."""
    if isinstance(error, UsageError | DeclarationError):
        return EXIT_USAGE
    if isinstance(error, JobFailedError):
        return EXIT_JOB_FAILED
    is_passing = error.retryable or isinstance(error, FencedError | OutcomeUnknownError | BegunAnewError)
    return EXIT_START_AGAIN if is_passing else EXIT_FAILED
