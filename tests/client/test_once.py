"""Names and saved models for one trainer only: a trainer that was replaced while it was frozen changes no file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.model.saving import ModelSaves
from flightedl.client.once import OnceNames
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.coordination.checkpoint_places import write_file
from flightedl.coordination.keys import JobKeys
from flightedl.domain.trainer.membership import AFTER_ALL
from flightedl.errors import FencedError, OutcomeUnknownError
from flightedl.messages.base import decode
from flightedl.messages.checkpoints import SaveRecord
from flightedl.ports import TransactionResult
from tests.coordination.process_clock import ProcessClock
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
TTL_S = 0.6


class Trainer:
    """One trainer's claims of names and of requests to save."""

    def __init__(self, store: MemoryCoordinator, ttl_s: float = 60.0, name: str = "") -> None:
        self.coordinator = store.another()
        self.registration = Registration(self.coordinator, store._store.clock, KEYS, ttl_s, name)
        self.life = 0
        self.names = OnceNames(self.coordinator, KEYS, self.registration, self._waiting, lambda: self.life)
        self.saves = ModelSaves(self.coordinator, KEYS, self.registration, self._waiting, lambda: self.life)

    def _waiting(self) -> Waiting:
        return Waiting(SystemClock(), 60.0, 60.0, lambda _: None)

    def frozen(self) -> None:
        """Let the trainer's lease expire unnoticed."""
        self.coordinator.end_lease(self.registration.held.lease_id)

    def end(self) -> None:
        self.names.keep()
        self.registration.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def trainers(stack: ExitStack) -> tuple[Trainer, Trainer]:
    store = MemoryCoordinator(SystemClock())
    made = Trainer(store), Trainer(store)
    for trainer in made:
        stack.callback(trainer.registration.close)
    return made


def test_one_trainer_wins_and_may_claim_again(trainers: tuple[Trainer, Trainer]) -> None:
    one, other = trainers
    won, lost = one.names.claim("report"), other.names.claim("report")
    assert won
    assert not lost
    won.require()
    with pytest.raises(FencedError):
        lost.require()
    assert one.names.claim("report").generation == won.generation
    assert other.names.claim("another")


