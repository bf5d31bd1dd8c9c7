"""Messages of a step as a stream carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flightedl.wire.parts import batch_of, encode_message
from flightedl.wire.rows import OutgoingBlocks


def encode_parts(
    pieces: Sequence[OutgoingBlocks], attached: bytes = b"", **options: Any
) -> tuple[pa.RecordBatch | Any, bytes]:
    """Return a message's batch (None if it has none) and its header."""
    values, header, _ = encode_message(pieces, attached, **options)
    return None if values is None else batch_of(values), header
