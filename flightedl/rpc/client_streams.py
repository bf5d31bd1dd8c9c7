"""The client's end of calls and streams. Created by :mod:`flightedl.rpc.client`.

``ClientCall.run`` executes every operation of pyarrow. It maps pyarrow's errors to ours, and checks that the server
named in the reply is the expected one. Received batches are validated in the same way as on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar

import pyarrow as pa

from flightedl.errors import FlightedlError, OutcomeUnknownError, ReplacedError, UsageError
from flightedl.rpc.arrow_flight import flight
from flightedl.rpc.call import Message
from flightedl.rpc.errors import FOREIGN_ERRORS, decoded, from_wire
from flightedl.rpc.identity import ServerIdentity
from flightedl.rpc.line import Line, Lines
from flightedl.rpc.routes import TEXT_KEY
from flightedl.rpc.validation import BatchLimits, Tally, check_batch, check_schema, not_null_columns

_Result = TypeVar("_Result")

#: Limits for clients, which trust servers not to send too much. Batches are validated nevertheless.
_UNLIMITED = BatchLimits(batch_rows=1 << 62, batch_bytes=1 << 62, stream_rows=1 << 62, stream_bytes=1 << 62)


class ClientCall:
    """One call: its options, the expected server, and the server that answered."""

    __slots__ = ("_expected", "_reply_header", "_what", "is_checked", "options")

    def __init__(
        self,
        what: str,
        options: flight.FlightCallOptions,
        expected: ServerIdentity | None,
        reply_header: Callable[[], str | None],
    ) -> None:
        self._what = what
        self._expected = expected
        #: True if it is known that the expected server has answered.
        self.is_checked = expected is None
        self.options = options
        #: Returns the header that carries the server's identity, or None if it has not arrived.
        self._reply_header = reply_header

    def __str__(self) -> str:
        return self._what

    def run(self, operation: Callable[[], _Result]) -> _Result:
        """Execute an operation of pyarrow and map its errors to ours."""
        try:
            return operation()
        except FOREIGN_ERRORS as error:
            raise self.failure(error) from None

    def failure(self, error: BaseException) -> FlightedlError:
        """Convert an error of pyarrow to one of ours. Raises ReplacedError if another server has answered."""
        if decoded(error) is not None:
            self._check_place()
        return from_wire(error, doing=self._what)

    def check_server(self) -> None:
        """Raise ReplacedError unless the expected server has answered."""
        if self.is_checked or self._expected is None:
            return
        self._answered_by().check_meant_by(self._expected)
        self.is_checked = True

    def _check_place(self) -> None:
        """Check the server that sent a refusal. This server may not know its own index and generation yet."""
        if self._expected is None:
            return
        server = self._answered_by()
        if server.generation == 0:
            server.check_meant_by(replace(self._expected, index=server.index, generation=0))
        else:
            server.check_meant_by(self._expected)

    def _answered_by(self) -> ServerIdentity:
        header = self._reply_header()
        if header is None:
            raise ReplacedError(f"{self._what}: no server of this job answers there, but another program")
        return ServerIdentity.from_header(header)


class Download:
    """A stream of batches from the server. It can be iterated once.

    Yields pairs ``(batch, metadata)``. The batch is None if the message consists of metadata only.
    """

    __slots__ = ("_call", "_declared", "_is_ended", "_reader")

    def __init__(self, call: ClientCall, reader: flight.FlightStreamReader, declared: pa.Schema | None) -> None:
        self._call = call
        self._reader = reader
        self._declared = declared
        self._is_ended = False

    @property
    def schema(self) -> pa.Schema:
        found = self._call.run(lambda: self._reader.schema)
        self._call.check_server()
        if self._declared is not None:
            check_schema(found, self._declared)
        return found

    @property
    def text(self) -> bytes:
        """Text of a complete answer (``routes.Answer``); empty if the answer has no text."""
        return bytes((self.schema.metadata or {}).get(TEXT_KEY, b""))

    def __iter__(self) -> Iterator[Message]:
        not_null = not_null_columns(self.schema)
        while (chunk := self._call.run(lambda: _next_chunk(self._reader))) is not None:
            yield _checked(chunk, not_null)
        self._is_ended = True

    def end(self) -> None:
        """Cancel the stream unless it has been read to its end."""
        if not self._is_ended:
            self._is_ended = True
            with suppress(*FOREIGN_ERRORS):
                self._reader.cancel()


class ClientExchange:
    """A bidirectional stream. One thread writes; the same or another thread reads.

    If the ``with`` block ends with an exception, or before ``done_writing`` is called, the stream is aborted, and the
    server considers it incomplete. Otherwise the remaining answers are read and discarded, so that an error of the
    server is raised.
    """

    __slots__ = (
        "_call",
        "_is_done_writing",
        "_is_ended",
        "_lines",
        "_not_null",
        "_reader",
        "_schema",
        "_tally",
        "_writer",
        "columns",
        "timeout_s",
    )

    def __init__(
        self,
        call: ClientCall,
        writer: flight.FlightStreamWriter,
        reader: flight.FlightStreamReader,
        schema: pa.Schema,
        timeout_s: float,
        lines: Lines,
    ) -> None:
        self._call = call
        self._lines = lines
        #: Time limit of the entire stream.
        self.timeout_s = timeout_s
        self._writer = writer
        self._reader = reader
        self._schema = schema
        self._tally = Tally(schema, _UNLIMITED)
        self._not_null: list[int] | None = None
        self._is_done_writing = False
        self._is_ended = False
        #: Validated columns of the most recently received batch.
        self.columns: Sequence[pa.Array] = ()

    def __enter__(self) -> Self:
        try:
            self._call.run(lambda: self._writer.begin(self._schema))
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._is_done_writing:
            try:
                while self.read() is not None:
                    pass
            except BaseException as late:
                self._close(late)
                raise
        self._close(error)

    def cancel(self) -> None:
        """Abort the stream while another thread reads, which gets an error."""
        with suppress(*FOREIGN_ERRORS):
            self._reader.cancel()

    def have(self, line: Line) -> None:
        """Attach a line. It is closed with the stream, or when the calls of the connection are aborted."""
        self._lines.add(self, line)

    def _close(self, error: BaseException | None) -> None:
        self._lines.end(self)
        is_cancelled = not self._is_ended
        if is_cancelled:
            self._is_ended = True
            with suppress(*FOREIGN_ERRORS):
                self._reader.cancel()
        try:
            self._writer.close()
        except FOREIGN_ERRORS as late:
            if error is None and not is_cancelled:
                raise from_wire(late, doing=str(self._call)) from None

    def write(self, batch: pa.RecordBatch, metadata: bytes | None = None, *, size_bytes: int | None = None) -> int:
        """Send a batch. Return the size of its values in bytes. Blocks while the server does not read.

        Args:
            batch: A batch with the stream's schema.
            metadata: Metadata of the batch.
            size_bytes: Bytes of the batch's values, if the caller guarantees the schema. Then neither is computed or
                checked.
        """
        if size_bytes is None:
            check_fits(batch, self._schema)
            size_bytes = self._tally.add(batch)
        else:
            self._tally.add_known(batch.num_rows, size_bytes)
        try:
            if metadata is None:
                self._writer.write_batch(batch)
            else:
                self._writer.write_with_metadata(batch, metadata)
        except FOREIGN_ERRORS as error:
            raise self._call.failure(error) from None
        return size_bytes

    def write_metadata(self, metadata: bytes) -> None:
        """Send metadata without a batch. It must not begin with ``{"commit":``, which would end the upload."""
        self._call.run(lambda: self._writer.write_metadata(metadata))

    def done_writing(self) -> None:
        """Finish writing by sending the commit record."""
        self._call.run(lambda: self._writer.write_metadata(self._tally.commit_record()))
        self._call.run(self._writer.done_writing)
        self._is_done_writing = True

    def read(self) -> Message | None:
        """Return the next answer. Return None if the server has ended the stream, which it does only after success.

        Raises:
            FlightedlError: the server's error, or a failure of the connection.
        """
        # Release the old batch, so that the next one can reuse its memory.
        self.columns = ()
        if self._is_ended:
            return None
        call = self._call
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            chunk = None
        except FOREIGN_ERRORS as error:
            raise call.failure(error) from None
        if not call.is_checked:
            call.check_server()
        if chunk is None:
            self._is_ended = True
            return None
        batch, metadata = chunk.data, chunk.app_metadata
        if batch is not None:
            if self._not_null is None:
                self._not_null = not_null_columns(batch.schema)
            self.columns = check_batch(batch, _UNLIMITED, self._not_null)
        return batch, None if metadata is None else metadata.to_pybytes()

    def answer(self) -> Message:
        """Return the next answer. Raises the errors of ``read``, and OutcomeUnknownError if the stream ends first."""
        answer = self.read()
        if answer is None:
            raise OutcomeUnknownError(f"{self._call}: the server ended the stream before it had answered everything")
        return answer


def check_fits(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    """Raise UsageError unless the batch to be sent has the stream's schema."""
    if not batch.schema.equals(schema, check_metadata=False):
        raise UsageError(f"a batch with columns {batch.schema.names} does not fit a stream of {schema.names}")


def upload(
    call: ClientCall,
    writer: flight.FlightStreamWriter,
    reader: flight.FlightMetadataReader,
    schema: pa.Schema,
    batches: Iterable[tuple[pa.RecordBatch, bytes | None]],
) -> bytes:
    """Send all batches and the commit record. Return the server's acknowledgement."""
    tally = Tally(schema, _UNLIMITED)
    with _closing(call, writer):
        for batch, metadata in batches:
            check_fits(batch, schema)
            tally.add(batch)
            write = writer.write_batch if metadata is None else partial(writer.write_with_metadata, buf=metadata)
            call.run(partial(write, batch))
        call.run(lambda: writer.write_metadata(tally.commit_record()))
        call.run(writer.done_writing)
        acknowledgement = call.run(reader.read)
    call.check_server()
    if acknowledgement is None:
        raise OutcomeUnknownError(f"{call}: the upload ended without an acknowledgement")
    return acknowledgement.to_pybytes()  # type: ignore[no-any-return]


@contextmanager
def _closing(call: ClientCall, writer: flight.FlightStreamWriter) -> Iterator[None]:
    """Always close the writer. If a write failed, raise the server's error instead, which is more informative."""
    try:
        yield
    except BaseException as error:
        try:
            writer.close()
        except FOREIGN_ERRORS as late:
            answered = decoded(late)
            if answered is not None and isinstance(error, OutcomeUnknownError):
                raise answered from None
        raise
    call.run(writer.close)


def _next_chunk(reader: flight.FlightStreamReader) -> flight.FlightStreamChunk | None:
    try:
        return reader.read_chunk()
    except StopIteration:
        return None


def _checked(chunk: flight.FlightStreamChunk, not_null: list[int]) -> Message:
    batch, metadata = chunk.data, chunk.app_metadata
    if batch is not None:
        check_batch(batch, _UNLIMITED, not_null)
    if metadata is None:
        return batch, None
    # In a get, Flight cannot send metadata without a batch, so the metadata is sent with an empty batch.
    return (batch if batch is not None and batch.num_rows else None), metadata.to_pybytes()
