"""Online training: a recommender learns from clicks as they arrive, while a copy of its model answers lookups.

New items appear all the time and old ones disappear, so a model that is trained only once is soon useless. One trainer
writes a file of simulated clicks every half second; in a real system, web servers write such files. All trainers train
on the growing directory. Rows of items without recent clicks are evicted. One trainer also has a follower. As a service
would, it predicts every fifth batch with its copy of the model, before the batch is trained on. The progress shows
``auc`` (the quality of these predictions), ``age_ms`` (the age of the copy) and ``items`` (the number of items in it).

Run it with ``FLIGHTEDL_FOLLOW_EVERY_S=0.5 flightedl run flightedl.examples.online --pservers 2``; without the variable,
the master looks for new files every 5 seconds.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe

Floats = npt.NDArray[np.float32]

DIM = 8
USERS = 500
#: Number of items that exist at a time, and number of new items in each file.
ITEMS, NEW_ITEMS = 200, 10
CLICKS_PER_FILE = 2_000
#: Versions after which an item without clicks is evicted.
UNUSED_VERSIONS = 100


class Clicks:
    """Simulated users, who like items that match their taste."""

    def __init__(self) -> None:
        self._chance = np.random.default_rng(0)
        self._users = self._chance.normal(size=(USERS, DIM))
        self._tastes = self._chance.normal(size=(1_000, DIM))

    def table(self, file: int) -> pa.Table:
        """Return the clicks in a file: users, items, and 1 if the user clicked on the item."""
        users = self._chance.integers(0, USERS, CLICKS_PER_FILE)
        items = file * NEW_ITEMS + self._chance.integers(0, ITEMS, CLICKS_PER_FILE)
        logits = (self._users[users] * self._tastes[items % len(self._tastes)]).sum(1)
        clicked = self._chance.random(CLICKS_PER_FILE) < 1 / (1 + np.exp(-logits))
        return pa.table({"user": users, "item": items, "clicked": clicked.astype(np.int8)})


def write_clicks(folder: Path, files: int, pause_s: float, stop: threading.Event) -> None:
    """Write this number of files, then mark the end of the data."""
    clicks = Clicks()
    for file in range(files):
        hidden = folder / f".{file:06d}.parquet"
        pq.write_table(clicks.table(file), hidden, row_group_size=CLICKS_PER_FILE // 4)
        hidden.rename(folder / hidden.name[1:])
        if stop.wait(pause_s):
            break
    (folder / "_END").touch()


def predicted(users: Floats, items: Floats) -> Floats:
    """Return the probabilities of clicks, (n,), from the rows of users and items, (n, DIM) each."""
    found: Floats = 1 / (1 + np.exp(-(users * items).sum(1)))
    return found


def area(scores: Floats, clicked: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: the probability that a click has a higher score than a non-click."""
    ranks = np.empty(scores.size)
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, scores.size + 1)
    count = int(clicked.sum())
    if count in {0, scores.size}:
        return 0.5
    return float((ranks[clicked].sum() - count * (count + 1) / 2) / (count * (scores.size - count)))


def main(files: int, pause_s: float) -> None:
    """Train until all files have been processed."""
    stop = threading.Event()
    with fe.connect() as job:
        folder = job.output_dir / "clicks"
        folder.mkdir(parents=True, exist_ok=True)
        writer = threading.Thread(target=write_clicks, args=(folder, files, pause_s, stop), daemon=True)
        if job.once("clicks"):
            writer.start()
        data = job.dataset(f"{folder}/*.parquet", batch_size=250, follow=True)
        rule = fe.RowAdagrad(lr=0.3)
        users = job.table("users", DIM, optimizer=rule, init=fe.Uniform(0.5))
        items = job.table(
            "items", DIM, optimizer=rule, init=fe.Uniform(0.5), evict=fe.Evict(unused_versions=UNUSED_VERSIONS)
        )
        follower = fe.Follower() if job.once("follower") else None
        try:
            for number, batch in enumerate(data):
                ids = batch["user"].to_numpy(), batch["item"].to_numpy()
                clicked = batch["clicked"].to_numpy() == 1
                if follower is not None and number % 5 == 4:
                    tables = follower.wait().tables
                    scores = predicted(tables["users"].lookup(ids[0]), tables["items"].lookup(ids[1]))
                    count = len(tables["items"].rows()[0])
                    job.log(auc=area(scores, clicked), age_ms=1000 * follower.age_s, items=count)
                rows = users.pull(ids[0]), items.pull(ids[1])
                error = (predicted(*rows) - clicked)[:, None] / len(clicked)
                users.push(ids[0], error * rows[1])
                items.push(ids[1], error * rows[0])
                job.step()
        finally:
            stop.set()
            if follower is not None:
                follower.close()
            if writer.is_alive():
                writer.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on clicks while they arrive.")
    parser.add_argument("--files", type=int, default=60, help="number of files of clicks")
    parser.add_argument("--pause-s", type=float, default=0.5, help="seconds between two files")
    chosen = parser.parse_args()
    main(chosen.files, chosen.pause_s)
