"""The arrays that a model begins with, as they are declared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from flightedl.client.arguments import by_name
from flightedl.domain.model.parameters import STORAGE_DTYPES
from flightedl.errors import UsageError
from flightedl.kernels.half_precision import ITEM_BYTES, array_dtype

Array = npt.NDArray[np.generic]


def declared_arrays(
    initial: Mapping[str, npt.ArrayLike], dtypes: Mapping[str, str | type[np.generic]]
) -> dict[str, Array]:
    """The first values, contiguous, each of the dtype that it is declared with.

    Raises:
        UsageError: they are not given by name, are no arrays, or a dtype is none of those that parameters can have, or
            is given for a parameter that there is not.
    """
    by_name("parameters", initial, '{"w": array}')
    by_name("dtypes", dtypes, '{"w": "float32"}')
    if unknown := sorted(dtypes.keys() - initial.keys()):
        raise UsageError(f"dtypes names {unknown[0]!r:.80}, but there is no such parameter")
    values: dict[str, Array] = {}
    for name, value in initial.items():
        try:
            array = np.asarray(value, order="C")
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"parameter {name!r:.80} is no array: {error!s:.160}") from None
        given = dtypes.get(name, array.dtype.name)
        wanted = np.dtype(given).name if isinstance(given, type) else given
        if wanted not in STORAGE_DTYPES:
            raise UsageError(
                f"parameter {name!r:.80} has dtype {wanted!r:.40}: make it one of {', '.join(STORAGE_DTYPES)}"
            )
        with np.errstate(over="ignore"):
            values[name] = array.astype(array_dtype(wanted), copy=False)
    return values


def sendable(array: Array) -> Array:
    """The same bytes as an array that Arrow takes: 16-bit floats are sent as their bits."""
    return array.view(np.uint16) if array.dtype.itemsize == ITEM_BYTES else array
