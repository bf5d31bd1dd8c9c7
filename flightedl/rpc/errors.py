"""Encode errors: our own by their code, lack of memory as *busy*, all others as *internal* with an incident number.

An encoded error is a FlightError. Its text is ``code: sentence``, at most 512 bytes: gRPC changes the type of
exceptions with more than 5 kB of text, and loses texts of more than 16 kB. Its ``extra_info`` is ``{"code",
"retryable", "text"}``, at most 1 kB. The gRPC status corresponds to the code, for clients in other languages.

Tracebacks, paths and messages of foreign exceptions never leave the server. It logs them together with an incident
number, which it sends to the client.

The client maps exceptions of pyarrow to our errors. The first rule that matches applies:

* ``extra_info`` with a known code becomes the class of that code.
* FlightUnavailableError without a connection becomes UnavailableError, because nothing was done.
* ArrowInvalid with the text "FlightClient is closed" becomes UsageError.
* FlightTimedOutError becomes DeadlineError.
* FlightUnauthenticatedError and FlightUnauthorizedError become AuthenticationError.
* ArrowNotImplementedError becomes MessageError: the peer does not know this method.
* FlightUnavailableError, FlightCancelledError, OSError, ArrowInvalid, ArrowKeyError and any other ArrowException become
  OutcomeUnknownError: the connection broke after the request may have been sent.
"""

from __future__ import annotations

import logging
import uuid

import msgspec
import pyarrow as pa

from flightedl.errors import (
    ERRORS_BY_CODE,
    AuthenticationError,
    BusyError,
    DeadlineError,
    FlightedlError,
    InternalError,
    MessageError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from flightedl.messages.decoding import from_json
from flightedl.rpc.arrow_flight import flight

logger = logging.getLogger(__name__)

MESSAGE_LIMIT_BYTES = 512
DETAIL_LIMIT_BYTES = 1024
_TEXT_LIMIT_BYTES = 460

#: Exceptions that pyarrow's client raises. Any other exception is a bug of ours and is not caught.
FOREIGN_ERRORS = (flight.FlightError, pa.ArrowException, OSError)

#: gRPC's messages about a missing connection. In these cases, the request cannot have arrived.
_NEVER_SENT = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_TLS_TROUBLE = ("handshake failed", "SSL_ERROR", "CERTIFICATE_VERIFY_FAILED", "Peer name")


class _Detail(msgspec.Struct, frozen=True):
    code: str
    retryable: bool = False
    text: str = ""


def shortened(text: str, limit_bytes: int) -> str:
    """Return a text as one printable line of at most ``limit_bytes`` bytes in UTF-8."""
    line = "".join(character if character.isprintable() else " " for character in text[: limit_bytes + 1])
    data = line.encode(errors="replace")
    if len(data) <= limit_bytes:
        return data.decode()
    return data[: limit_bytes - 3].decode(errors="ignore") + "..."


def to_wire(error: BaseException, *, doing: str) -> flight.FlightError:
    """Return the FlightError to send to the client. Log the details that the client must not see.

    Args:
        error: Exception that a handler raised.
        doing: Operation of the server, for the log.
    """
    if isinstance(error, MemoryError):
        logger.warning("the server has too little free memory: doing=%s", doing)
        error = BusyError("the server has too little free memory for this request")
    if not isinstance(error, FlightedlError):
        incident = uuid.uuid4().hex[:12]
        logger.error("request failed: incident=%s doing=%s", incident, doing, exc_info=error)
        error = InternalError(f"the server met a bug and logged it as incident {incident}")
    text = shortened(str(error), _TEXT_LIMIT_BYTES)
    detail = msgspec.json.encode(_Detail(error.code, error.retryable, text))
    if len(detail) > DETAIL_LIMIT_BYTES:
        detail = msgspec.json.encode(_Detail(error.code, error.retryable, shortened(text, _TEXT_LIMIT_BYTES // 3)))
    kind = next(kind for ours, kind in _FLIGHT_CLASSES if isinstance(error, ours))
    return kind(shortened(f"{error.code}: {text}", MESSAGE_LIMIT_BYTES), extra_info=detail)


#: gRPC status by class of error. The first class that matches determines the status.
_FLIGHT_CLASSES = (
    (UnavailableError, flight.FlightUnavailableError),
    (AuthenticationError, flight.FlightUnauthenticatedError),
    (DeadlineError, flight.FlightTimedOutError),
    (InternalError, flight.FlightInternalError),
    (FlightedlError, flight.FlightServerError),
)


def from_wire(error: BaseException, *, doing: str) -> FlightedlError:
    """Convert an exception of pyarrow's client to one of our errors, using the list in the module's docstring.

    Args:
        error: One of ``FOREIGN_ERRORS``.
        doing: Operation of the client, and the server, for the beginning of the text.
    """
    answered = decoded(error)
    if answered is not None:
        return answered
    whole = _innermost(str(error))
    reason = shortened(whole, 300)
    if isinstance(error, flight.FlightUnavailableError) and any(words in whole for words in _NEVER_SENT):
        if any(words in whole for words in _TLS_TROUBLE):
            # What is wrong with a certificate comes last, after addresses and the names of layers.
            reason = shortened(whole.rpartition("SSL routines:")[2].strip(": "), 300)
            return AuthenticationError(f"{doing}: no secure connection, check both sides' certificates: {reason}")
        return UnavailableError(f"{doing}: not reachable: {reason.rpartition(': ')[2]}")
    if isinstance(error, pa.ArrowInvalid) and "FlightClient is closed" in reason:
        return UsageError(f"{doing}: this connection is closed")
    if isinstance(error, flight.FlightTimedOutError):
        return DeadlineError(f"{doing}: no answer in time")
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return AuthenticationError(f"{doing}: refused: {reason}")
    if isinstance(error, pa.ArrowNotImplementedError):
        return MessageError(f"{doing}: the peer does not know this method")
    return OutcomeUnknownError(f"{doing}: broken off: {reason}")


def decoded(error: BaseException) -> FlightedlError | None:
    """Return the error that one of our servers sent, or None if the exception contains none."""
    detail = getattr(error, "extra_info", None)
    if not detail:
        return None
    try:
        answer = from_json(detail, _Detail)
    except msgspec.MsgspecError:
        return None
    fallback = UnavailableError if answer.retryable else FlightedlError
    return ERRORS_BY_CODE.get(answer.code, fallback)(answer.text or answer.code)


def _innermost(text: str) -> str:
    text = text.partition(" gRPC client debug context:")[0]
    return text.rpartition("with message: ")[2].rstrip(". ")
