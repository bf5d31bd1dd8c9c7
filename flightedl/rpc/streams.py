"""The server's end of a stream. A handler can neither bypass the stream's checks nor use the stream after its end.

:class:`Incoming` is an upload (DoPut), and :class:`Exchange` is a bidirectional stream (DoExchange). Both return only
validated batches. Reading ends normally only after a commit record that matches the received batches; if the stream
breaks off, it raises an error. So a loop that has ended has received everything. The deadline is checked at every
message. After the handler has returned, neither object can be used, because pyarrow then frees its reader and writer.

Batches are read-only views of network memory and may be unaligned. Copy data that must outlive the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from flightedl.errors import DeadlineError, MessageError, UnavailableError, UsageError
from flightedl.rpc.arrow_flight import flight
from flightedl.rpc.call import Call, Message
from flightedl.rpc.errors import FOREIGN_ERRORS, shortened
from flightedl.rpc.identity import unsealed
from flightedl.rpc.line import Line
from flightedl.rpc.validation import BatchLimits, Tally, check_schema, is_commit_record

_Result = TypeVar("_Result")

_USED_TOO_LATE = "a stream was used after its handler returned"


class BrokenOffError(MessageError):
    """The client has disconnected, or has stopped writing without sending a commit record."""


class _Upload:
    """Reader of one direction of a stream, up to the commit record.

    ``read`` and ``Exchange.write`` make few function calls, because they run between messages of a megabyte each, when
    every Python frame costs a few cache misses.
    """

    __slots__ = ("_call", "_declared", "_is_open", "_limits", "_reader", "_tally", "columns", "is_complete")

    def __init__(
        self, reader: flight.MetadataRecordBatchReader, declared: pa.Schema, call: Call, limits: BatchLimits
    ) -> None:
        self._reader = reader
        self._declared = declared
        self._call = call
        self._limits = limits
        self._tally = Tally(declared, limits)
        self._is_open = False
        #: Validated columns of the most recently received batch.
        self.columns: Sequence[pa.Array] = ()
        #: True if a matching commit record has been received.
        self.is_complete = False

    def open(self) -> None:
        """Check the schema. In an exchange, wait for the first message. ``read`` calls this if needed."""
        call = self._call
        call.is_reading = True
        try:
            received = self._reader.schema
        except FOREIGN_ERRORS as error:
            raise _unreadable(error) from None
        finally:
            call.is_reading = False
        check_schema(received, self._declared)
        self._is_open = True

    def read(self) -> Message | None:
        """Return the client's next message. Return None after the commit record.

        Raises:
            MessageError: the schema is wrong, a batch is invalid, or the stream broke off.
            DeadlineError: the deadline has passed.
        """
        call, reader = self._call, self._reader
        # Release the old batch, so that the next one can reuse its memory.
        self.columns = ()
        if self.is_complete:
            return None
        if reader is None:
            raise UsageError(_USED_TOO_LATE)
        if not self._is_open:
            self.open()
        call.is_reading = True
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            chunk = None
        except FOREIGN_ERRORS as error:
            raise _unreadable(error) from None
        finally:
            call.is_reading = False
        if call.is_late:
            raise DeadlineError(f"{call.verb}: the time for this stream is over")
        if chunk is None:
            raise BrokenOffError("the upload broke off before its commit record; nothing of it counts")
        batch, metadata = chunk.data, chunk.app_metadata
        if batch is not None:
            self.columns = self._tally.take(batch)
            return batch, None if metadata is None else self._bytes(metadata)
        content = b"" if metadata is None else self._bytes(metadata)
        if not is_commit_record(content):
            return None, content
        self._tally.check(content)
        self._expect_end()
        return None

    def drain(self) -> None:
        while self.read() is not None:
            pass

    def end(self) -> None:
        """Release the transport. For use by the server only."""
        self._reader = None
        self.columns = ()

    def _expect_end(self) -> None:
        call = self._call
        call.is_reading = True
        try:
            self._reader.read_chunk()
        except StopIteration:
            self.is_complete = True
            return
        except FOREIGN_ERRORS as error:
            raise _unreadable(error) from None
        finally:
            call.is_reading = False
        raise MessageError("something follows the upload's commit record")

    def _bytes(self, metadata: pa.Buffer) -> bytes:
        if metadata.size > self._limits.metadata_bytes:
            raise MessageError(f"a message has {metadata.size} bytes of metadata, too many")
        content: bytes = metadata.to_pybytes()
        return content


class Incoming(_Upload):
    """An upload, which can be iterated once. Yields validated pairs ``(batch, metadata)`` up to the commit record.

    Iteration raises MessageError if the upload is invalid or breaks off, and DeadlineError after the deadline.
    """

    __slots__ = ()

    @property
    def schema(self) -> pa.Schema:
        return self._declared

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, bytes | None]]:
        while (message := self.read()) is not None:
            batch, metadata = message
            if batch is None:
                raise MessageError("an upload carries metadata without a batch before its commit record")
            yield batch, metadata


class Exchange(_Upload):
    """A bidirectional stream. One thread reads; the same or another thread writes.

    If the client writes more than a few MiB without reading, and the handler answers every message as it reads, both
    sides block until the deadline. ``client.model.step_channel`` avoids this.
    """

    __slots__ = ("_line", "_writer")

    def __init__(
        self,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        declared: pa.Schema,
        call: Call,
        limits: BatchLimits,
    ) -> None:
        super().__init__(reader, declared, call, limits)
        self._writer = writer
        self._line: Line | None = None

    def have(self, line: Line) -> None:
        self._line = line

    def begin(self, schema: pa.Schema) -> None:
        """Send the schema of the answers. Must be called once, before the first ``write``."""
        self._write(lambda writer: writer.begin(schema))

    def read_at_rest(self) -> Message | None:
        """Return the message that begins the next request (see ``at_rest``)."""
        return self.at_rest(self.read)

    def at_rest(self, read: Callable[[], _Result | None]) -> _Result | None:
        """Read the first message of the stream's next request. Return None after the client's last request.

        No request is in progress at this point, so it is not an error if the client disconnects or the deadline passes.

        Raises:
            MessageError: a batch is invalid.
        """
        call = self._call
        call.is_resting = True
        try:
            return read()
        except (BrokenOffError, DeadlineError):
            self.is_complete = True
            return None
        finally:
            call.is_resting = False

    def read_request(self) -> bytes | None:
        """Return the next request of a request stream, or None after the last one.

        Raises:
            MessageError: the message is not a request.
            DamagedError: the request does not match its checksum.
        """
        message = self.read_at_rest()
        if message is None:
            return None
        batch, request = message
        if batch is not None or request is None:
            raise MessageError(f"{self._call.verb}: a request on an open stream is metadata alone")
        return unsealed(request)

    def write(
        self,
        batch: pa.RecordBatch,
        metadata: bytes | None = None,
        *,
        size_bytes: int | None = None,  # noqa: ARG002 - used by the client's end
    ) -> None:
        """Send a batch. When this returns, the batch's memory may be reused.

        Raises:
            UnavailableError: the client has disconnected.
        """
        call, writer = self._call, self._writer
        if writer is None:
            raise UsageError(_USED_TOO_LATE)
        call.is_writing = True
        try:
            if metadata is None:
                writer.write_batch(batch)
            else:
                writer.write_with_metadata(batch, metadata)
        except FOREIGN_ERRORS as error:
            raise _unwritable(error) from None
        finally:
            call.is_writing = False

    def write_metadata(self, metadata: bytes) -> None:
        self._write(lambda writer: writer.write_metadata(metadata))

    def end(self) -> None:
        """Release the transport. For use by the server only."""
        super().end()
        self._writer = None
        if self._line is not None:
            self._line.close()

    def _write(self, operation: Callable[[flight.MetadataRecordBatchWriter], None]) -> None:
        if self._writer is None:
            raise UsageError(_USED_TOO_LATE)
        self._call.is_writing = True
        try:
            operation(self._writer)
        except FOREIGN_ERRORS as error:
            raise _unwritable(error) from None
        finally:
            self._call.is_writing = False


def _unreadable(error: BaseException) -> BrokenOffError:
    return BrokenOffError(f"the stream cannot be read: {shortened(str(error), 200)}")


def _unwritable(error: BaseException) -> UnavailableError:
    return UnavailableError(f"the client is gone: {shortened(str(error), 200)}")
