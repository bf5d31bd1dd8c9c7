"""The loop of a group's rank: rounds, positions, commits and summaries."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.client.data import group_dataset
from flightedl.client.data.group_dataset import GroupDataset
from flightedl.client.data.pieces import PieceReader
from flightedl.client.data.readers import Transforming
from flightedl.client.probe import DATA, SCRIPT
from flightedl.domain.groups.plan import Piece, Round, RoundPlan
from flightedl.errors import DataError, FencedError, UsageError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.recordio import encode_chunk
from flightedl.formats.stored_index import index_from_pieces, index_to_pieces
from flightedl.master.indexing import _indexed
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.testing.memory import MemoryFiles

from . import transforms_of_tests as of_tests
from .loop_bench import waiting

RECORDS = 200


class Unattended:
    """Attendance without coordination: each rank starts from the token that it has loaded itself."""

    def begin(self, token: str, position: str) -> str:
        return token

    def kept(self, step: Round) -> Round:
        return step

    def take(self, at: int, step: Round) -> None: ...

    def finish(self) -> None: ...


class Ranks:
    """Datasets of a group's ranks over one file of ``RECORDS`` numbers, in row groups of 11."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "data.parquet"
        pq.write_table(pa.table({"id": range(RECORDS)}), self.path, row_group_size=11)
        self.done: list[int] = []
        self.turns: list[str] = []
        self.made: list[GroupDataset] = []

    def data(self, rank: int = 0, size: int = 1, **given: Any) -> GroupDataset:
        more = {"batch_size": 8, "epochs": 1, "seed": 5, "remainder": "split", "filter": (), "attendance": Unattended()}
        more |= given
        declared = DatasetDeclaration(urls=[str(self.path)], batch_size=1)
        spec = DatasetSpec((str(self.path),), filter=more["filter"])
        index = index_from_pieces(index_to_pieces(build_index(FsspecFiles(), spec)))
        layout, seed = TaskLayout(index, 1), more["seed"]
        plan_from = partial(
            RoundPlan,
            layout.task_records,
            epochs=more["epochs"],
            seed=seed,
            world_size=size,
            rank=rank,
            batch_size=more["batch_size"],
            remainder=more["remainder"],
        )
        reader = PieceReader(FsspecFiles(), layout, spec, seed, None, lambda _: None)
        self.made.append(
            GroupDataset(
                _indexed(index, declared).reply,
                more.get("digest", "digest"),
                lambda start: plan_from(start=start),
                seed,
                reader.read,
                rank,
                more["attendance"],
                self.done.append,
                self.turns.append,
                waiting,
                str,
                explicit_commit=more.get("explicit_commit", False),
                transforming=more.get("transforming"),
                place=reader.place,
            )
        )
        return self.made[-1]

    def group(self, size: int, **given: Any) -> list[GroupDataset]:
        return [self.data(rank, size, **given) for rank in range(size)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for data in made.made:
        data.close()


def rounds_of(group: list[GroupDataset], limit: int | None = None) -> list[list[list[int]]]:
    """Return up to ``limit`` rounds, each with the records of every rank."""
    loops = [iter(data) for data in group]
    found: list[list[list[int]]] = []
    while len(found) != limit:
        batches = [next(loop, None) for loop in loops]
        if batches[0] is None:
            assert not any(batches)
            break
        found.append([batch["id"].to_pylist() for batch in batches if batch is not None])
        assert len(found[-1]) == len(group)
    return found


def counted(rounds: list[list[list[int]]]) -> Counter[int]:
    return Counter(record for batches in rounds for batch in batches for record in batch)


@pytest.mark.parametrize("seed", [None, 5])
def test_each_record_is_yielded_once_over_three_starts_with_different_groups(ranks: Ranks, seed: int | None) -> None:
    first = ranks.group(4, batch_size=4, seed=seed)
    rounds = rounds_of(first, 3)
    assert len({data.state_dict()["flightedl_data"] for data in first}) == 1
    second = ranks.group(2, batch_size=8, seed=seed)
    for data in second:
        data.load_state_dict(first[0].state_dict())
    rounds += rounds_of(second, 4)
    third = ranks.group(3, batch_size=8, seed=seed)
    for data in third:
        data.load_state_dict(second[1].state_dict())
    rounds += rounds_of(third)

    assert counted(rounds) == Counter(range(RECORDS))
    assert all(data.is_over for data in third)


def test_a_position_follows_the_current_round_and_not_the_rounds_read_ahead(ranks: Ranks) -> None:
    data = ranks.data()
    beginning = data.state_dict()
    seen = []
    for batch in data:
        seen += batch["id"].to_pylist()
        if len(seen) == 24:
            break
    again = ranks.data()
    again.load_state_dict(data.state_dict())
    assert not set(seen) & set(counted(rounds_of([again])))
    resumed = ranks.data()
    resumed.load_state_dict(beginning)
    assert counted(rounds_of([resumed])) == Counter(range(RECORDS))


def test_the_loop_knows_records_and_epoch_of_its_batch(ranks: Ranks) -> None:
    data = ranks.data(batch_size=RECORDS - 1, epochs=2)
    assert data.current is None
    assert [data.current for _ in data] == [(RECORDS - 1, 0), (1, 0), (RECORDS - 1, 1), (1, 1)]
    assert data.current is None


def test_a_loop_that_was_left_can_resume(ranks: Ranks) -> None:
    data = ranks.data()
    rounds = rounds_of([data], 5) + rounds_of([data])
    assert counted(rounds) == Counter(range(RECORDS))
    with pytest.raises(UsageError, match="received all rounds of all epochs"):
        iter(data)


def test_only_committed_rounds_count(ranks: Ranks) -> None:
    data = ranks.data(explicit_commit=True)
    loop = iter(data)
    batches = [next(loop) for _ in range(4)]
    nothing = data.state_dict()
    data.commit()
    one = data.state_dict()
    data.commit(batches[2])
    three = data.state_dict()
    with pytest.raises(UsageError, match="not one of the loop's batches"):
        data.commit(batches[1])

    for state, count in ((nothing, 0), (one, 1), (three, 3)):
        again = ranks.data()
        again.load_state_dict(state)
        left = counted(rounds_of([again]))
        assert set(left) == set(range(RECORDS)) - {n for batch in batches[:count] for n in batch["id"].to_pylist()}


def test_a_loop_that_never_commits_is_warned(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_dataset, "_UNCOMMITTED_LIMIT", 10)
    with pytest.raises(
        UsageError, match=r"the last 10 batches are not committed.*call data.commit\(\) after each step"
    ):
        rounds_of([ranks.data(explicit_commit=True)])


def test_commit_requires_explicit_commit(ranks: Ranks) -> None:
    with pytest.raises(UsageError, match="declare explicit_commit=True"):
        ranks.data().commit()


def test_a_filtered_batch_is_yielded_without_rows(ranks: Ranks) -> None:
    rounds = rounds_of(ranks.group(2, filter=(("id", "<", 16),), seed=None))
    assert counted(rounds) == Counter(range(16))
    assert len(rounds) == -(-RECORDS // 16)


def test_a_rank_without_records_gets_a_batch_without_rows(ranks: Ranks) -> None:
    pq.write_table(pa.table({"id": range(3)}), ranks.path)
    assert rounds_of(ranks.group(5)) in (
        [[[a], [b], [c], [], []]] for a in range(3) for b in range(3) for c in range(3)
    )
    assert ranks.made[4].schema.names == ["id"]


def test_the_summary_counts_skipped_and_repeated_records(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    dropping, padding = ranks.group(3, remainder="drop"), ranks.group(3, remainder="pad")
    rounds_of(dropping)
    rounds_of(padding)
    for data, left_out, repeated in ((dropping[1], RECORDS % 24, 0), (padding[1], 0, -RECORDS % 24)):
        assert data.summary is not None
        assert (data.summary.left_out, data.summary.repeated) == (left_out, repeated)
    assert f"left_out={RECORDS % 24}" in caplog.text
    assert f"repeated={-RECORDS % 24}" in caplog.text


def test_epochs_follow_one_another(ranks: Ranks) -> None:
    data = ranks.data(epochs=2)
    epochs = Counter(data.epoch for _ in data)
    assert epochs == {0: RECORDS // 8, 1: RECORDS // 8}
    assert Counter(ranks.turns) == {SCRIPT: RECORDS // 4, DATA: RECORDS // 4}
    assert sum(ranks.done) == 2 * RECORDS
    with pytest.raises(UsageError, match="no batch is current"):
        _ = data.epoch


def _damaged(state: dict[str, str]) -> dict[str, str]:
    return {key: text[:-2] for key, text in state.items()}


@pytest.mark.parametrize(
    ("change", "more", "sentence"),
    [
        (_damaged, {}, "damaged or incomplete"),
        (lambda _: {"model": 1}, {}, "load the result of data.state_dict"),
        (lambda _: "text", {}, "load the result of data.state_dict"),
        (dict, {"digest": "other"}, "belongs to other data"),
        (dict, {"seed": 6}, "belongs to seed=5, but the data is declared with seed=6"),
    ],
)
def test_a_bad_position_is_rejected_without_consuming_records(
    ranks: Ranks, change: Callable[[dict[str, str]], Any], more: dict[str, Any], sentence: str
) -> None:
    before = ranks.data()
    rounds_of([before], 2)
    data = ranks.data(**more)
    with pytest.raises(UsageError, match=sentence):
        data.load_state_dict(change(before.state_dict()))
    assert counted(rounds_of([data])) == Counter(range(RECORDS))


def test_a_position_must_be_loaded_before_the_first_batch(ranks: Ranks) -> None:
    data = ranks.data()
    next(iter(data))
    with pytest.raises(UsageError, match="before the first batch"):
        data.load_state_dict(data.state_dict())


class Followed(Unattended):
    """Attendance in which one rank has loaded a token, and all ranks start from it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.declared: list[tuple[str, str]] = []
        self.rounds_taken: list[tuple[int, Round]] = []
        self.finished = 0
        self.is_over = False

    def begin(self, token: str, position: str) -> str:
        self.declared.append((token, position))
        return self.token

    def take(self, at: int, step: Round) -> None:
        if self.is_over:
            raise FencedError("over")
        self.rounds_taken.append((at, step))

    def finish(self) -> None:
        self.finished += 1


def test_the_position_of_another_rank_is_used_and_each_round_is_reported(ranks: Ranks) -> None:
    before = ranks.data()
    rounds_of([before], 3)
    attendance = Followed(before.state_dict()["flightedl_data"])
    data = ranks.data(attendance=attendance, explicit_commit=True)
    rounds = rounds_of([data])

    assert attendance.declared == [("", "")]
    assert attendance.finished == 1
    assert [at for at, _ in attendance.rounds_taken] == list(range(24, RECORDS, 8))
    assert sum(counted(rounds).values()) == RECORDS - 24


def test_a_start_that_is_over_gets_no_more_rounds(ranks: Ranks) -> None:
    attendance = Followed("")
    loop = iter(ranks.data(attendance=attendance))
    next(loop)
    attendance.is_over = True
    with pytest.raises(FencedError):
        next(loop)


def test_a_file_that_changed_ends_the_loop(ranks: Ranks) -> None:
    data = ranks.data()
    pq.write_table(pa.table({"id": range(RECORDS + 1)}), ranks.path, row_group_size=11)
    with pytest.raises(DataError, match="has changed since it was indexed"):
        rounds_of([data])


@pytest.mark.parametrize("readers", [0, 2])
def test_rounds_are_transformed_in_order(readers: int, ranks: Ranks) -> None:
    plain = rounds_of([ranks.data()])
    found = rounds_of([ranks.data(transforming=Transforming(of_tests.negative, readers))])
    assert found == [[[-number for number in batch] for batch in each] for each in plain]


@pytest.mark.parametrize("readers", [0, 2])
def test_a_failed_transform_of_a_round_raises_an_error_with_its_records(readers: int, ranks: Ranks) -> None:
    data = ranks.data(seed=None, transforming=Transforming(of_tests.broken_at_fifty, readers))
    loop = iter(data)
    assert [next(loop)["id"][0].as_py() for _ in range(6)] == [0, 8, 16, 24, 32, 40]
    with pytest.raises(
        DataError, match=r"transform=broken_at_fifty failed at .*data.parquet, records 48-55: ValueError"
    ):
        next(loop)


def test_closing_does_not_wait_for_an_endless_transform(ranks: Ranks) -> None:
    data = ranks.data(transforming=Transforming(of_tests.endless_after_fifty, 1), seed=None)
    next(iter(data))
    data.close()


@pytest.mark.parametrize("taken", [24, 25, 26, 30])
def test_a_position_in_a_later_epoch_continues_with_the_next_round(ranks: Ranks, taken: int) -> None:
    """An epoch has 25 rounds."""
    first = ranks.data(epochs=3)
    rounds = rounds_of([first], taken)
    second = ranks.data(epochs=3)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    rounds += rounds_of([second])
    assert counted(rounds) == dict.fromkeys(range(RECORDS), 3), "rounds were repeated or left out"


def test_the_master_knows_the_round_whose_records_raise_an_error(ranks: Ranks) -> None:
    attendance = Followed("")
    data = ranks.data(seed=None, transforming=Transforming(of_tests.broken_at_fifty), attendance=attendance)
    with pytest.raises(DataError, match="broken_at_fifty"):
        rounds_of([data])
    assert [at for at, _ in attendance.rounds_taken] == [*range(0, 56, 8)], "an earlier round is blamed"


def test_corrupt_records_of_a_round_are_left_out_and_counted() -> None:
    damaged = bytearray(encode_chunk([b"b%d" % n for n in range(4)], "none"))
    damaged[-1] ^= 1
    files = MemoryFiles({"a.recordio": encode_chunk([b"a0", b"a1"], "none") + bytes(damaged)})
    spec = DatasetSpec(("a.recordio",), on_corrupt="skip")
    layout = TaskLayout(build_index(files, spec), 1, chunks_per_task=2)
    skipped: list[int] = []
    reader = PieceReader(files, layout, spec, None, None, skipped.append)
    batch = reader.read(Round(0, 0, 0, (Piece(0, 0, 6),)))
    assert batch["record"].to_pylist() == [b"a0", b"a1"]
    assert sum(skipped) == 4
