"""Read and write trained models as single files for other programs: safetensors, NumPy's npz, or Arrow.

* ``safetensors``: the size of the header in eight bytes, a JSON header (name -> dtype, shape, offsets), and the arrays.
  The format is simple enough to be implemented here without a dependency. Parameters are streamed one at a time.
* ``npz``: uncompressed, with one member per parameter. bfloat16 is written as float32, because NumPy has no name for
  bfloat16.
* ``arrow``: an Arrow IPC file with one row per parameter: name, dtype, shape, and values as little-endian bytes.

Parameters have their declared dtype. For a 16-bit parameter, its float32 master copy is rounded to nearest even.
Reading never executes code from a file. Malformed content is rejected with an error that contains the location.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.retries import machine_error
from flightedl.errors import DataError, UsageError
from flightedl.formats.sinks import PartsSink
from flightedl.kernels.half_precision import ITEM_BYTES, array_dtype, float32_of, shortened

Array = npt.NDArray[np.generic]
Parameters = Iterable[tuple[ParameterSpec, Array]]
#: (all parameters; the same parameters with values, one at a time) -> bytes of the file, in parts.
Writer = Callable[[Sequence[ParameterSpec], Parameters], Iterator[bytes | memoryview]]

ARROW_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("values", pa.large_binary(), nullable=False),
    ]
)
#: Names of dtypes in safetensors. Files that this module writes contain only the first four.
_DTYPES = {
    "F32": "float32",
    "F64": "float64",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_SAFETENSORS_DTYPES = {name: said for said, name in _DTYPES.items()}
_HEADER_LIMIT_BYTES = 100 << 20
#: Errors that readers raise if a file has a different format.
_TROUBLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    RecursionError,
    struct.error,
    zipfile.BadZipFile,
    pa.ArrowException,
)
_SUFFIXES = {".safetensors": "safetensors", ".npz": "npz", ".arrow": "arrow", ".feather": "arrow"}


def format_of(name: str, given: str = "") -> str:
    """Return ``given`` if it is not empty, otherwise the format implied by the file's name.

    Raises:
        UsageError: neither of them determines the format.
    """
    found = given or next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "")
    if found not in WRITERS:
        raise UsageError(f"the format of {name} is unknown: end it in .safetensors, .npz or .arrow, or name a format")
    return found


def _safetensors(specs: Sequence[ParameterSpec], parameters: Parameters) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    offset = 0
    for spec in specs:
        end = offset + spec.size * spec.seen_item_bytes
        header[spec.name] = {
            "dtype": _SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for spec, values in parameters:
        yield _as_declared(spec, values).data.cast("B")


def _as_declared(spec: ParameterSpec, values: Array) -> Array:
    """Return the elements as a flat array; 16-bit floats as their bits."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if not spec.short_kind:
        return flat
    if flat.dtype.itemsize == ITEM_BYTES:
        return flat.view(np.uint16)
    return shortened(flat.astype(np.float32, copy=False), spec.short_kind)


def _npz(specs: Sequence[ParameterSpec], parameters: Parameters) -> Iterator[bytes | memoryview]:
    del specs
    sink = PartsSink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for spec, values in parameters:
            with archive.open(f"{spec.name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _for_numpy(spec, values), allow_pickle=False)
            yield from sink.take_parts()
    yield from sink.take_parts()


def _for_numpy(spec: ParameterSpec, values: Array) -> Array:
    if not spec.short_kind:
        return np.ascontiguousarray(values)
    bits = _as_declared(spec, values)
    if spec.dtype == "float16":
        return bits.view(np.float16).reshape(spec.shape)
    return float32_of(bits, spec.dtype).reshape(spec.shape)


def _arrow(specs: Sequence[ParameterSpec], parameters: Parameters) -> Iterator[bytes | memoryview]:
    del specs
    sink = PartsSink()
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), ARROW_SCHEMA) as writer:
        for spec, values in parameters:
            data = _as_declared(spec, values).tobytes()
            row = [[spec.name], [spec.dtype], [list(spec.shape)], [data]]
            columns = [pa.array(value, field.type) for value, field in zip(row, ARROW_SCHEMA, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA))
            yield from sink.take_parts()
    yield from sink.take_parts()


WRITERS: dict[str, Writer] = {"safetensors": _safetensors, "npz": _npz, "arrow": _arrow}


def read_model(data: bytes, kind: str, shown: str) -> dict[str, Array]:
    """Return the arrays in a model file by name.

    Args:
        data: The complete file.
        kind: "safetensors", "npz" or "arrow".
        shown: Name of the file, for error messages.

    Raises:
        DataError: the content is not valid in this format.
    """
    try:
        return _READERS[kind](data)
    except (*_TROUBLE, MemoryError) as error:
        if (lacking := machine_error(error, f"{shown} cannot be read")) is not None:
            raise lacking from None
        raise DataError(f"{shown} cannot be read as {kind}: {str(error)[:200]}") from None


def _read_safetensors(data: bytes) -> dict[str, Array]:
    (size,) = struct.unpack_from("<Q", data)
    if size > min(len(data) - 8, _HEADER_LIMIT_BYTES):
        raise ValueError("its header is longer than the file")
    header = json.loads(data[8 : 8 + size])
    body = memoryview(data)[8 + size :]
    return {name: _tensor(body, name, said) for name, said in header.items() if name != "__metadata__"}


def _tensor(body: memoryview, name: str, said: Mapping[str, Any]) -> Array:
    start, end = said["data_offsets"]
    if said["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r:.80} has elements of type {said['dtype']!r:.20}")
    return _array(body, start, end, _DTYPES[said["dtype"]], said["shape"], name)


def _array(body: memoryview, start: int, end: int, dtype: str, shape: list[int], name: str) -> Array:
    found = array_dtype(dtype)
    if not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * found.itemsize:
        raise ValueError(f"the size of {name!r:.80} does not match its shape")
    return np.frombuffer(body[start:end], found).reshape(shape)


def _read_npz(data: bytes) -> dict[str, Array]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _read_arrow(data: bytes) -> dict[str, Array]:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return {
        row["name"]: _array(memoryview(row["values"]), 0, len(row["values"]), row["dtype"], row["shape"], row["name"])
        for row in table.to_pylist()
    }


_READERS: Mapping[str, Callable[[bytes], dict[str, Array]]] = {
    "safetensors": _read_safetensors,
    "npz": _read_npz,
    "arrow": _read_arrow,
}
