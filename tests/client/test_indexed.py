"""Elements by index in real jobs: for trainers, for a group that resumes at its position, and by batch number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import flightedl as fe
from flightedl.errors import DataError, UsageError
from tests.support.etcd_server import EtcdServer

from . import transforms_of_tests as of_tests

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(index)), index


@pytest.fixture
def cluster(etcd: EtcdServer, job_name: str) -> Iterator[fe.LocalCluster]:
    with fe.local(pservers=0, job=job_name, etcd=etcd.address) as cluster:
        yield cluster


def test_a_trainer_gets_every_element_in_each_epoch_from_its_readers(cluster: fe.LocalCluster) -> None:
    found: Counter[tuple[int, int]] = Counter()
    with cluster.connect() as job:
        data = job.indexed(100, of_tests.squared, batch_size=8, epochs=2, shuffle=True, readers=2)
        for batch in data:
            assert batch.num_rows in {8, 4}
            assert batch["square"].to_pylist() == [index**2 for index in batch["index"].to_pylist()]
            found.update((data.epoch, index) for index in batch["index"].to_pylist())
    assert found == Counter((epoch, index) for epoch in range(2) for index in range(100))


def test_a_group_resumes_at_its_position_in_a_pytorch_dataset(cluster: fe.LocalCluster) -> None:
    images = Images()
    more: dict[str, Any] = {"columns": ["pixels", "label"], "batch_size": 8, "shuffle": True, "group": (0, 1)}
    labels: list[int] = []
    with cluster.connect() as job:
        data = job.indexed(len(images), images.__getitem__, **more)
        for pixels, label in fe.torch.batches(data, "pixels", "label"):
            assert torch.equal(pixels, torch.stack([images[index][0] for index in label.tolist()]))
            labels += label.tolist()
            if len(labels) == 80:
                break
        position = data.state_dict()
    assert labels != sorted(labels)
    with cluster.connect() as job:
        data = job.indexed(len(images), images.__getitem__, **more)
        data.load_state_dict(position)
        labels += [label for _, label in fe.torch.batches(data, "pixels", "label") for label in label.tolist()]
    assert sorted(labels) == list(range(200))


def test_a_position_of_another_number_of_elements_is_rejected(cluster: fe.LocalCluster, etcd: EtcdServer) -> None:
    with cluster.connect() as job:
        position = job.indexed(200, str, batch_size=8, group=(0, 1)).state_dict()
    with fe.local(pservers=0, job=f"{cluster.job}-less", etcd=etcd.address) as other, other.connect() as job:
        data = job.indexed(199, str, batch_size=8, group=(0, 1))
        with pytest.raises(UsageError, match="this position belongs to other data"):
            data.load_state_dict(position)


def test_batches_by_number_and_mixtures_have_elements(cluster: fe.LocalCluster) -> None:
    with cluster.connect() as job:
        weights = {range(150): 3, range(150, 200): 1}
        data = job.indexed(weights, of_tests.squared, batch_size=20, group="torchft")
        batches = [data.batch(number)["index"].to_pylist() for number in range(data.batch_count)]
    assert all(13 <= sum(index < 150 for index in batch) <= 17 for batch in batches), "about three quarters"
    assert sorted(index for batch in batches for index in batch) == list(range(200))


def test_the_loop_of_a_rank_raises_the_error_of_an_element(cluster: fe.LocalCluster) -> None:
    text = r"^get=halved failed at indices 4-7: at index 7: ValueError: no sevens"
    with pytest.raises(DataError, match=text), cluster.connect() as job:
        list(job.indexed(100, of_tests.halved, batch_size=4, group=(0, 1)))


def test_arguments_that_do_not_apply_to_elements_are_rejected(cluster: fe.LocalCluster) -> None:
    with cluster.connect() as job:
        with pytest.raises(UsageError, match=r"job\.indexed has no transform=: let get do it"):
            job.indexed(100, str, batch_size=4, transform=lambda batch: batch)
        with pytest.raises(UsageError, match="there is no option reader=: leave it out"):
            job.indexed(100, str, batch_size=4, reader=2)  # type: ignore[call-arg]
        with pytest.raises(UsageError, match='group="torchft" has no readers'):
            job.indexed(100, of_tests.squared, batch_size=4, readers=1, group="torchft")
