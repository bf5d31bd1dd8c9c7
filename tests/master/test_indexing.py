"""Indexing of a newly declared dataset while its store fails."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.retries import Patience
from flightedl.errors import DataError, InternalError, NotReadyError, UnavailableError
from flightedl.formats.following import DirectoryFollower
from flightedl.master.indexing import DatasetIndexing, IndexedDataset, look
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.ports import FileStat
from flightedl.testing.clock import FakeClock
from flightedl.testing.contracts.coordinator import eventually
from flightedl.testing.memory import MemoryFiles, MemoryStorage

DECLARED = DatasetDeclaration(urls=["/d/a.parquet"], batch_size=5)
DOWN = UnavailableError("the store does not answer")


@pytest.fixture
def files() -> MemoryFiles:
    sink = io.BytesIO()
    pq.write_table(pa.table({"k": list(range(20))}), sink)
    return MemoryFiles({"/d/a.parquet": sink.getvalue()})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.master.indexing._QUICK_S", 0.05)


def indexed(indexing: DatasetIndexing) -> IndexedDataset:
    found: list[IndexedDataset] = []

    def is_ready() -> bool:
        try:
            found.append(indexing.index(DECLARED))
        except NotReadyError:
            return False
        return True

    eventually(is_ready)
    return found[0]


@pytest.mark.parametrize("point", ["expand", "open", "file:read"])
def test_trainers_learn_that_the_store_fails_and_get_the_dataset_when_it_answers(
    files: MemoryFiles, point: str
) -> None:
    indexing = DatasetIndexing(files, SystemClock())
    files.plan.fail_from(point, DOWN)
    with pytest.raises(NotReadyError, match=r"the dataset to be indexed: the store does not answer"):
        indexing.index(DECLARED)
    files.plan.heal(point)
    assert indexed(indexing).reply.record_count == 20
    assert indexing.doing == ""


def test_a_store_that_keeps_failing_ends_the_declaration(files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.master.indexing.PATIENT", Patience(limit_s=0.2))
    files.plan.fail_from("expand", DOWN)
    with pytest.raises(DataError, match=r"the store does not answer; the last attempt was made after 0\.2 s"):
        indexed(DatasetIndexing(files, SystemClock()))


def test_a_bug_of_the_master_ends_the_declaration(files: MemoryFiles) -> None:
    files.plan.fail_at("expand", 1, KeyError("a bug"))
    with pytest.raises(InternalError, match="indexing failed by KeyError"):
        indexed(DatasetIndexing(files, SystemClock()))


class UnfinishedFiles(MemoryFiles):
    """Files to which a writer adds the last one and the end marker right after the first call."""

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> tuple[FileStat, ...]:
        found = super().expand(patterns, may_be_empty=may_be_empty)
        self._finish()
        return found

    def stat(self, url: str) -> FileStat | None:
        found = super().stat(url)
        self._finish()
        return found

    def _finish(self) -> None:
        self.contents |= {"/d/b.parquet": b"last", "/d/_END": b""}


def test_a_dataset_is_not_complete_before_a_file_that_was_written_while_it_was_listed() -> None:
    files, following = UnfinishedFiles({"/d/a.parquet": b"first"}), DirectoryFollower()
    joined: list[str] = []
    for _ in range(3):
        scan = look(files, following, ["/d/*.parquet"])
        following.joined(scan.stable)
        joined += [stat.url for stat in scan.stable]
        if scan.is_complete:
            break
    assert scan.is_complete
    assert joined == ["/d/a.parquet", "/d/b.parquet"]


def test_a_failed_declaration_may_be_repeated_after_a_minute_or_changed_at_once(files: MemoryFiles) -> None:
    clock = FakeClock(jumps=True)
    indexing = DatasetIndexing(files, clock)
    missing = DatasetDeclaration(urls=["/d/none.parquet"], batch_size=5)

    def declare(declared: DatasetDeclaration) -> IndexedDataset | str:
        found: list[IndexedDataset | str] = []

        def has_ended() -> bool:
            try:
                found.append(indexing.index(declared))
            except NotReadyError:
                return False
            except DataError as error:
                found.append(str(error))
            return True

        eventually(has_ended)
        return found[0]

    assert "no file matches" in str(declare(missing))
    files.contents["/d/none.parquet"] = files.contents["/d/a.parquet"]
    assert "no file matches" in str(declare(missing)), "trainers that declare together get one answer"
    clock.advance(61.0)
    repeated = declare(missing)
    assert isinstance(repeated, IndexedDataset)
    other = DatasetIndexing(files, clock)
    del files.contents["/d/none.parquet"]
    indexing = other
    assert "no file matches" in str(declare(missing))
    assert isinstance(declare(DECLARED), IndexedDataset)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_successor_detects_that_the_dataset_has_changed(files: MemoryFiles, is_stored: bool) -> None:
    storage = MemoryStorage() if is_stored else None
    known = indexed(DatasetIndexing(files, SystemClock(), storage)).reply
    again = DatasetIndexing(files, SystemClock(), storage).index_again(known)
    assert again.reply.index_hash == known.index_hash
    sink = io.BytesIO()
    pq.write_table(pa.table({"k": list(range(15))}), sink)
    files.contents["/d/a.parquet"] = sink.getvalue()
    if storage is None:
        with pytest.raises(DataError, match="have changed since the job began"):
            DatasetIndexing(files, SystemClock(), storage).index_again(known)
    else:
        assert DatasetIndexing(files, SystemClock(), storage).index_again(known).layout.record_count == 20
        newer = indexed(DatasetIndexing(files, SystemClock(), storage)).reply
        assert newer.record_count == 15
        with pytest.raises(DataError, match="have changed since the job began"):
            DatasetIndexing(files, SystemClock(), storage).index_again(known)
