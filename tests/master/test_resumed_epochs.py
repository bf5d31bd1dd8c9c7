"""A resumed job may get another number of epochs, from the first declaration of its data."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.records import TrainerRecord
from flightedl.errors import DeclarationError, NotReadyError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, JobDeclaration
from flightedl.messages.tasks import FinishedTask, TasksReply, TasksTicket
from flightedl.ports import Put
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator, MemoryFiles

from .job_of_twins import KEYS, LoneMaster, until_ready

TRAINER = msgspec.json.encode(TrainerRecord(id="a"))
ONE_EPOCH = DatasetDeclaration(urls=["a.csv"], batch_size=2)
THREE_EPOCHS = msgspec.structs.replace(ONE_EPOCH, epochs=3)


class Master(LoneMaster):
    def __init__(self, coordinator: MemoryCoordinator) -> None:
        super().__init__(coordinator, MemoryFiles({"a.csv": b"k\n1\n2\n3\n"}))

    def declare(self, dataset: DatasetDeclaration) -> DeclaredDataset:
        return until_ready(lambda: self.service.declaring.dataset(dataset))

    def work(self, generation: int, *finished: FinishedTask) -> TasksReply:
        ticket = TasksTicket(trainer="a", generation=generation, want=1, finished=list(finished))
        return self.service.tasks.exchange(ticket, threading.Event())[0]


@pytest.fixture
def coordinator() -> Iterator[MemoryCoordinator]:
    """Return an etcd with a job of one epoch that is done."""
    made = MemoryCoordinator(SystemClock())
    held = HeldKey.claim(made, SystemClock(), KEYS.trainer("a"), TRAINER, 20.0)
    assert held is not None
    master = Master(made)
    master.declare(ONE_EPOCH)
    (given,) = eventually(lambda: work(master, held.generation)).assignments
    done = FinishedTask(epoch=0, position=given.position, attempt=given.attempt, pservers=[])
    assert master.work(held.generation, done).outcome == "epochs_done"
    master.close()
    held.release()
    yield made
    made.close()


def work(master: Master, generation: int) -> TasksReply | None:
    try:
        return master.work(generation)
    except NotReadyError:
        return None


def resumed(coordinator: MemoryCoordinator) -> Master:
    """Return the master that continues from the state that ``resuming.begin`` writes to etcd."""
    entry = coordinator.get(KEYS.job)
    assert entry is not None
    declaration = msgspec.structs.replace(decode(entry.value, JobDeclaration), is_resumed=True)
    coordinator.transact([], [Put(KEYS.job, encode(declaration))])
    return Master(coordinator)


def test_a_resumed_job_may_have_more_epochs(coordinator: MemoryCoordinator) -> None:
    master = resumed(coordinator)
    assert master.declare(THREE_EPOCHS).declaration.epochs == 3
    with pytest.raises(DeclarationError, match="epochs is 3, not 1"):
        master.declare(ONE_EPOCH)
    status = master.service.status()
    assert (status.epoch, status.epochs, status.tasks.done) == (1, 3, 0)
    master.close()
    successor = Master(coordinator)
    assert successor.declare(THREE_EPOCHS).declaration.epochs == 3
    successor.close()


def test_a_resumed_job_may_be_unchanged(coordinator: MemoryCoordinator) -> None:
    master = resumed(coordinator)
    assert master.declare(ONE_EPOCH).declaration.epochs == 1
    assert master.service.status().epochs == 1
    with pytest.raises(DeclarationError):
        master.declare(THREE_EPOCHS)
    master.close()


def test_other_changes_are_refused(coordinator: MemoryCoordinator) -> None:
    master = resumed(coordinator)
    with pytest.raises(
        DeclarationError,
        match=r"batch_size is 2, not 4\. Only epochs, shuffle and seed may change when a job is resumed",
    ):
        master.declare(msgspec.structs.replace(THREE_EPOCHS, batch_size=4))
    assert master.declare(THREE_EPOCHS).declaration.epochs == 3
    master.close()


def test_fewer_epochs_than_begun_are_refused(coordinator: MemoryCoordinator) -> None:
    master = resumed(coordinator)
    master.declare(THREE_EPOCHS)
    held = HeldKey.claim(coordinator, SystemClock(), KEYS.trainer("a"), TRAINER, 20.0)
    assert held is not None
    assert eventually(lambda: work(master, held.generation)).assignments[0].epoch == 1
    master.close()
    held.release()
    again = resumed(coordinator)
    with pytest.raises(UsageError, match="is in epoch 2, so epochs= must be more than 1"):
        again.declare(ONE_EPOCH)
    assert again.declare(msgspec.structs.replace(ONE_EPOCH, epochs=2)).declaration.epochs == 2
    again.close()


def test_a_job_that_was_not_resumed_keeps_its_epochs(coordinator: MemoryCoordinator) -> None:
    master = Master(coordinator)
    with pytest.raises(DeclarationError, match=r"epochs is 1, not 3\. Declare the same"):
        master.declare(THREE_EPOCHS)
    master.close()
