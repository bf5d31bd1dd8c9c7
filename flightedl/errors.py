"""All error classes as one tree.

Every error that flightedl raises deliberately has one of these classes. ``code`` identifies the class on the wire.
``retryable`` is true if the *same* request may be sent again unchanged. *Rejected* (the request had no effect) and
*outcome unknown* (it may have had one) are separate branches, because callers with state must handle them differently.
``fault`` says what failed if the error was raised while data was read: the store, the decoder (damaged content), the
user's code, or this machine. It is empty for errors that blame none of them, such as wrong declarations.

::

    FlightedlError
    ├── UsageError              usage            the caller's input is wrong; says what to do
    │   ├── DataError           data             a file, chunk or record cannot be used
    │   │   ├── StoreError      store            the store lacks a file or refuses to read it
    │   │   ├── UserCodeError   user_code        the user's transform=, decode= or filter failed
    │   │   ├── LossyError      lossy            a conversion would change values
    │   │   └── LostDataError   lost_data        the loop is over, but some batches were set aside
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
    ├── MachineError            machine          this machine cannot do it; another one may
    │   └── UnsupportedError    unsupported      (also a DataError) it lacks a package, codec or kernel
    ├── MessageError            message          a message violates the protocol
    ├── AuthenticationError     authentication   the sender is not authenticated, or not authorized
    ├── JobFailedError          job_failed       the job cannot continue; the text gives the reason
    │   └── RolledBackError     rolled_back      etcd has gone back: continue from the checkpoint with --resume
    ├── TrainerFailedError      trainer_failed   only this trainer fails again and again; the job continues without it
    ├── BegunAnewError          begun_anew       the model was initialized again: restart this trainer
    ├── UnavailableError        unavailable      (retryable) not reachable or not ready; nothing happened
    │   ├── BusyError           busy             (retryable) admission limit; nothing happened
    │   ├── ExhaustedError      exhausted        (retryable, also a MachineError) memory, files or disk are used up now
    │   ├── DamagedError        damaged          (retryable, also a CorruptError) a message was damaged in transit
    │   └── NotReadyError       not_ready        (retryable) the server is starting or waiting; the text says why
    ├── OutcomeUnknownError     outcome_unknown  the request may or may not have been executed
    │   └── DeadlineError       deadline         ... because its deadline passed
    └── InternalError           internal         a bug; the server logged it under ``incident``
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

#: What failed while data was read; empty if none of these is to blame.
Fault: TypeAlias = Literal["", "store", "decoder", "code", "machine"]


class FlightedlError(Exception):
    """Base class of all errors raised deliberately. ``str(error)`` is one sentence that says what to do."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    fault: ClassVar[Fault] = ""


class UsageError(FlightedlError):
    """The caller's input is wrong, so a retry cannot help."""

    code = "usage"


class DataError(UsageError):
    """A file, chunk or record is unusable. The message names the file and the location in the file."""

    code = "data"


class StoreError(DataError):
    """The store does not have a file, or refuses to read it. The content is unknown."""

    code = "store"
    fault: ClassVar[Fault] = "store"


class UserCodeError(DataError):
    """The user's ``transform=``, ``decode=``, ``types=`` or filter failed at a record. The record itself was read."""

    code = "user_code"
    fault: ClassVar[Fault] = "code"


class LossyError(DataError):
    """The format of a conversion changes values, so nothing was written. The message names the columns."""

    code = "lossy"


class LostDataError(DataError):
    """All epochs are done, but without some batches. The message names their files and records."""

    code = "lost_data"


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
    fault: ClassVar[Fault] = "decoder"


class MachineError(FlightedlError):
    """This machine cannot do what was requested. Another machine may, so the request and the data are not at fault."""

    code = "machine"
    fault: ClassVar[Fault] = "machine"


class UnsupportedError(MachineError, DataError):
    """The software on this machine lacks a package, codec or kernel that the data needs. The message names it."""

    code = "unsupported"


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


class TrainerFailedError(FlightedlError):
    """This trainer fails again and again, so it gets no more work. The job continues without it."""

    code = "trainer_failed"


class BegunAnewError(FlightedlError):
    """The model was initialized again after its values were lost. This process has the old state. Restart it."""

    code = "begun_anew"


class UnavailableError(FlightedlError):
    """The peer is unreachable or not ready. The call had no effect and can be retried."""

    code = "unavailable"
    retryable = True
    fault: ClassVar[Fault] = "store"


class BusyError(UnavailableError):
    """The peer is at its admission limit. The call had no effect and can be retried later."""

    code = "busy"


class DamagedError(CorruptError, UnavailableError):
    """A message does not match its checksum. No part of it was applied, and it can be sent again."""

    code = "damaged"


class ExhaustedError(MachineError, UnavailableError):
    """Memory, open files or disk space of this machine are used up. The same call may succeed later."""

    code = "exhausted"


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
#: continue. 4: the job has ended, but its results are incomplete. 75 (EX_TEMPFAIL in sysexits.h): the job continues,
#: but this process must be restarted. 130: Ctrl-C. 256: the process has ended, but its exit status could not be read.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_JOB_FAILED = 3
EXIT_INCOMPLETE = 4
EXIT_START_AGAIN = 75
EXIT_INTERRUPTED = 130
EXIT_UNKNOWN = 256


def is_clean(exit_code: int) -> bool:
    """True if a process has done everything that its script wanted to do, so that nothing must be done again."""
    return exit_code == 0


def has_finished(exit_code: int) -> bool:
    """True if nothing is left to do for a trainer. Its script may have failed because of data that cannot be used."""
    return is_clean(exit_code) or exit_code == EXIT_INCOMPLETE


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that ends because of this error; None if its script has ended without one."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if not isinstance(error, FlightedlError):
        return EXIT_FAILED
    if isinstance(error, LostDataError):
        return EXIT_INCOMPLETE
    if isinstance(error, UsageError | DeclarationError) and not isinstance(error, UserCodeError | LossyError):
        return EXIT_USAGE
    if isinstance(error, JobFailedError):
        return EXIT_JOB_FAILED
    is_passing = error.retryable or isinstance(error, FencedError | OutcomeUnknownError | BegunAnewError)
    return EXIT_START_AGAIN if is_passing else EXIT_FAILED
