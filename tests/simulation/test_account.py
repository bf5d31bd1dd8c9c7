"""Checks of the account when a master reports the job as done, also if it decided so before something changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from flightedl.domain.checkpoint.manifest import Manifest, manifest_name
from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import FailedPiece
from tests.simulation.cores.cluster import Cluster
from tests.simulation.cores.world import Violation


class Ended:
    """A job that has ended without faults. Tests undo their changes."""

    def __init__(self) -> None:
        clusters = (Cluster(seed, fault_scale=0.0) for seed in count())
        self.cluster = next(each for each in clusters if each.scenario.keeps_checkpoints)
        self.cluster.run()
        self.master = self.cluster.leader()
        self.serving = self.cluster.serving()
        self.named = [self.serving[index].generation for index in range(self.cluster.pserver_count)]

    def reports_as_done(self, named: list[int] | None = None) -> None:
        self.cluster.account.check_done(self.master, self.named if named is None else named)


@pytest.fixture(scope="module")
def ended() -> Ended:
    return Ended()


@pytest.fixture
def makes_another_checkpoint(ended, monkeypatch):
    """A pserver has come back, so the master wants another last checkpoint."""
    monkeypatch.setattr(ended.master.core.ending, "final_ticket", None)


@pytest.fixture
def lacks_a_block(ended, monkeypatch):
    """The first pserver has only the first values of a block."""
    block = ended.serving[0].ordered[0]
    assert any(block.values)
    monkeypatch.setattr(block, "values", [0] * len(block.values))


@pytest.fixture
def saved_without_a_block(ended, monkeypatch):
    """The newest checkpoint has only the first values of a block."""
    files, number = ended.cluster.store.files, ended.cluster.pointer()
    shard = Manifest.decode(files[manifest_name(number)]).shards[0].name
    kept, *others = files[shard].values
    monkeypatch.setitem(files, shard, replace(files[shard], values=((0,) * len(kept), *others)))


@pytest.fixture
def has_quarantined_a_batch(ended):
    """The first batch of the first task that was done has failed too often since."""
    account, queue = ended.cluster.account, ended.master.core.work.queue
    epoch, task = next(iter(account._done[ended.cluster.lives]))
    position = queue.order(epoch).position_of(task)
    queue.failed.quarantine(FailedPiece(epoch, position, task, 0, 1, 9, "trainer-0", "its trainer died"))
    account._set_aside.add((epoch, task, 0))
    yield
    account._set_aside.clear()
    queue.failed.release((epoch, position), 0, 1)


def test_a_master_may_report_the_job_as_done_when_everything_is_saved(ended):
    ended.reports_as_done()


@pytest.mark.usefixtures("makes_another_checkpoint")
def test_a_decision_made_before_a_pserver_restarted_may_still_be_reported(ended):
    """The master has only waited for its state to be stored; the last checkpoint still has everything."""
    ended.reports_as_done()


@pytest.mark.usefixtures("saved_without_a_block")
def test_a_last_checkpoint_that_lacks_values_is_found(ended):
    with pytest.raises(Violation, match=r"the job is over, but checkpoint \d+ lacks"):
        ended.reports_as_done()


@pytest.mark.usefixtures("saved_without_a_block", "makes_another_checkpoint")
def test_a_last_checkpoint_that_lacks_values_is_found_while_another_is_made(ended):
    with pytest.raises(Violation, match=r"the job is over, but checkpoint \d+ lacks"):
        ended.reports_as_done()


def test_an_end_without_a_checkpoint_is_found(ended, monkeypatch):
    monkeypatch.setattr(ended.cluster, "pointer", lambda: None)
    with pytest.raises(Violation, match="has no checkpoint of its end"):
        ended.reports_as_done()


@pytest.mark.usefixtures("lacks_a_block")
def test_a_named_process_that_lacks_values_is_found(ended):
    with pytest.raises(Violation, match="reports the job as done, but"):
        ended.reports_as_done()


@pytest.mark.usefixtures("lacks_a_block")
def test_a_process_that_replaced_a_named_one_may_lack_values(ended):
    """No trainer reads the result from this process before the master has confirmed that it has everything."""
    ended.reports_as_done([ended.named[0] - 1, *ended.named[1:]])


@pytest.mark.usefixtures("has_quarantined_a_batch")
def test_a_batch_that_was_done_may_be_quarantined_when_it_is_repeated(ended):
    ended.reports_as_done()


def test_a_batch_that_was_done_and_is_not_repeated_is_found(ended, monkeypatch):
    done = ended.cluster.account._done[ended.cluster.lives]
    place, batches = next(iter(done.items()))
    count = ended.cluster.shape.batch_counts[place[1]]
    monkeypatch.setitem(done, place, IntervalSet([*batches, (count, count + 1)]))
    with pytest.raises(Violation, match="were done and are not"):
        ended.reports_as_done()


def test_a_master_that_writes_nothing_does_not_continue_from_a_restored_etcd(ended, monkeypatch):
    monkeypatch.setattr(ended.cluster.etcd, "has_gone_back", True)
    ended.master._write_now()
    assert ended.cluster.etcd.has_gone_back
