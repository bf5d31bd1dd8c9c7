"""The loop of a group's rank: rounds, positions, commits and summaries."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from flightedl.domain.groups.plan import Order, Piece, Round, RoundPlan
from flightedl.domain.groups.shuffling import Shuffling, advice_of, order_of
from flightedl.errors import DataError, FencedError, LostDataError, UsageError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.mixed_layout import group_data
from flightedl.formats.recordio import encode_chunk
from flightedl.formats.stored_index import index_from_pieces, index_to_pieces
from flightedl.master.indexing import _indexed
from flightedl.messages.declarations import DatasetDeclaration
from tests.support.memory import MemoryFiles

from . import transforms_of_tests as of_tests
from .loop_bench import waiting

RECORDS = 200


class Unattended:
    """Attendance without coordination: each rank starts from the token that it has loaded itself."""

    def __init__(self) -> None:
        self.left_out: list[tuple[int, int, int, int, int, int]] = []
        #: Last position at which a round may start; None for no limit.
        self.stop_after: int | None = None

    def begin(self, token: str, position: str) -> str:
        return token

    def take(self, at: int, step: Round, uncommitted: Sequence[Round] = ()) -> bool:
        return self.stop_after is None or at <= self.stop_after

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
        """Return the data of a rank. ``batch_size`` is that of each rank, unless there is a ``global_batch``."""
        more = {"batch_size": 8, "epochs": 1, "seed": 5, "remainder": "split", "filter": (), "attendance": Unattended()}
        more |= given
        urls = more.get("urls", [str(self.path)])
        mixture = {name: more[name] for name in ("mixture", "stop") if name in more}
        declared = DatasetDeclaration(urls=urls, batch_size=1, **mixture)
        spec = DatasetSpec(tuple(urls), filter=more["filter"])
        index = index_from_pieces(index_to_pieces(build_index(FsspecFiles(), spec)))
        shuffling, batch_size = (
            more.get("shuffling", Shuffling()),
            more.get("global_batch") or more["batch_size"] * size,
        )
        data = group_data(index, declared, more["seed"])
        plan_from = partial(
            RoundPlan,
            data.record_count,
            epochs=more["epochs"],
            order=order_of(data, batch_size, shuffling),
            world_size=size,
            rank=rank,
            batch_size=batch_size,
            remainder=more["remainder"],
        )
        reader = PieceReader(FsspecFiles(), index, data, spec, None, lambda _: None)
        self.made.append(
            GroupDataset(
                _indexed(index, declared, None).reply,
                more.get("digest", "digest"),
                lambda start: plan_from(start=start),
                data.seed,
                shuffling,
                reader,
                rank,
                more["attendance"],
                self.done.append,
                self.turns.append,
                waiting,
                str,
                explicit_commit=more.get("explicit_commit", False),
                transforming=more.get("transforming"),
                may_lose=more.get("may_lose", False),
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
    assert [data.current for _ in data] == [(100, 0), (100, 0), (100, 1), (100, 1)], "two batches share 200 records"
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
    (batches,) = rounds_of(ranks.group(5))
    assert sorted(map(len, batches)) == [0, 0, 1, 1, 1]
    assert counted([batches]) == Counter(range(3))
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
        super().__init__()
        self.token = token
        self.declared: list[tuple[str, str]] = []
        self.rounds_taken: list[tuple[int, Round]] = []
        self.finished = 0
        self.is_over = False

    def begin(self, token: str, position: str) -> str:
        self.declared.append((token, position))
        return self.token

    def take(self, at: int, step: Round, uncommitted: Sequence[Round] = ()) -> bool:
        if self.is_over:
            raise FencedError("over")
        self.rounds_taken.append((at, step))
        return True

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


def test_a_transform_that_ends_the_script_raises_an_error(ranks: Ranks) -> None:
    data = ranks.data(transforming=Transforming(lambda _: sys.exit(0)))
    with pytest.raises(DataError, match="transform= or decode= cannot end the script, but raised SystemExit: 0"):
        next(iter(data))


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
    index = build_index(files, spec)
    skipped: list[int] = []
    data = group_data(index, DatasetDeclaration(urls=["a.recordio"], batch_size=1), None)
    reader = PieceReader(files, index, data, spec, None, skipped.append)
    (batch,) = reader.read([Round(0, 0, 0, 6, Order(1), (Piece(0, 0, 6),))])
    assert batch["record"].to_pylist() == [b"a0", b"a1"]
    assert sum(skipped) == 4


def position_of(data: GroupDataset) -> str:
    return data.state_dict()["flightedl_data"]


def failing_once(data: GroupDataset, at: int) -> None:
    """Let the reading of a round fail once, as if its file were away for a moment."""
    read, failures = data._read, [DataError("the file is away")]

    def read_or_fail(steps: Sequence[Round]) -> Iterator[pa.RecordBatch]:
        for step in steps:
            if step.number == at and failures:
                raise failures.pop()
            yield from read([step])

    data._read = read_or_fail


@pytest.mark.parametrize("explicit_commit", [False, True])
def test_an_error_that_ends_a_loop_stays_and_loses_no_round(ranks: Ranks, explicit_commit: bool) -> None:
    before = ranks.data()
    rounds_of([before], 3)
    data = ranks.data(explicit_commit=explicit_commit)
    failing_once(data, 3)
    loop = iter(data)
    for _ in range(3):
        next(loop)
        if explicit_commit:
            data.commit()
    for attempt in (loop, iter(data), iter(data)):
        with pytest.raises(DataError, match="the file is away"):
            next(attempt)
    assert position_of(data) == position_of(before), "the position is not before the round that failed"
    assert data.error is not None


def test_a_failed_transform_shifts_no_position(ranks: Ranks) -> None:
    """The reader thread reads on after a failed transform."""
    before = ranks.data(seed=None)
    rounds_of([before], 6)
    data = ranks.data(seed=None, transforming=Transforming(of_tests.broken_at_fifty))
    for _ in range(3):
        with pytest.raises(DataError, match="broken_at_fifty"):
            rounds_of([data])
        assert position_of(data) == position_of(before)


def test_a_loop_inside_a_loop_continues_it_and_ends_both(ranks: Ranks) -> None:
    outer, data = [], ranks.data()
    inner: list[int] = []
    for batch in data:
        outer += batch["id"].to_pylist()
        for number, more in enumerate(data):
            inner += more["id"].to_pylist()
            if number == 2:
                break
    assert sorted(outer + inner) == list(range(RECORDS))
    assert data.is_over


def test_an_interrupted_round_is_the_next_one_again(ranks: Ranks) -> None:
    attendance = Followed("")
    take = attendance.take
    data = ranks.data(attendance=attendance)
    loop = iter(data)
    seen = next(loop)["id"].to_pylist()

    def interrupt(at: int, step: Round, uncommitted: Sequence[Round]) -> bool:
        raise KeyboardInterrupt

    attendance.take = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    attendance.take = take  # type: ignore[method-assign]
    assert counted(rounds_of([data])) + Counter(seen) == Counter(range(RECORDS))


def test_all_ranks_end_before_the_first_round_after_a_stop(ranks: Ranks) -> None:
    group = ranks.group(2)
    for data in group:
        data._attendance.stop_after = 32  # type: ignore[attr-defined]
    rounds = rounds_of(group)
    assert len(rounds) == 3, "the rounds before 0, 16 and 32 records"
    assert all(data.is_over for data in group)
    resumed = ranks.data()
    resumed.load_state_dict(group[1].state_dict())
    assert counted(rounds) + counted(rounds_of([resumed])) == Counter(range(RECORDS))


def test_a_loop_without_some_records_ends_with_an_error_on_every_rank(ranks: Ranks) -> None:
    group = ranks.group(2, seed=None, epochs=2)
    for data in group:
        data._attendance.left_out = [(0, 1, 0, 0, 11, 15), (1, 1, 0, 0, 2, 3)]  # type: ignore[misc]
        batches: list[pa.RecordBatch] = []
        with pytest.raises(LostDataError, match=r"5 records were set aside.*data.parquet, records 11-14"):
            batches.extend(iter(data))
        assert len(batches) == 2 * -(-RECORDS // 16), "the error comes after the last round"
        assert data.summary is not None
        assert (data.summary.records, data.summary.lost_records) == (RECORDS - 1, 1)
        with pytest.raises(LostDataError):
            iter(data).__next__()


def test_a_loop_may_continue_without_some_records(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    data = ranks.data(may_lose=True)
    data._attendance.left_out = [(0, 4, 65_536, 0, 0, 4)]  # type: ignore[misc]
    assert len(rounds_of([data])) == RECORDS // 8
    assert data.summary is not None
    assert data.summary.lost_records == 4
    assert "4 records were set aside" in capsys.readouterr().err


def global_batches(rounds: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(record for batch in batches for record in batch) for batches in rounds]


@pytest.mark.parametrize("records", [480, 481, 503, 527, 1000])
def test_global_batches_are_the_same_for_any_number_of_ranks(ranks: Ranks, records: int) -> None:
    pq.write_table(pa.table({"id": range(records)}), ranks.path, row_group_size=11)
    alone = rounds_of(ranks.group(1, global_batch=48))
    assert counted(alone) == Counter(range(records))
    for size in (2, 3, 4, 8):
        assert global_batches(rounds_of(ranks.group(size, global_batch=48))) == global_batches(alone)


@pytest.mark.parametrize("records", [481, 503, 527])
def test_global_batches_are_the_same_after_restarts_with_other_numbers_of_ranks(ranks: Ranks, records: int) -> None:
    """Each start trains two rounds that its checkpoint lacks."""
    pq.write_table(pa.table({"id": range(records)}), ranks.path, row_group_size=11)
    expected = global_batches(rounds_of(ranks.group(1, global_batch=48, epochs=2)))
    found: list[list[int]] = []
    state = None
    for size, count in ((4, 3), (2, 0), (3, 9), (2, None)):
        group = ranks.group(size, global_batch=48, epochs=2)
        for data in group:
            if state is not None:
                data.load_state_dict(state)
        rounds = rounds_of(group, count)
        state = group[-1].state_dict()
        found += global_batches(rounds)
        if count is not None:
            rounds_of(group, 2)
    assert found == expected


def test_sorted_records_are_mixed_in_every_batch(ranks: Ranks) -> None:
    """Class i has records 60 i to 60 i + 59, in row groups of 20."""
    pq.write_table(pa.table({"id": range(1200)}), ranks.path, row_group_size=20)
    rounds = rounds_of(ranks.group(2, batch_size=16))
    kinds = [len({record // 60 for batch in batches for record in batch}) for batches in rounds]
    assert min(kinds) >= 8
    shuffled = Shuffling(lanes=8, block=8)
    assert rounds_of(ranks.group(2, batch_size=16, shuffling=shuffled)) != rounds


def held_and_decoded(ranks: Ranks, size: int, **given: Any) -> tuple[float, float]:
    """Return the held memory in relation to the promised one, and the records that ranks decode, to those they get."""
    group = ranks.group(size, **given)
    rounds_of(group)
    data = group[0]._pieces._data
    batch_size = given["batch_size"] * size
    order = order_of(data, batch_size, Shuffling())
    advice = advice_of(data, order, batch_size, size, Shuffling())
    summaries = [data.summary for data in group]
    held = max(summary.held_bytes for summary in summaries if summary)
    decoded = max(summary.decoded_records for summary in summaries if summary)
    return held / advice.held_bytes, decoded * size / data.record_count(order.lanes)


@pytest.mark.parametrize(
    ("chunks", "size", "batch_size", "most"),
    [(32, 1, 16, 1.3), (37, 2, 8, 1.3), (33, 4, 4, 1.3), (400, 4, 4, 1.05), (40, 3, 8, 1.3 * (3 + 1) * 3 / 8)],
)
def test_a_rank_decodes_its_share_and_holds_what_was_promised(
    ranks: Ranks, chunks: int, size: int, batch_size: int, most: float
) -> None:
    table = pa.table({"id": range(10 * chunks), "value": [float(number) for number in range(10 * chunks)]})
    pq.write_table(table, ranks.path, row_group_size=10)
    held, decoded = held_and_decoded(ranks, size, batch_size=batch_size)
    assert decoded <= most
    assert 0 < held <= 1


def test_a_file_without_a_seed_is_decoded_once_in_its_order(ranks: Ranks) -> None:
    (data,) = group = ranks.group(1, seed=None)
    assert [record for (batch,) in rounds_of(group) for record in batch] == list(range(RECORDS))
    assert data.summary is not None
    assert data.summary.decoded_records == RECORDS


def test_batches_of_a_mixture_have_records_of_both_sources(ranks: Ranks) -> None:
    other = ranks.path.with_name("other.parquet")
    pq.write_table(pa.table({"id": range(1000, 1100)}), other, row_group_size=7)
    urls = [str(ranks.path), str(other)]
    more = {"urls": urls, "mixture": [2.0, 1.0], "stop": "all", "filter": (("id", "!=", 1001),)}
    rounds = rounds_of(ranks.group(3, global_batch=30, **more))
    assert counted(rounds) == Counter([*range(RECORDS), 1000, *range(1002, 1100)])
    assert global_batches(rounds) == global_batches(rounds_of(ranks.group(1, global_batch=30, **more)))
    shares = [sum(record >= 1000 for record in batch) / len(batch) for batch in global_batches(rounds)]
    assert all(0.1 < share < 0.6 for share in shares), shares


def test_records_of_recordio_are_decoded_by_the_users_function() -> None:
    chunks = [encode_chunk([b"%d" % number for number in range(first, first + 5)], "none") for first in range(0, 40, 5)]
    files = MemoryFiles({"a.recordio": b"".join(chunks)})
    spec = DatasetSpec(("a.recordio",), columns=("n",), filter=(("n", "!=", 7),))
    index = build_index(files, spec)
    data = group_data(index, DatasetDeclaration(urls=["a.recordio"], batch_size=1), 3)
    reader = PieceReader(files, index, data, spec, lambda record: {"n": int(record)}, lambda _: None)
    plan = RoundPlan(data.record_count, epochs=1, order=Order(4, 6), world_size=1, rank=0, batch_size=8)
    steps = [step for step in iter(plan.next, None) if isinstance(step, Round)]
    found = [batch["n"].to_pylist() for batch in reader.read(steps)]
    assert [len(batch) for batch in found].count(8) == 4
    assert sorted(record for batch in found for record in batch) == sorted({*range(40)} - {7})
    assert [batch["n"].to_pylist() for step in steps for batch in reader.read([step])] == found, "read again"
    (none,) = reader.read([Round(0, 0, 0, 0, Order(4, 6), ())])
    assert (none.num_rows, none.schema.names) == (0, ["n"])
