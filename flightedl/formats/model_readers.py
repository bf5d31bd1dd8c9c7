"""Trained models read from one file: safetensors, NumPy's npz, or Arrow as ``model_files`` writes it.

Nothing in such a file is executed, and what does not fit its format is refused with the place where it does not.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.errors import DataError
from flightedl.kernels.half_precision import array_dtype

Array = npt.NDArray[np.generic]

#: What reading raises of bytes that are something else.
_TROUBLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    RecursionError,
    struct.error,
    zipfile.BadZipFile,
)
_HEADER_LIMIT_BYTES = 100 << 20
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def read_model(data: bytes, kind: str, shown: str) -> dict[str, Array]:
    """The arrays of a model's file, by name.

    Args:
        data: All of the file.
        kind: "safetensors", "npz" or "arrow".
        shown: What the file is called in errors.

    Raises:
        DataError: it is no file of this format.
    """
    try:
        return _READERS[kind](data)
    except (*_TROUBLE, pa.ArrowException) as error:
        raise DataError(f"{shown} cannot be read as {kind}: {str(error)[:200]}") from None


def _safetensors(data: bytes) -> dict[str, Array]:
    (size,) = struct.unpack_from("<Q", data)
    if size > min(len(data) - 8, _HEADER_LIMIT_BYTES):
        raise ValueError("its header is longer than the file")
    header = json.loads(data[8 : 8 + size])
    body = memoryview(data)[8 + size :]
    return {name: _tensor(body, name, said) for name, said in header.items() if name != "__metadata__"}


def _tensor(body: memoryview, name: str, said: Mapping[str, Any]) -> Array:
    start, end = said["data_offsets"]
    if said["dtype"] not in _SAFETENSORS_DTYPES:
        raise ValueError(f"{name!r:.80} has elements of type {said['dtype']!r:.20}")
    return _array(body, start, end, _SAFETENSORS_DTYPES[said["dtype"]], said["shape"], name)


def _array(body: memoryview, start: int, end: int, dtype: str, shape: list[int], name: str) -> Array:
    found = array_dtype(dtype)
    if not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * found.itemsize:
        raise ValueError(f"{name!r:.80} has another size than its shape says")
    return np.frombuffer(body[start:end], found).reshape(shape)


def _npz(data: bytes) -> dict[str, Array]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _arrow(data: bytes) -> dict[str, Array]:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return {
        row["name"]: _array(memoryview(row["values"]), 0, len(row["values"]), row["dtype"], row["shape"], row["name"])
        for row in table.to_pylist()
    }


_READERS: Mapping[str, Callable[[bytes], dict[str, Array]]] = {
    "safetensors": _safetensors,
    "npz": _npz,
    "arrow": _arrow,
}
