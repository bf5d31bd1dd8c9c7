"""The server's side of a stream, wrapped so that a handler can neither miss a check nor keep it.

:class:`Incoming` is an upload (DoPut), :class:`Exchange` both directions (DoExchange). Reading either gives checked
batches only, and ends normally only after a commit record that agrees with what arrived: a stream that broke off
raises, so "the loop ended" means "everything is here". The deadline is checked at every message. Both are dead after
the handler returned: pyarrow's reader and writer would be freed memory then.

Batches are views of network memory, read-only and at any address; copy what outlives the batch.
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
    """The client is gone, or ended its writing without a commit record."""


class _Upload:
    """Reads one direction of a stream up to its commit record.

    ``read`` and ``Exchange.write`` are written flat: they run between two messages of a megabyte, when every frame of
    Python costs a few cache misses.
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
        #: Of the batch that was read last, checked.
        self.columns: Sequence[pa.Array] = ()
        #: Whether the commit record was seen and agreed.
        self.is_complete = False

    def open(self) -> None:
        """Compare the schema; waits for the first message of an exchange. The first ``read`` does it, too."""
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
        """The client's next message, or None when it has written all and said so.

        Raises:
            MessageError: wrong schema, unsound batch, or the client broke off.
            DeadlineError: the stream's time is over.
        """
        call, reader = self._call, self._reader
        # Its memory is where the next batch should come to.
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
        """Read and check what is left."""
        while self.read() is not None:
            pass

    def end(self) -> None:
        """Let go of the transport; the server calls it, nobody else."""
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
    """An upload. Iterate it once: checked ``(batch, metadata)`` pairs, ending only when it is complete.

    Iteration raises MessageError for whatever is wrong with the upload, among it that it broke off, and DeadlineError.
    """

    __slots__ = ()

    @property
    def schema(self) -> pa.Schema:
        """The declared schema, which is the upload's."""
        return self._declared

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, bytes | None]]:
        while (message := self.read()) is not None:
            batch, metadata = message
            if batch is None:
                raise MessageError("an upload carries metadata without a batch before its commit record")
            yield batch, metadata


class Exchange(_Upload):
    """Both directions of a stream. One thread reads, and one, perhaps the same, writes.

    A client that writes more than a few MiB without reading the answers, to a handler that answers as it reads, stops
    both for ever but for the deadline: see ``client.model.step_channel``.
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
        """The stream has a line beside it, which ends with it."""
        self._line = line

    def begin(self, schema: pa.Schema) -> None:
        """Announce the schema of the answers; once, before the first ``write``."""
        self._write(lambda writer: writer.begin(schema))

    def read_at_rest(self) -> Message | None:
        """Return the message that begins the next request, see ``at_rest``."""
        return self.at_rest(self.read)

    def at_rest(self, read: Callable[[], _Result | None]) -> _Result | None:
        """Read the message that begins the stream's next request; None if the client wants no more.

        Nothing is under way meanwhile, so the client may as well be gone, or the stream's time be over.

        Raises:
            MessageError: unsound batch.
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
        """The next request of a stream that carries many, each a message of metadata alone; None: as ``read_at_rest``.

        Raises:
            MessageError: it is no request.
            DamagedError: it was damaged on the way.
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
        size_bytes: int | None = None,  # noqa: ARG002 - a client counts what it sends
    ) -> None:
        """Send a batch. It may still be on its way when this returns, but its memory is no longer needed.

        Raises:
            UnavailableError: the client is gone.
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
        """Send metadata alone."""
        self._write(lambda writer: writer.write_metadata(metadata))

    def end(self) -> None:
        """Let go of the transport; the server calls it, nobody else."""
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
