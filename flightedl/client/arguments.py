"""Validate the script's arguments and convert them to declarations.

An invalid argument raises a UsageError before anything is sent. The message is one sentence with the argument's name,
its value, and a valid alternative. Unambiguous variants are accepted: NumPy scalars, paths as well as strings, a single
name instead of a list of names, and the name or class of an optimizer or mode whose settings all have defaults.
"""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from flightedl.client.data.elements import ByIndex
from flightedl.domain.groups.plan import Remainder
from flightedl.domain.model.parameters import STORAGE_DTYPES
from flightedl.domain.model.settings import Limits, checked
from flightedl.domain.queue.mixture import STOPS
from flightedl.domain.topics import is_topic
from flightedl.errors import UsageError
from flightedl.formats.chunks import column_names, named_type
from flightedl.formats.dataset_spec import absolute_url, moved_folders
from flightedl.formats.indices import Indices, task_records
from flightedl.formats.indices import url_of as indices_url
from flightedl.formats.topics import TASK_OFFSETS
from flightedl.kernels.half_precision import array_dtype
from flightedl.messages.declarations import DatasetDeclaration

Array = npt.NDArray[np.generic]

_AT_LEAST_ONE = Limits(at_least=1)
_NOT_NEGATIVE = Limits(at_least=0)
#: Seeds are sent as JSON numbers, which programs in other languages parse as 64-bit integers.
_SEED = Limits(at_least=-(2**63), at_most=2**63 - 1)
_OF_MIXTURES = {"epochs", "columns", "filter", "format", "records_per_task", "on_corrupt", "steps_per_batch"}
_OF_MIXTURES |= {"types", "names", "delimiter", "null_values"}
_NAMES = "a column's name, or a list of names"
_CONDITIONS = 'a list of (column, operator, value), such as [("age", ">=", 18)]'


