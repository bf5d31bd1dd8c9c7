"""Placement of rows: ids are mixed, mixed ids determine buckets, and buckets are assigned to pservers.

The ids of a table are arbitrary 64-bit numbers. Raw ids are rarely distributed evenly, so they are mixed by a bijection
that depends on the table's name; different ids thus remain different. The ten highest bits of a mixed id are its
bucket.

All tables use the same buckets. Unless a placement is stored, pserver k of P has the range of buckets b with ``b * P //
1024 == k``.

Strings are converted to ids with a 64-bit hash (xxh3). The probability that two of n strings collide, and then share a
row, is about n**2 / 2**65: 3e-6 for ten million strings, 3% for a billion.

Each function exists in two equivalent forms, for Python integers and for NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from flightedl.domain.splitmix64 import MASK, mix, mix_all

Ids = npt.NDArray[np.uint64]

BUCKETS = 1024
_BUCKET_SHIFT = np.uint64(64 - 10)


def salt_of(table: str) -> int:
    """Return the 64-bit salt for a table's ids."""
    return xxhash.xxh3_64_intdigest(table.encode())


def mixed(row: int, salt: int) -> int:
    """Mix the bits of an id, which is a signed or unsigned 64-bit integer."""
    return mix((row & MASK) ^ salt)


def bucket_of(row: int, salt: int) -> int:
    """Return the bucket of an id."""
    return mixed(row, salt) >> 54


@cache
def bucket_owners(pserver_count: int) -> npt.NDArray[np.int64]:
    """Return the pserver of each bucket if no placement is stored: (BUCKETS,)."""
    owners: npt.NDArray[np.int64] = np.arange(BUCKETS) * pserver_count // BUCKETS
    owners.flags.writeable = False
    return owners


def mixed_ids(ids: Ids, salt: int | Ids) -> Ids:
    """Mix n ids with one salt or with n salts: (n,) -> (n,)."""
    return mix_all(ids ^ (np.uint64(salt) if isinstance(salt, int) else salt))


def buckets_of(ids: Ids, salt: int | Ids) -> npt.NDArray[np.int64]:
    """Return the buckets of n ids: (n,) -> (n,)."""
    return (mixed_ids(ids, salt) >> _BUCKET_SHIFT).astype(np.int64)


def as_ids(ids: npt.NDArray[np.integer]) -> Ids:
    """Convert integers of any width to 64-bit ids, if possible without a copy. Negative numbers keep their bits."""
    if ids.dtype.kind == "i":
        return ids.astype(np.int64, copy=False).view(np.uint64)
    return ids.astype(np.uint64, copy=False)


def id_of_text(text: str | bytes) -> int:
    """Return the 64-bit id of a string."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else text)


def ids_of_texts(texts: Iterable[str | bytes]) -> Ids:
    """Return the ids of n strings: (n,)."""
    return np.fromiter((id_of_text(text) for text in texts), np.uint64)
