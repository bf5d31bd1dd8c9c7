"""A Kafka topic with real processes, some of which are killed: each message counts once."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flightedl.config import child_environment
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.forking import ForkServer
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from tests.support.kafka_broker import KafkaBroker

from .forked_launcher import ForkedCommand
from .test_follow import status_of

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(180)]

Until = Callable[..., None]

#: Each element of ``w`` is the number of times that a message was counted.
SCRIPT = """
import json, sys
import numpy as np
import flightedl as fe

COUNT = int(sys.argv[2])
with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=10, records_per_task=20, follow=True, decode=json.loads)
    model = job.parameters({"w": np.zeros(COUNT, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
    for batch in data:
        numbers = batch["k"].to_numpy()
        gradient = np.zeros(COUNT, np.float32)
        gradient[numbers[numbers >= 0]] = -1
        model.step({"w": gradient})
        if (numbers < 0).any():
            data.end()
    if job.once("save"):
        model.pull()
        np.save(job.output_dir / "unfinished.npy", model["w"])
        (job.output_dir / "unfinished.npy").rename(job.output_dir / "w.npy")
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path) as started:
        yield started


class Topic:
    """A topic whose messages have the numbers from 0 on."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker = broker
        self.count = 0

    def add(self, count: int) -> None:
        self.broker.produce("clicks", ({"k": k} for k in range(self.count, self.count + count)))
        self.count += count

    def end(self) -> None:
        self.broker.produce("clicks", [{"k": -1}])


@contextmanager
def running(broker: KafkaBroker, directory: Path, count: int) -> Iterator[tuple[LocalCluster, JobStatus]]:
    (directory / "train.py").write_text(SCRIPT)
    program = TrainerProgram(str(directory / "train.py"), (broker.url("clicks"), str(count)), 2)
    kept, out = str(directory / "kept"), directory / "out"
    with (
        LocalCluster(
            2, checkpoint=kept, output_dir=out, trainers=program, follow_every_s=0.2, lease_ttl_s=3.0
        ) as cluster,
        cluster.status() as status,
    ):
        yield cluster, status


def ended(directory: Path, topic: Topic, status: JobStatus, until: Until) -> np.ndarray:
    topic.end()
    until(lambda: status_of(status).state == "done", 60.0)
    until((directory / "out" / "w.npy").exists, 30.0)
    return np.load(directory / "out" / "w.npy")


def test_every_message_of_a_topic_counts_once_despite_kills(broker: KafkaBroker, tmp_path: Path, until: Until) -> None:
    topic = Topic(broker)
    topic.add(100)
    with running(broker, tmp_path, 700) as (cluster, status):
        until(lambda: status_of(status).records >= 100, 60.0)
        assert "new messages" in status_of(status).waiting_for
        for role in ("master", "trainer", "pserver"):
            topic.add(100)
            before = cluster.pid(role)
            cluster.kill(role)
            topic.add(100)
            until(lambda role=role, before=before: cluster.pid(role) not in {None, before}, 30.0)
            until(lambda: status_of(status).records >= topic.count, 60.0)
        assert np.array_equal(ended(tmp_path, topic, status, until), np.ones(topic.count))


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_every_message_counts_once_in_a_storm_with_a_frozen_broker(
    broker: KafkaBroker, tmp_path: Path, until: Until
) -> None:
    count, kills, draw = 40_000, 20, random.Random(7)
    topic = Topic(broker)
    topic.add(500)
    with running(broker, tmp_path, count) as (cluster, status):
        until(lambda: status_of(status).records >= 100, 60.0)
        for number in range(kills):
            role = draw.choice(["trainer", "trainer", "master", "pserver"])
            before = cluster.pid(role)
            for _ in range(draw.randint(1, 8)):
                topic.add(200)
                time.sleep(0.1)
            if before is not None:
                cluster.kill(role)
            if number == kills // 2:
                broker.process.freeze()
                time.sleep(30.0)
                broker.process.thaw()
            until(lambda role=role, before=before: cluster.pid(role) not in {None, before}, 60.0)
            time.sleep(draw.random() * 2)
        topic.add(count - topic.count)
        until(lambda: status_of(status).records >= count, 300.0)
        assert np.array_equal(ended(tmp_path, topic, status, until), np.ones(count))


@pytest.mark.storm
def test_a_resumed_job_continues_behind_the_offsets_of_its_checkpoint(
    broker: KafkaBroker, forks: ForkServer, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    topic = Topic(broker)
    topic.add(200)

    def run(*more: str) -> ForkedCommand:
        command = ["run", "--checkpoint", str(tmp_path / "kept"), "--output", "out", "--job", "grows"]
        command += ["--trainers", "2", "--pservers", "2", *more, "train.py", broker.url("clicks"), "500"]
        with (tmp_path / "log").open("ab") as log:
            env = child_environment(FLIGHTEDL_FOLLOW_EVERY_S="0.2")
            return ForkedCommand(forks, command, cwd=tmp_path, stdout=log, env=env)

    with run() as first:
        until(lambda: list((tmp_path / "kept" / "grows").glob("**/manifest*")), 60.0)
        topic.add(100)
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    topic.add(200)
    topic.end()
    with run("--resume") as second:
        assert second.wait(90) == 0
    assert np.array_equal(np.load(tmp_path / "out" / "w.npy"), np.ones(500))


DELETED = """
import json, sys, time
from pathlib import Path
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=10, records_per_task=20, decode=json.loads, read_ahead_mb=1)
    for batch in data:
        with open("read.txt", "a") as file:
            file.writelines(f"{k}\\n" for k in batch["k"].to_pylist())
        while not Path("go").exists():
            time.sleep(0.01)
"""


def test_batches_that_the_broker_has_deleted_are_set_aside_and_the_job_goes_on(
    broker: KafkaBroker, forks: ForkServer, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "train.py").write_text(DELETED)
    padding = "x" * 20_000
    broker.produce("clicks", ({"k": k, "padding": padding} for k in range(200)), partition=1)
    broker.produce("clicks", ({"k": k} for k in range(200, 300)), partition=2)
    command = ["run", "--trainers", "1", "--pservers", "0", "train.py", broker.url("clicks")]
    with (
        (tmp_path / "log").open("ab") as log,
        ForkedCommand(
            forks, command, cwd=tmp_path, stdout=log, env=child_environment(FLIGHTEDL_ATTEMPTS_LIMIT="1")
        ) as job,
    ):
        until((tmp_path / "read.txt").exists, 30.0)
        # The broker keeps the newest 5 MB of a partition. These messages are not part of the dataset.
        broker.produce("clicks", ({"k": -1, "padding": padding} for _ in range(300)), partition=1)
        (tmp_path / "go").touch()
        assert job.wait(90) == 4
    read = [int(line) for line in (tmp_path / "read.txt").read_text().split()]
    assert len(set(read)) == len(read)
    lost = sorted({*range(300)} - {*read})
    assert set(read) <= {*range(300)}
    assert lost == list(range(lost[0], 200)), "the broker has deleted the last messages of partition 1 only"
    text = (tmp_path / "log").read_text()
    assert f"partition 1 of {broker.url('clicks')}, offsets {lost[0]}-199" in text
