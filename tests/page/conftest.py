"""One job and one browser for all tests of the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.launch.cluster import LocalCluster, TrainerProgram
from tests.support.etcd_server import EtcdServer

from .browser import Browser

#: The batch with record 23 fails until it is skipped. The second epoch begins when the test lets the job continue.
SCRIPT = """
import math, pathlib, sys, time
from flightedl.process.tuning import leave_out_pandas_and_scipy
leave_out_pandas_and_scipy()
import numpy as np
import flightedl as fe

def train():
    with fe.connect() as job:
        data = job.dataset(sys.argv[1], batch_size=10, epochs=2, on_lost="continue")
        model = job.parameters({"w": np.zeros(64, np.float32)}, optimizer=fe.SGD(lr=0.1), mode=fe.Async())
        for number, batch in enumerate(data):
            while data.epoch and not pathlib.Path(sys.argv[2]).exists():
                time.sleep(0.05)
            if 23 in batch["k"].to_numpy():
                raise ValueError("<b>bad</b> record")
            model.step({"w": np.ones(64, np.float32)})
            job.log(loss=math.exp(-number / 10), accuracy=1 - math.exp(-number / 20))
            time.sleep(0.03)

while True:
    try:
        train()
        break
    except ValueError:
        print("once more")
"""


@dataclass(frozen=True)
class Shown:
    """A job's page in a browser."""

    browser: Browser
    cluster: LocalCluster
    #: Directory for pictures.
    pictures: Path
    _release: Path

    def go_on(self) -> None:
        """Let the job begin its second epoch."""
        self._release.touch()


@pytest.fixture(scope="module")
def shown(etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """Job that has trained for a while and has a failed task, with its page, which already shows both."""
    place = tmp_path_factory.mktemp("page")
    pq.write_table(pa.table({"k": np.arange(400)}), place / "numbers.parquet", row_group_size=10)
    (place / "train.py").write_text(SCRIPT)
    profile = place / "profile"
    profile.mkdir()
    program = TrainerProgram(str(place / "train.py"), (str(place / "numbers.parquet"), str(place / "release")))
    cluster = LocalCluster(
        1,
        job="page-demo",
        etcd=etcd.address,
        output_dir=place / "out",
        trainers=program,
        page=True,
        checkpoint=str(place / "checkpoints"),
        attempts_limit=1,
    )
    with Browser(profile) as browser, cluster:
        found = Shown(browser, cluster, place, place / "release")
        browser.looks(width=1200, height=900, scheme="light")
        _open(browser, cluster.page_url)
        browser.until("document.querySelectorAll('#failed tbody tr').length == 1", 30)
        browser.until("document.querySelectorAll('#curves polyline').length >= 4", 30)
        browser.until("document.querySelectorAll('#trainers tbody tr').length == 1", 30)
        yield found


def _open(browser: Browser, url: str) -> None:
    """Open the page as soon as the master serves it."""
    deadline = time.monotonic() + 20
    while "errorText" in (answer := browser.call("Page.navigate", url=url)):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    browser.complaints.clear()
