"""The contract files say what the code does."""

from __future__ import annotations

import base64
import json

import numpy as np
import pyarrow as pa
import pytest

import flightedl_schemas
from flightedl.messages.base import decode
from flightedl.messages.parameters import PushHeader
from flightedl.wire.parts import decode_parts
from flightedl.wire.rows import decode_rows
from flightedl_tools import schemas


@pytest.mark.parametrize("name", flightedl_schemas.NAMES)
def test_the_file_is_what_the_code_writes(name: str) -> None:
    assert flightedl_schemas.load(name) == json.loads(json.dumps(schemas.current()[name])), "run `make schemas`"


def test_the_golden_row_still_decodes() -> None:
    golden = flightedl_schemas.load("golden")
    data = next(value for key, value in golden.items() if key.startswith("push row"))
    (row,) = decode_rows(pa.ipc.open_stream(base64.b64decode(data)).read_next_batch())
    assert (row.block, row.version) == (7, 3)
    np.testing.assert_array_equal(row.array(np.float32), [1.0, -2.5])


def test_the_golden_step_message_still_decodes() -> None:
    golden = flightedl_schemas.load("golden")
    data, packed = (
        base64.b64decode(next(value for key, value in golden.items() if key.startswith(name)))
        for name in ("step message", "header of that step message")
    )
    (part,) = decode_parts(pa.ipc.open_stream(data).read_next_batch(), packed)
    assert (part.blocks, part.version, part.outcome) == (range(7, 9), 3, 0)
    np.testing.assert_array_equal(np.frombuffer(part.data, np.float32), [1.0, -2.5])


def test_the_golden_header_still_decodes() -> None:
    header = decode(json.dumps(flightedl_schemas.load("golden")["push header"]).encode(), PushHeader)
    assert header.identity.batch == 3
