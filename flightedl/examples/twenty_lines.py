"""Logistic regression on a folder of Parquet, CSV or JSON-lines files.

The column ``label`` is 0 or 1. All other columns are numbers without nulls.
"""

import sys

import numpy as np

import flightedl as fe

folder = sys.argv[1]
with fe.connect() as job:
    data = job.dataset(f"{folder}/*", batch_size=256, epochs=3, shuffle=True, seed=0)
    columns = [name for name in data.schema.names if name != "label"]
    model = job.parameters({"w": np.zeros(len(columns)), "b": np.zeros(1)}, optimizer=fe.Adam(lr=0.05), mode=fe.Sync())
    for batch in data:
        x = np.stack([batch[name].to_numpy() for name in columns], axis=1)
        y = batch["label"].to_numpy()
        p = (1 + np.tanh((x @ model["w"] + model["b"]) / 2)) / 2
        model.step({"w": x.T @ (p - y) / len(y), "b": np.mean(p - y, keepdims=True)})
        job.log(loss=-np.mean(np.log(np.where(y == 1, p, 1 - p) + 1e-9)))
    if job.once("save"):
        np.savez(job.output_dir / "model.npz", w=model["w"], b=model["b"])