def dataset_declaration(
    *,
    urls: Any,
    batch_size: Any,
    epochs: Any = 1,
    shuffle: Any = False,
    seed: Any = 0,
    columns: Any = None,
    filter: Any = None,  # noqa: A002 - name known from Parquet readers
    format: Any = "",  # noqa: A002 - common name
    records_per_task: Any = 0,
    on_corrupt: Any = "fail",
    follow: Any = False,
    steps_per_batch: Any = 1,
    types: Any = None,
    names: Any = (),
    delimiter: Any = "",
    null_values: Any = (),
) -> DatasetDeclaration:
    """Return the declaration for the arguments of ``job.dataset``.

    Raises:
        UsageError: an argument has a wrong type or is out of range.
    """
    nulls = [null_values] if isinstance(null_values, str) else null_values
    declared = DatasetDeclaration(
        urls=[absolute_url(url) for url in _texts("urls", urls, "a URL, path or pattern, or a list of them")],
        batch_size=checked("batch_size", batch_size, int, _AT_LEAST_ONE),
        epochs=checked("epochs", epochs, int | None, _AT_LEAST_ONE),
        shuffle=checked("shuffle", shuffle, bool, None),
        seed=checked("seed", seed, int, _SEED),
        format=_text("format", format),
        columns=None if columns is None else _texts("columns", columns, _NAMES),
        filter=None if filter is None else _conditions(filter),
        records_per_task=checked("records_per_task", records_per_task, int, _NOT_NEGATIVE),
        on_corrupt=_text("on_corrupt", on_corrupt),
        follow=checked("follow", follow, bool, None),
        steps_per_batch=checked("steps_per_batch", steps_per_batch, int, _AT_LEAST_ONE),
        types={} if types is None else _types(types),
        names=list(column_names(names) if isinstance(names, str) else _texts("names", names, _NAMES) if names else ()),
        delimiter=_text("delimiter", delimiter),
        null_values=list(checked("null_values", nulls, tuple[str, ...], None)),
    )
    if is_topic(*declared.urls) and not declared.records_per_task:
        return replace(declared, records_per_task=-(-TASK_OFFSETS // declared.batch_size) * declared.batch_size)
    return declared


def folders_of(name: str, value: Any) -> dict[str, str]:
    """Return folders that were moved, as absolute URLs. Raises UsageError unless the value maps folders to folders."""
    if not isinstance(value, Mapping):
        raise UsageError(f'{name} is {value!r:.80}, but must be folders by folders, such as {{"/old": "/new"}}')
    return moved_folders(",".join(f"{os.fspath(old)}={os.fspath(new)}" for old, new in value.items()))


def mixture_declaration(
    sources: Any, stop: Any, batch_size: Any, seed: Any, more: Mapping[str, Any]
) -> DatasetDeclaration:
    """Return the declaration for the arguments of ``job.mixture``.

    Raises:
        UsageError: an argument has a wrong type, is out of range, or is unknown to mixtures.
    """
    wanted = 'weights by URL, such as {"web/*.parquet": 0.7, "books/*.parquet": 0.3}'
    if not isinstance(sources, Mapping) or len(sources) < 2:
        raise UsageError(f"the sources of a mixture are {sources!r:.80}, but must be {wanted}, at least two")
    weights = [_number(f"the weight of {url!r:.80}", weight) for url, weight in sources.items()]
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise UsageError(f"the weights of a mixture are {weights!r:.80}, but must be finite numbers above 0")
    if stop not in STOPS:
        raise UsageError(f"stop is {stop!r:.80}, but must be one of {', '.join(STOPS)}")
    if unknown := sorted(more.keys() - _OF_MIXTURES):
        raise UsageError(f"a mixture has no argument {unknown[0]}; it has {', '.join(sorted(_OF_MIXTURES))}")
    declared = dataset_declaration(urls=list(sources), batch_size=batch_size, shuffle=True, seed=seed, **more)
    return replace(declared, mixture=weights, stop=stop)


def indexed_declaration(
    n: Any, get: Any, *, columns: Any, batched: Any, shuffle: Any, stop: Any, has_rounds: bool, **more: Any
) -> tuple[DatasetDeclaration, ByIndex]:
    """Return the declaration for the arguments of ``job.indexed``, and the transform that turns indices into elements.

    Without rounds, a batch never spans two tasks, so a task contains a whole number of batches by default. With rounds,
    the batch size may change between starts, so the default task size does not depend on it.

    Raises:
        UsageError: an argument has a wrong type or is out of range.
    """
    weights = n if isinstance(n, Mapping) else {range(positive("n", n)): 1}
    if not weights:
        raise UsageError("n has no indices: give the number of elements, or ranges with their weights")
    for indices in weights:
        is_range = isinstance(indices, range) and 0 <= indices.start < indices.stop < 2**62
        if not is_range or indices.step != 1:
            raise UsageError(f"n has the indices {indices!r:.80}, but must have ranges, such as {{range(0, 10): 0.7}}")
    by_index = ByIndex(
        function_of("get", get),
        flag("batched", batched),
        _texts("columns", columns, _NAMES) if columns else (),
        min(indices.start for indices in weights),
    )
    is_shuffled = flag("shuffle", shuffle) or len(weights) > 1
    urls = {indices_url(indices, is_shuffled=is_shuffled): weight for indices, weight in weights.items()}
    more["format"] = Indices.name
    if stop not in STOPS:
        raise UsageError(f"stop is {stop!r:.80}, but must be one of {', '.join(STOPS)}")
    if len(urls) > 1:
        declared = mixture_declaration(urls, stop, more.pop("batch_size"), more.pop("seed"), more)
    else:
        declared = dataset_declaration(urls=list(urls), shuffle=shuffle, **more)
    if not declared.records_per_task and not has_rounds:
        count = sum(map(len, weights))
        declared = replace(declared, records_per_task=task_records(count, declared.batch_size))
    return declared, by_index


def remainder_of(value: Any, declared: DatasetDeclaration, *, explicit_done: bool) -> Remainder:
    """Return ``value`` as a ``Remainder`` for a dataset that is read in rounds. Raises UsageError for any other value.

    Raises:
        UsageError: the value is unknown, or the dataset cannot be read in rounds.
    """
    if is_topic(*declared.urls):
        raise UsageError("the ranks of a group cannot read a Kafka topic: leave out group=, or read files")
    for name, is_given in (
        ("follow", declared.follow),
        ("steps_per_batch", declared.steps_per_batch > 1),
        ("records_per_task", declared.records_per_task > 0),
        ("explicit_done", explicit_done),
    ):
        if is_given:
            raise UsageError(f"{name} is not available for the ranks of a group: omit {name}= or group=")
    if value not in get_args(Remainder):
        raise UsageError(f"remainder is {value!r:.80}, but must be one of {', '.join(get_args(Remainder))}")
    return cast("Remainder", value)


def url_of(name: str, value: Any) -> str:
    """Return a path or URL as an absolute URL."""
    return absolute_url(_texts(name, value, "a path or URL", just_one=True)[0])


def name_of(what: str, value: Any) -> str:
    """Return the value if it is a non-empty string of valid characters, which excludes halves of surrogate pairs."""
    if not isinstance(value, str) or not value or value != value.encode(errors="replace").decode():
        raise UsageError(f"{what} is {value!r:.80}, but must be text that is not empty")
    return value


def flag(name: str, value: Any) -> bool:
    """Return the value if it is True or False."""
    return bool(checked(name, value, bool, None))


def positive(name: str, value: Any) -> int:
    """Return the value if it is a positive number."""
    return int(checked(name, value, int, _AT_LEAST_ONE))


def natural(name: str, value: Any) -> int:
    """Return the value if it is a non-negative number."""
    return int(checked(name, value, int, _NOT_NEGATIVE))


def function_of(what: str, value: Any) -> Any:
    """Return the value if it is callable."""
    if not callable(value):
        raise UsageError(f"{what} is {value!r:.80}, but must be a function")
    return value


def by_name(what: str, value: Any, example: str) -> Mapping[str, Any]:
    """Return the value if it is a mapping, for example of parameter names to arrays."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be given by name, such as {example}, not as {_kind(value)}")
    return value


def metrics_of(values: Any, what: str = "metrics") -> dict[str, float]:
    """Return a dict from name to number. Arrays and tensors with one element are converted to numbers."""
    return {
        name_of("the name of a metric", name): _number(f"the metric {name!r:.80}", value)
        for name, value in by_name(what, values, '{"loss": 0.5}').items()
    }


def _number(what: str, value: Any) -> float:
    if not isinstance(value, str | bytes):
        try:
            return float(value.item()) if hasattr(value, "item") else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise UsageError(f"{what} is {value!r:.80}, but must be a number")


def _conditions(value: Any) -> list[tuple[str, str, Any]]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"filter is {value!r:.80}, but must be {_CONDITIONS}")
    found: list[tuple[str, str, Any]] = []
    for condition in value:
        parts = [] if isinstance(condition, str) or not isinstance(condition, Iterable) else list(condition)
        if len(parts) != 3 or not isinstance(parts[0], str) or not isinstance(parts[1], str):
            raise UsageError(f"filter has {condition!r:.80}, but must be {_CONDITIONS}")
        found.append((parts[0], parts[1], _compared(parts[2])))
    return found


def _types(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UsageError(f'types is {value!r:.80}, but must be a type by column, such as {{"zip": "string"}}')
    found = {name: str(kind) if isinstance(kind, pa.DataType) else kind for name, kind in value.items()}
    for name, kind in found.items():
        named_type(_text(f"the type of {name!r:.80}", kind))
    return found


def _compared(value: Any) -> Any:
    """Return the value that a filter condition compares with, as plain JSON."""
    plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(plain, list | tuple | set | frozenset):
        return [_compared(part) for part in (plain if isinstance(plain, list | tuple) else sorted(plain, key=repr))]
    if isinstance(plain, dt.date | dt.time):
        return plain.isoformat()
    if plain is None or (isinstance(plain, bool | int | str)) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    raise UsageError(
        f"filter compares with {value!r:.80}, but can only compare with text, a finite number, a date or None"
    )


def _texts(name: str, value: Any, wanted: str, *, just_one: bool = False) -> list[str]:
    one = isinstance(value, str | os.PathLike)
    if one or (isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) and not just_one):
        found = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in ([value] if one else value)]
        if found and all(isinstance(part, str) and part for part in found):
            return found
    raise UsageError(f"{name} is {value!r:.80}, but must be {wanted}")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {value!r:.80}, but must be text")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" or name == "ndarray" else f"a {name}"


def unmasked(value: Any) -> Any:
    """Return the value. Raises TypeError for a masked array, whose mask a conversion would drop."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("it is masked, so fill it first")
    return value


def declared_arrays(
    initial: Mapping[str, npt.ArrayLike], dtypes: Mapping[str, str | type[np.generic]]
) -> dict[str, Array]:
    """Return a model's initial values as contiguous arrays of the declared dtypes.

    Raises:
        UsageError: the values are not given by name, are not arrays, or a dtype is unsupported or given for an unknown
            parameter.
    """
    by_name("parameters", initial, '{"w": array}')
    by_name("dtypes", dtypes, '{"w": "float32"}')
    if unknown := sorted(dtypes.keys() - initial.keys()):
        raise UsageError(f"dtypes names {unknown[0]!r:.80}, but there is no such parameter")
    values: dict[str, Array] = {}
    for name, value in initial.items():
        try:
            array = np.asarray(unmasked(value), order="C")
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"parameter {name!r:.80} is not an array: {error!s:.160}") from None
        given = dtypes.get(name, array.dtype.name)
        wanted = np.dtype(given).name if isinstance(given, type) else given
        if wanted not in STORAGE_DTYPES:
            raise UsageError(
                f"parameter {name!r:.80} has dtype {wanted!r:.40}: make it one of {', '.join(STORAGE_DTYPES)}"
            )
        with np.errstate(over="ignore"):
            values[name] = array.astype(array_dtype(wanted), copy=False)
    return values
