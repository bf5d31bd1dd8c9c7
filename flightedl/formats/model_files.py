"""A trained model as one file for others to load: safetensors, NumPy's npz, or Arrow.

* ``safetensors``: eight bytes with the header's size, a JSON header (name -> dtype, shape, place), the arrays. Written
  here, because the format is that simple and no package is needed for it; parameters stream through one at a time.
* ``npz``: uncompressed, one member for each parameter. bfloat16, which the format has no name for, as float32.
* ``arrow``: an Arrow IPC file with a row for each parameter: name, dtype, shape, values as little-endian bytes.

Parameters are written as they are declared: of a 16-bit one the float32 master copy is rounded to nearest even.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import UsageError
from flightedl.formats.sinks import PartsSink
from flightedl.kernels.half_precision import ITEM_BYTES, shortened, widened

Array = npt.NDArray[np.generic]
Parameters = Iterable[tuple[ParameterSpec, Array]]
#: (what there will be, the same with its values one by one) -> the file's bytes, in parts.
Writer = Callable[[Sequence[ParameterSpec], Parameters], Iterator[bytes | memoryview]]

ARROW_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("values", pa.large_binary(), nullable=False),
    ]
)
_SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16"}
_SUFFIXES = {".safetensors": "safetensors", ".npz": "npz", ".arrow": "arrow", ".feather": "arrow"}


def format_of(name: str, given: str = "") -> str:
    """The format that is meant: the one given, else by the file's name.

    Raises:
        UsageError: neither says which.
    """
    found = given or next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "")
    if found not in WRITERS:
        raise UsageError(f"{name} says no format: end it in .safetensors, .npz or .arrow, or give the format")
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
    """The elements in one line; 16-bit floats as their bits."""
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
    wide = np.empty(spec.size, np.float32)
    widened(bits.data.cast("B"), spec.dtype, wide)
    return wide.reshape(spec.shape)


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
