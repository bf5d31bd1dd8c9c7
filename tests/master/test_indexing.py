"""Indexing of a newly declared dataset while its store fails."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.storage import FsspecFiles
from flightedl.domain.queue.drawing import SIZE_BYTES, VERSION
from flightedl.domain.retries import Patience
from flightedl.errors import DataError, InternalError, NotReadyError, UnavailableError, UsageError
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.following import DirectoryFollower
from flightedl.formats.index import extended_index
from flightedl.master.indexing import DatasetIndexing, IndexedDataset, look
from flightedl.messages.declarations import DatasetDeclaration, Drawing
from flightedl.ports import FileListing, FileStat
from tests.support.clock import FakeClock
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryFiles, MemoryStorage

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


def indexed(indexing: DatasetIndexing, declared: DatasetDeclaration = DECLARED) -> IndexedDataset:
    found: list[IndexedDataset] = []

    def is_ready() -> bool:
        try:
            found.append(indexing.index(declared))
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

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> FileListing:
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


def test_a_job_keeps_the_tasks_with_which_it_began() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"k": range(60)}), sink, row_group_size=10)
    files = MemoryFiles({"/d/a.parquet": sink.getvalue()})
    declared = replace(DECLARED, shuffle=True, seed=3, shuffle_bytes=SIZE_BYTES)
    first = indexed(DatasetIndexing(files, SystemClock()), declared)
    tasks = [first.layout.chunks_of(task) for task in range(first.layout.task_count)]
    assert (len(tasks), {len(chunks) for chunks in tasks}) == (6, {6}), first.reply.advice
    assert first.reply.mixed_chunks == 6
    for shuffled in ({"seed": 4}, {"shuffle": False}):
        resumed = replace(first.reply, declaration=replace(declared, **shuffled))
        again = DatasetIndexing(files, SystemClock()).index_again(resumed)
        assert [again.layout.chunks_of(task) for task in range(again.layout.task_count)] == tasks
        assert again.reply == resumed
    of_former_version = replace(first.reply, drawing=None)
    former = DatasetIndexing(files, SystemClock()).index_again(of_former_version)
    assert [[chunk.number for chunk in former.layout.chunks_of(task)] for task in range(6)] == [[n] for n in range(6)]
    assert former.layout.pieces is None
    of_newer_version = replace(first.reply, drawing=Drawing(seed=3, size_bytes=1, version=VERSION + 1))
    with pytest.raises(UsageError, match="a newer version of flightedl has begun this job"):
        DatasetIndexing(files, SystemClock()).index_again(of_newer_version)


def test_a_successor_refuses_files_whose_values_may_have_changed_unless_they_are_copies(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"k": list(range(20))}), file)
    declared = DatasetDeclaration(urls=[str(file)], batch_size=5)
    known = indexed(DatasetIndexing(FsspecFiles(), SystemClock()), declared).reply
    os.utime(file, ns=(5, 5))
    with pytest.raises(DataError, match=r"so values may have changed, too: .* --data-moved OLD=NEW"):
        DatasetIndexing(FsspecFiles(), SystemClock()).index_again(known)
    copies = FsspecFiles({str(tmp_path): str(tmp_path)})
    assert DatasetIndexing(copies, SystemClock()).index_again(known).reply.index_hash == known.index_hash


def test_a_declaration_is_admitted_without_queries_and_under_its_first_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("k\n1\n")
    indexing = DatasetIndexing(FsspecFiles(), SystemClock())
    signed = DatasetDeclaration(urls=["https://h/a.csv?sig=secret"], batch_size=5)
    assert indexing.admitted(signed) == DatasetDeclaration(urls=["https://h/a.csv"], batch_size=5)
    moved = DatasetDeclaration(urls=[f"{tmp_path}/*.csv"], batch_size=5, data_moved={"/old": str(tmp_path)})
    admitted = indexing.admitted(moved)
    assert admitted == DatasetDeclaration(urls=["/old/*.csv"], batch_size=5)
    assert indexed(indexing, admitted).layout.index.stats[0].url == "/old/a.csv"


def test_a_followed_dataset_names_a_link_without_a_target_and_reads_it_when_it_has_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("k\n1\n")
    (tmp_path / "_SUCCESS.csv").write_text("")
    (tmp_path / "b.csv").symlink_to("later")
    files, patterns = FsspecFiles(), [f"{tmp_path}/*.csv"]
    clock = FakeClock(jumps=True)
    declared = DatasetDeclaration(urls=patterns, batch_size=5, follow=True)
    first = indexed(DatasetIndexing(files, clock, follow_every_s=0.0), declared).layout.index
    assert [Path(stat.url).name for stat in first.stats] == ["a.csv"]
    following = DirectoryFollower(first.stats)
    look(files, following, patterns)
    (broken,) = look(files, following, patterns).stable
    index, refused = extended_index(files, spec_of(declared), first, [broken])
    assert len(index.stats) == 1
    following.failed(broken, refused[broken], clock.now())
    assert following.trouble.endswith("b.csv: check the path: it is left out until it changes")
    assert following.names_left_out[0].endswith("a name that a wildcard matches begins with _ or .")
    (tmp_path / "later").write_text("k\n2\n")
    look(files, following, patterns)
    (repaired,) = look(files, following, patterns).stable
    assert extended_index(files, spec_of(declared), first, [repaired])[0].record_count == 2
