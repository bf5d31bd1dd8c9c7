"""The twins of Storage and Files, and planned faults."""

from __future__ import annotations

import pytest

from flightedl.errors import DataError
from tests.support.contracts.storage import StorageContract
from tests.support.faults import FaultPlan, InjectedFault
from tests.support.memory import MemoryFiles, MemoryStorage


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return MemoryStorage()


def test_a_crash_at_each_step_of_a_publish_leaves_the_old_or_the_new_file() -> None:
    rehearsal = MemoryStorage()
    rehearsal.publish("a", [b"1", b"2"])
    steps = rehearsal.plan.trace
    assert steps == ("publish:start", "publish:part", "publish:part", "publish:end", "publish:done")
    for n in range(1, len(steps) + 1):
        storage = MemoryStorage(plan=FaultPlan())
        storage.files["a"] = b"old"
        storage.plan.fail_at_step(n)
        with pytest.raises(InjectedFault):
            storage.publish("a", [b"1", b"2"])
        assert storage.files == {"a": b"12" if steps[n - 1] == "publish:done" else b"old"}


def test_a_point_fails_at_the_nth_pass_from_now_on() -> None:
    plan = FaultPlan()
    plan.reached("x")
    plan.fail_at("x", 2, OSError("disk"))
    plan.reached("x")
    with pytest.raises(OSError, match="disk"):
        plan.reached("x")
    plan.reached("x")
    assert plan.count("x") == 4


def test_memory_files_expand_and_open() -> None:
    files = MemoryFiles({"mem://b.parquet": b"22", "mem://a.parquet": b"1", "mem://c.csv": b"3"})
    stats = files.expand(["mem://*.parquet", "mem://a.parquet"])
    assert [(stat.url, stat.size_bytes) for stat in stats] == [("mem://a.parquet", 1), ("mem://b.parquet", 2)]
    assert files.open("mem://b.parquet").read() == b"22"
    with pytest.raises(DataError, match="zip"):
        files.expand(["*.zip"])
    with pytest.raises(DataError, match="zip"):
        files.open("a.zip")
