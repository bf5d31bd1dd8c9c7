"""Where a row lies: ids are mixed, mixed ids fall into buckets, buckets to pservers.

A table's ids are any 64 bits. They are mixed by a bijection that is salted with the table's name, because raw ids are
anything but evenly distributed; so two ids never become one. The ten highest bits of a mixed id are its bucket, the
same buckets for all tables. Unless a placement is stored, pserver k of P has the buckets b for which
``b * P // 1024 == k``: ranges.

Text becomes an id by a hash of 64 bits (xxh3). Two of n texts collide with a probability of n**2 / 2**65: 3e-6 for ten
million, 3 % for a thousand million; they then share a row.

Each function has a form for plain integers and one for NumPy, which agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from flightedl.domain.model.initial import scrambled

Ids = npt.NDArray[np.uint64]

BUCKETS = 1024
_BUCKET_SHIFT = np.uint64(64 - 10)
_MASK = (1 << 64) - 1


def salt_of(table: str) -> int:
    """What tells the ids of a table from those of others: 64 bits."""
    return xxhash.xxh3_64_intdigest(table.encode())


def mixed(row: int, salt: int) -> int:
    """An id (any integer of 64 bits, signed or not) mixed: 64 bits."""
    return scrambled((row & _MASK) ^ salt)


def bucket_of(row: int, salt: int) -> int:
    """The bucket of an id."""
    return mixed(row, salt) >> 54


@cache
def bucket_owners(pserver_count: int) -> npt.NDArray[np.int64]:
    """Return the pserver of each bucket, (BUCKETS,), if no placement is stored."""
    owners: npt.NDArray[np.int64] = np.arange(BUCKETS) * pserver_count // BUCKETS
    owners.flags.writeable = False
    return owners


def mixed_ids(ids: Ids, salt: int | Ids) -> Ids:
    """(n,) ids mixed, all with one salt or each with its own, (n,)."""
    bits = ids ^ (np.uint64(salt) if isinstance(salt, int) else salt)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def buckets_of(ids: Ids, salt: int | Ids) -> npt.NDArray[np.int64]:
    """The buckets of (n,) ids."""
    return (mixed_ids(ids, salt) >> _BUCKET_SHIFT).astype(np.int64)


def as_ids(ids: npt.NDArray[np.integer]) -> Ids:
    """Whole numbers of any width as 64 bits: negative ones keep their bits. No copy is made where none is needed."""
    if ids.dtype.kind == "i":
        return ids.astype(np.int64, copy=False).view(np.uint64)
    return ids.astype(np.uint64, copy=False)


def id_of_text(text: str | bytes) -> int:
    """The id of a text: 64 bits."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else text)


def ids_of_texts(texts: Iterable[str | bytes]) -> Ids:
    """The ids of texts."""
    return np.fromiter((id_of_text(text) for text in texts), np.uint64)