def test_a_trainer_waits_for_the_lease_of_the_one_that_it_has_replaced(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the only trainer of a job would not repeat what it did when it was killed."""
    store = MemoryCoordinator(SystemClock())
    dead, other = Trainer(store, name="trainer-0"), Trainer(store, name="trainer-1")
    monkeypatch.setattr("flightedl.client.registration.machine.process_id", lambda: 2)
    made = Trainer(store, name="trainer-0")
    for trainer in (dead, other, made):
        stack.callback(trainer.registration.close)
    assert dead.names.claim("report")
    assert not other.names.claim("report")
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(made.names.claim, "report")
        with pytest.raises(TimeoutError):
            claimed.result(0.3)
        dead.frozen()
        assert claimed.result(10.0)


def test_a_name_stays_claimed_after_a_clean_end(trainers: tuple[Trainer, Trainer]) -> None:
    one, other = trainers
    assert one.names.claim("report")
    one.end()
    assert not other.names.claim("report")


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_one_error_of_the_store_at_a_clean_end_gives_no_name_away(
    trainers: tuple[Trainer, Trainer], monkeypatch: pytest.MonkeyPatch, is_carried_out: bool
) -> None:
    one, other = trainers
    for name in ("report", "table"):
        assert one.names.claim(name)
    transact, errors = one.coordinator.transact, [OutcomeUnknownError("no answer")]

    def fail_once(*arguments: Any) -> TransactionResult:
        if errors:
            if is_carried_out:
                transact(*arguments)
            raise errors.pop()
        return transact(*arguments)

    monkeypatch.setattr(one.coordinator, "transact", fail_once)
    one.end()
    assert not other.names.claim("report")
    assert not other.names.claim("table")


def test_a_clean_end_leaves_the_names_of_a_successor_alone(trainers: tuple[Trainer, Trainer]) -> None:
    """The successor's name must stay on its own lease, so that it becomes free if the successor dies."""
    one, other = trainers
    assert one.names.claim("report")
    one.frozen()
    won = other.names.claim("report")
    assert won
    one.end()
    won.require()
    other.frozen()
    assert not one.coordinator.list(KEYS.once).entries


def test_a_name_that_is_claimed_during_a_clean_end_stays_with_its_holder(
    trainers: tuple[Trainer, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = trainers
    assert one.names.claim("report")
    transact, taken = one.coordinator.transact, []

    def lose_and_transact(*arguments: Any) -> TransactionResult:
        if not taken:
            one.frozen()
            taken.append(other.names.claim("report"))
        return transact(*arguments)

    monkeypatch.setattr(one.coordinator, "transact", lose_and_transact)
    one.end()
    taken[0].require()
    other.frozen()
    assert not other.coordinator.list(KEYS.once).entries


def test_a_name_outlives_a_change_of_its_holders_time_to_live() -> None:
    clock = ProcessClock()
    store = MemoryCoordinator(clock)
    one, other = Trainer(store, TTL_S), Trainer(store)
    try:
        won = one.names.claim("report")
        held = one.registration.held
        held.hold_for(60.0)
        eventually(lambda: held.ttl_s == 60.0)
        clock.pass_time(2 * TTL_S)
        won.require()
        one.end()
        assert not other.names.claim("report")
    finally:
        one.registration.close()
        other.registration.close()
        clock.close()


def test_an_expired_lease_raises_no_error_in_the_script(trainers: tuple[Trainer, Trainer]) -> None:
    one, other = trainers
    before = one.registration.generation
    one.frozen()
    won = one.names.claim("report")
    assert won
    assert one.registration.generation > before
    won.require()
    assert not other.names.claim("report")


def test_a_replaced_winner_changes_no_file(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers
    file = tmp_path / "report.txt"
    old = one.names.claim("report")
    old.publish(file, b"begun")
    one.frozen()
    new = other.names.claim("report")
    assert new
    assert new.generation > old.generation
    new.publish(file, b"of the successor")
    with pytest.raises(FencedError, match="'report'"):
        old.require()
    with pytest.raises(FencedError):
        old.publish(file, b"late")
    assert file.read_bytes() == b"of the successor"
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_a_winner_replaced_while_it_writes_changes_no_file(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers
    file = tmp_path / "report.txt"
    old = one.names.claim("report")

    def parts() -> Iterator[bytes]:
        yield b"la"
        one.frozen()
        other.names.claim("report").publish(str(file), [b"of the ", b"successor"])
        yield b"te"

    with pytest.raises(FencedError):
        old.publish(file, parts())
    assert file.read_bytes() == b"of the successor"


def test_winning_a_name_again_is_a_new_win(trainers: tuple[Trainer, Trainer]) -> None:
    one, _ = trainers
    old = one.names.claim("report")
    one.frozen()
    new = one.names.claim("report")
    assert new.generation > old.generation
    new.require()
    with pytest.raises(FencedError):
        old.require()


# saving


def writer(file: Path, data: bytes, interrupt: Callable[[], object] = lambda: None) -> Callable[..., None]:
    def write(require: Callable[[], None]) -> None:
        def parts() -> Iterator[bytes]:
            interrupt()
            yield data

        write_file(str(file), parts(), require)

    return write


def test_only_one_trainer_writes_a_model(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers
    file = tmp_path / "m"
    assert one.saves.save("m", 1, writer(file, b"1"))
    assert not other.saves.save("m", 1, writer(file, b"2"))
    assert other.saves.save("m", 2, writer(file, b"3"))
    assert file.read_bytes() == b"3"


def test_each_request_of_an_epoch_is_carried_out_once(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers
    file = tmp_path / "m"
    assert [one.saves.save("m", 1, writer(file, b"first")), other.saves.save("m", 1, writer(file, b"x"))] == [
        "written",
        "another wrote it",
    ]
    assert [other.saves.save("m", 1, writer(file, b"second")), one.saves.save("m", 1, writer(file, b"x"))] == [
        "written",
        "another wrote it",
    ]
    assert file.read_bytes() == b"second"
    # The requests for another file, or in another epoch, are counted separately.
    assert one.saves.save("n", 1, writer(file, b"other"))
    assert not other.saves.save("n", 1, writer(file, b"x"))
    assert one.saves.save("m", 2, writer(file, b"third"))
    assert not other.saves.save("m", 2, writer(file, b"x"))
    assert file.read_bytes() == b"third"


def test_a_replaced_writer_leaves_the_file_to_its_successor(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers
    file = tmp_path / "m"

    def interrupt() -> None:
        one.frozen()
        assert other.saves.save("m", 1, writer(file, b"of the successor"))

    assert not one.saves.save("m", 1, writer(file, b"late", interrupt))
    assert file.read_bytes() == b"of the successor"
    # The request counts as written, so no trainer waits for it.
    assert one.saves.save("m", 2, writer(file, b"next"))


def test_a_writer_without_a_lease_that_was_not_replaced_writes(
    trainers: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    one, other = trainers
    file = tmp_path / "m"
    assert one.saves.save("m", 1, writer(file, b"late", one.frozen))
    assert file.read_bytes() == b"late"
    assert not other.saves.save("m", 1, writer(file, b"2"))


def test_a_newer_request_waits_for_the_writer_of_the_previous_one(
    trainers: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    """Two trainers that write a file at the same time would overwrite each other's in any order."""
    one, other = trainers
    file = tmp_path / "m"
    with ThreadPoolExecutor(1) as executor:
        written: list[Future[bool]] = []

        def meanwhile() -> None:
            written.append(executor.submit(other.saves.save, "m", 2, writer(file, b"newer")))
            with pytest.raises(TimeoutError):
                written[0].result(0.05)

        assert one.saves.save("m", 1, writer(file, b"older", meanwhile))
        assert written[0].result(20.0)
    assert file.read_bytes() == b"newer"


def test_another_trainer_may_write_after_a_failed_write(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers

    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        one.saves.save("m", 1, writer(tmp_path / "m", b"1", fail))
    assert other.saves.save("m", 1, writer(tmp_path / "m", b"2"))


def test_a_failed_write_of_a_replaced_writer_leaves_the_claim_of_its_successor(
    trainers: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    one, other = trainers
    claimed: list[object] = []

    def fail() -> None:
        one.frozen()
        claimed.append(other.saves.claim("m", 1))
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        one.saves.save("m", 1, writer(tmp_path / "m", b"1", fail))
    entry = other.coordinator.get(KEYS.save("m"))
    assert entry is not None
    assert [decode(entry.value, SaveRecord)] == claimed


def test_a_name_belongs_to_one_life_of_the_model(trainers: tuple[Trainer, Trainer]) -> None:
    one, other = trainers
    assert one.names.claim("setup"), "names can be claimed before the model exists"
    one.life, other.life = 7, 9
    assert one.names.claim("report")
    assert other.names.claim("report"), "the model started a new life"
    one.life = 9
    assert not one.names.claim("report")


def test_a_file_of_an_earlier_life_is_written_again(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, other = trainers
    file = tmp_path / "model.npz"
    one.life, other.life = 7, 9
    assert one.saves.save(str(file), 3, writer(file, b"of the dead model"))
    assert other.saves.save(str(file), 0, writer(file, b"of the new one")), "also under an earlier epoch"
    assert not one.saves.save(str(file), 4, writer(file, b"late"))
    assert file.read_bytes() == b"of the new one"


def test_a_later_life_does_not_wait_for_a_writer_of_an_earlier_one(
    trainers: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    one, other = trainers
    file = tmp_path / "model.npz"
    one.life, other.life = 7, 9

    def interrupt() -> None:
        assert other.saves.save(str(file), 0, writer(file, b"of the new one"))

    assert not one.saves.save(str(file), 0, writer(file, b"of the dead model", interrupt))
    assert file.read_bytes() == b"of the new one"


def test_whenever_a_writer_is_replaced_the_file_is_that_of_the_last_writer(tmp_path: Path, stack: ExitStack) -> None:
    """No request to etcd may act on a state that was read before it."""
    replaced = [-1]
    for number in itertools.count():
        file, store = tmp_path / str(number), MemoryCoordinator(SystemClock())
        one, other = Trainer(store), Trainer(store)
        for trainer in (one, other):
            stack.callback(trainer.registration.close)
        results: list[str] = []
        requests = itertools.count()

        def before(
            request: Callable[..., Any],
            *arguments: Any,
            number: int = number,
            one: Trainer = one,
            other: Trainer = other,
            file: Path = file,
            results: list[str] = results,
            requests: Iterator[int] = requests,
        ) -> Any:
            if next(requests) == number:
                replaced.append(number)
                one.frozen()
                results.append(other.saves.save("m", 1, writer(file, b"other")))
            return request(*arguments)

        one.saves.coordinator = SimpleNamespace(  # type: ignore[assignment]
            get=partial(before, one.coordinator.get), transact=partial(before, one.coordinator.transact)
        )
        has_written = one.saves.save("m", 1, writer(file, b"one"))
        if replaced[-1] != number:
            break
        assert has_written or results == ["written"]
        assert file.read_bytes() == (b"other" if results == ["written"] else b"one")
        entry = store.get(KEYS.save("m"))
        assert entry is not None
        writing = decode(entry.value, SaveRecord)
        assert (writing.trainer, writing.done) == (
            (other if results == ["written"] else one).registration.trainer,
            True,
        )
        # Nobody waits for a request whose writer is gone.
        assert [bool(trainer.saves.save("m", 2, writer(file, b"next"))) for trainer in (other, one)] == [True, False]
    assert replaced[-1] >= 3


def test_each_request_to_save_a_file_is_carried_out_by_one_trainer(trainers: tuple[Trainer, Trainer]) -> None:
    written: list[str] = []
    for number in range(3):
        for name, trainer in zip(("one", "other"), trainers, strict=True):
            trainer.saves.save("/out", 0, lambda require, name=name, n=number: written.append(f"{name} {n}"))  # type: ignore[misc]
    assert written == ["one 0", "one 1", "one 2"]


def test_a_writer_that_was_replaced_leaves_the_newer_request_alone(trainers: tuple[Trainer, Trainer]) -> None:
    one, other = trainers
    request = one.saves.claim("/out", 0)
    assert request is not None
    one.frozen()
    assert other.saves.claim("/out", 0) is not None
    for replace in (one.saves.mark_written, one.saves.release):
        replace("/out", request)
        entry = one.coordinator.get(KEYS.save("/out"))
        assert entry is not None
        assert entry.lease_id == other.registration.held.lease_id, "the request of another trainer was changed"


def test_a_trainer_that_replaces_another_continues_to_count_its_requests(tmp_path: Path) -> None:
    store, file = MemoryCoordinator(SystemClock()), tmp_path / "m"
    former = Trainer(store)
    for number in range(3):
        assert former.saves.save("m", 1, writer(file, b"%d" % number)) == "written"
    former.registration.close()
    later = Trainer(store)
    assert later.saves.save("m", 1, writer(file, b"3")) == "written"
    assert later.saves.save("m", 2, writer(file, b"4")) == "written"
    later.registration.close()
    assert file.read_bytes() == b"4"


def test_a_starter_shares_the_requests_that_others_make_after_its_start(tmp_path: Path) -> None:
    store, file = MemoryCoordinator(SystemClock()), tmp_path / "m"
    first = Trainer(store)
    for number in range(3):
        assert first.saves.save("m", 1, writer(file, b"%d" % number))
    second = Trainer(store)
    assert first.saves.save("m", 1, writer(file, b"3"))
    assert second.saves.save("m", 1, writer(file, b"x")) == "another wrote it"
    assert second.saves.save("m", 1, writer(file, b"4")) == "written"
    assert first.saves.save("m", 1, writer(file, b"x")) == "another wrote it"
    for trainer in (first, second):
        trainer.registration.close()
    assert file.read_bytes() == b"4"


def test_an_older_request_is_not_needed_unless_the_trainer_that_was_ahead_has_left(
    trainers: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    one, other = trainers
    file = tmp_path / "m"
    assert one.saves.save("m", 1, writer(file, b"0"))
    assert other.saves.save("m", 1, writer(file, b"x")) == "another wrote it"
    for number in range(1, 4):
        assert one.saves.save("m", 1, writer(file, b"%d" % number))
    assert other.saves.save("m", 1, writer(file, b"x")) == "not needed"
    assert file.read_bytes() == b"3"
    one.registration.close()
    assert other.saves.save("m", 1, writer(file, b"4")) == "written"
    assert file.read_bytes() == b"4"


def test_a_starter_makes_the_same_request_as_others_after_the_last_epoch(tmp_path: Path) -> None:
    store, file = MemoryCoordinator(SystemClock()), tmp_path / "m"
    first = Trainer(store)
    assert first.saves.save("m", AFTER_ALL, writer(file, b"1"))
    first.registration.close()
    second = Trainer(store)
    assert second.saves.save("m", AFTER_ALL, writer(file, b"x")) == "another wrote it"
    second.registration.close()
    assert file.read_bytes() == b"1"
