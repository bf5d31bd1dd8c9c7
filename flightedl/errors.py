"""The error tree, as one picture.

Every error that flightedl raises on purpose is one of these. ``code`` is what crosses the wire, ``retryable`` says
whether the *same* request may be sent again as it is. *Refused* (nothing happened) and *outcome unknown* (it may have
happened) are different branches, because whoever holds state must act differently on them.

::

    FlightedlError
    ├── UsageError              usage            the caller's input is wrong; says what to do
    │   ├── DataError           data             a file, chunk or record cannot be used
    │   └── GradientError       gradient         a gradient of wrong name, shape, dtype, or not finite
    ├── DeclarationError        declaration      the job was declared differently by somebody else
    ├── NotFoundError           not_found        the thing asked for does not exist
    ├── FencedError             fenced           what the request acts for is over (an attempt, a plan, an election,
    │   │                                        a lock): sending it again never helps; look at what is true now
    │   ├── ReplacedError       replaced         the server that was asked is not, or no longer, the one that was meant:
    │   │                                        look its successor up and send the same request there
    │   ├── StalePlacementError stale_placement  the blocks are not where the sender thinks: read the job's placement
    │   │                                        again and send the same request to their owner
    │   └── UnregisteredError   unregistered     the trainer's registration is over: register again, then ask again
    ├── CorruptError            corrupt          a checksum or a structure does not hold
    ├── MessageError            message          a message that does not follow the protocol
    ├── AuthenticationError     authentication   who is asking is not proven, or may not
    ├── JobFailedError          job_failed       the job cannot go on; the text says why
    │   └── RolledBackError     rolled_back      etcd has gone back: go on from the checkpoint with --resume
    ├── BegunAnewError          begun_anew       the model has new first values: start this trainer again
    ├── UnavailableError        unavailable      (retryable) not reachable or not ready; nothing happened
    │   ├── BusyError           busy             (retryable) admission limit; nothing happened
    │   ├── DamagedError        damaged          (retryable, also a CorruptError) a message was damaged on the way
    │   └── NotReadyError       not_ready        (retryable) the server is starting or waits for something it names
    ├── OutcomeUnknownError     outcome_unknown  the request may or may not have been carried out
    │   └── DeadlineError       deadline         ... because its deadline passed
    └── InternalError           internal         a bug; the server logged it under ``incident``
"""

from __future__ import annotations

from typing import ClassVar


class FlightedlError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is one sentence that says what to do."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False


class UsageError(FlightedlError):
    """The caller's input is wrong; sending it again cannot help."""

    code = "usage"


class DataError(UsageError):
    """A file, chunk or record cannot be used; names file and place."""

    code = "data"


class GradientError(UsageError):
    """A gradient has a wrong name, shape or dtype, or is not finite; names parameter and batch."""

    code = "gradient"


class DeclarationError(FlightedlError):
    """Another trainer declared this job differently. The text says the difference."""

    code = "declaration"


class NotFoundError(FlightedlError):
    """The thing asked for does not exist."""

    code = "not_found"


class FencedError(FlightedlError):
    """The sender acts for something that is no longer current. Nothing was done; the same request never succeeds."""

    code = "fenced"


class ReplacedError(FencedError):
    """The server is not the process that was meant; nothing was done. Its successor may be asked the same."""

    code = "replaced"


class StalePlacementError(FencedError):
    """Blocks are not, or not yet, on the pserver that was asked. Read the placement and ask their owner the same."""

    code = "stale_placement"


class UnregisteredError(FencedError):
    """The sender's lease is over, or it has registered again since; nothing was done. Ask under a new registration."""

    code = "unregistered"


class CorruptError(FlightedlError):
    """Stored or received bytes do not match their checksum or structure; nothing was applied."""

    code = "corrupt"


class MessageError(FlightedlError):
    """A message does not follow the protocol; nothing was applied."""

    code = "message"


class AuthenticationError(FlightedlError):
    """The sender is not authenticated, or may not send this request."""

    code = "authentication"


class JobFailedError(FlightedlError):
    """The job cannot go on; the text says why and what to do."""

    code = "job_failed"


class RolledBackError(JobFailedError):
    """etcd is not the one that was seen, or older: nothing it says may be mixed with what this process knows."""

    code = "rolled_back"


class BegunAnewError(FlightedlError):
    """The model's values were lost and it begins anew; what this process has is of the old one: start it again."""

    code = "begun_anew"


class UnavailableError(FlightedlError):
    """The peer is not reachable or not ready; nothing happened, ask again."""

    code = "unavailable"
    retryable = True


class BusyError(UnavailableError):
    """The peer is at its admission limit; nothing happened, ask again later."""

    code = "busy"


class DamagedError(CorruptError, UnavailableError):
    """A message does not match its checksum; nothing of it was applied: send it again."""

    code = "damaged"


class NotReadyError(UnavailableError):
    """The peer is starting, or waits for something that the text names; ask again."""

    code = "not_ready"


class OutcomeUnknownError(FlightedlError):
    """The request may or may not have been carried out. Only idempotent requests may be repeated."""

    code = "outcome_unknown"


class DeadlineError(OutcomeUnknownError):
    """The deadline passed before the reply."""

    code = "deadline"


class InternalError(FlightedlError):
    """A bug on the other side, logged there under the incident number in the text."""

    code = "internal"


def _tree(root: type[FlightedlError]) -> dict[str, type[FlightedlError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


#: Every class of the tree by its wire code.
ERRORS_BY_CODE: dict[str, type[FlightedlError]] = _tree(FlightedlError)


#: Exit codes of all processes. 1: failed, maybe not next time. 2: the input must be changed. 3: the job cannot go on.
#: 75 (EX_TEMPFAIL of sysexits.h): nothing is wrong with the job, start this process again.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_JOB_FAILED = 3
EXIT_START_AGAIN = 75


def exit_code_of(error: FlightedlError) -> int:
    """The code a process ends with because of this error."""
    if isinstance(error, UsageError | DeclarationError):
        return EXIT_USAGE
    if isinstance(error, JobFailedError):
        return EXIT_JOB_FAILED
    is_passing = error.retryable or isinstance(error, FencedError | OutcomeUnknownError | BegunAnewError)
    return EXIT_START_AGAIN if is_passing else EXIT_FAILED
