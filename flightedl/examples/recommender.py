"""Predict the film ratings in MovieLens 100K with a two-tower model on embedding tables, trained with PyTorch.

    flightedl run flightedl.examples.recommender --trainers 2 --pservers 2

One tower computes a vector for the user, from the user's row and the rows of the words for age, gender and occupation.
The other computes a vector for the film, from the film's row and the rows of its genres and decade. The predicted
rating is the dot product of the two vectors plus the biases of user and film. The rows are in three tables on the
pservers: users, films and words. All rows of a batch arrive in one round trip; their gradients are sent with the step.

Every trainer runs this whole program. At the end, one trainer evaluates the model on held-out ratings, compares it with
predictions from the means of users and films, and writes ``model.safetensors`` (the towers) and ``metrics.json``.
``recommender_data`` describes the data and its origin.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional

import flightedl as fe
from flightedl.examples.recommender_data import Files, prepare
from flightedl.examples.results import save_json

DIM = 16
#: Approximate mean of all ratings.
MIDDLE = 3.5
EVALUATED_RECORDS = 4096

Ids = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data and train together with the other trainers. One trainer then reports the results."""
    options = _options(arguments)
    files = prepare(options.data, click.echo)
    with fe.connect() as job:
        data = job.dataset(files.train, batch_size=options.batch_size, epochs=options.epochs, shuffle=True, seed=0)
        net = towers(job, options.row_learning_rate)
        optimizer = fe.torch.Optimizer(
            net,
            job,
            fe.AdamW(lr=options.learning_rate),
            mode=fe.Sync() if options.mode == "sync" else fe.Async(),
        )
        for ids, stars in fe.torch.batches(data, transform=ids_and_stars):
            optimizer.zero_grad()
            loss = functional.mse_loss(net(ids), stars)
            loss.backward()
            optimizer.step()
            job.log(loss=loss)
        if won := job.once("report"):
            figures = evaluate(net, files.held_out) | baseline(files)
            path = job.output_dir / "model.safetensors"
            job.save_model(path, once=won)
            save_json(job.output_dir / "metrics.json", figures)
            click.echo(
                f"{figures['held_out_ratings']:,} held-out ratings, root mean square error in stars\n"
                f"  this model               {figures['rmse']:.4f}\n"
                f"  means of people, films   {figures['means_rmse']:.4f}\n"
                f"  mean of all              {figures['constant_rmse']:.4f}\n"
                f"model: {path.absolute()}"
            )


class Towers(nn.Module):
    """A network that predicts a user's rating of a film.

    Args:
        users: Table of ``DIM`` + 1 columns: an embedding per user, and the user's bias.
        items: Table of the same kind for films.
        words: Table of ``DIM`` columns for words about users and films.
    """

    def __init__(self, users: Any, items: Any, words: Any) -> None:
        super().__init__()
        self.rows = fe.torch.EmbeddingCollection(
            {
                "user": fe.torch.Embedding(users),
                "item": fe.torch.Embedding(items),
                "user_words": fe.torch.EmbeddingBag(words, mode="mean"),
                "item_words": fe.torch.EmbeddingBag(words, mode="mean"),
            }
        )
        self.user, self.item = (
            nn.Sequential(nn.Linear(2 * DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)) for _ in range(2)
        )

    def forward(self, ids: Ids) -> torch.Tensor:
        """Return the predicted ratings for n pairs of ids, (n,)."""
        rows = self.rows(ids)
        user, user_more = rows["user"][:, :DIM], rows["user"][:, DIM]
        item, item_more = rows["item"][:, :DIM], rows["item"][:, DIM]
        person = user + self.user(torch.cat([user, rows["user_words"]], dim=1))
        film = item + self.item(torch.cat([item, rows["item_words"]], dim=1))
        return MIDDLE + (person * film).sum(dim=1) + user_more + item_more


def towers(job: Any, learning_rate: float) -> Towers:
    """Return the network, which uses the job's tables and has the same initial values in every trainer."""
    rule, small = fe.RowAdagrad(lr=learning_rate), fe.Uniform(0.1)
    torch.manual_seed(0)
    return Towers(
        job.table("users", DIM + 1, optimizer=rule, init=small),
        job.table("items", DIM + 1, optimizer=rule, init=small),
        job.table("words", DIM, optimizer=rule, init=small),
    )


def ids_and_stars(batch: pa.RecordBatch) -> tuple[Ids, torch.Tensor]:
    """Return a batch's input for ``Towers``, and its ratings, (n,)."""
    names = ("user", "item", "user_words", "item_words")
    return {name: batch.column(name) for name in names}, torch.from_dlpack(batch.column("rating"))


def evaluate(net: nn.Module, held_out: Path) -> dict[str, float | int]:
    """Return the model's error on the held-out ratings."""
    net.eval()
    squares, count = 0.0, 0
    with torch.no_grad():
        for batch in pq.ParquetFile(held_out).iter_batches(EVALUATED_RECORDS):
            ids, stars = ids_and_stars(batch)
            squares += float((net(ids) - stars).square().sum())
            count += len(stars)
    return {"held_out_ratings": count, "rmse": (squares / count) ** 0.5}


def baseline(files: Files, pull: float = 5.0) -> dict[str, float]:
    """Return the errors of two simple predictors: one uses the means of users and films, the other is constant.

    Args:
        files: Files of the ratings.
        pull: Number of average ratings added to each user and film, to shrink means of few ratings.
    """
    users, items, stars = _columns(pa.concat_tables(map(pq.read_table, files.train)))
    middle = stars.mean()
    user_more, item_more = np.zeros(users.max() + 1), np.zeros(items.max() + 1)
    for _ in range(10):
        item_more = _means(items, stars - middle - user_more[users], len(item_more), pull)
        user_more = _means(users, stars - middle - item_more[items], len(user_more), pull)
    users, items, stars = _columns(pq.read_table(files.held_out))
    guess = middle + _of(user_more, users) + _of(item_more, items)
    return {
        "means_rmse": float(np.sqrt(np.square(guess - stars).mean())),
        "constant_rmse": float(np.sqrt(np.square(middle - stars).mean())),
    }


Numbers = npt.NDArray[Any]


def _columns(ratings: pa.Table) -> tuple[Numbers, Numbers, Numbers]:
    users, items, stars = (ratings.column(name).to_numpy() for name in ("user", "item", "rating"))
    return users, items, stars.astype(np.float64)


def _means(of: Numbers, values: Numbers, count: int, pull: float) -> Numbers:
    found: Numbers = np.bincount(of, values, count) / (np.bincount(of, minlength=count) + pull)
    return found


def _of(more: Numbers, ids: Numbers) -> Numbers:
    """Return the bias of each of ``ids``, or 0 for an id without training data."""
    return np.where(ids < len(more), more[np.minimum(ids, len(more) - 1)], 0.0)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flightedl.examples.recommender", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("data/movielens"), help="directory of the prepared Parquet files"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=512, help="records per gradient")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="learning rate of the towers")
    parser.add_argument("--row-learning-rate", type=float, default=0.05, help="learning rate of the tables")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
