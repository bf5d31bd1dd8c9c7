"""Transforms of batches, in this thread and in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from flightedl.client.data.elements import ByIndex
from flightedl.client.data.readers import Result, Transforming, _Process
from flightedl.client.data.transforms import NamedFunction, Transform
from flightedl.errors import DataError, ExhaustedError, UsageError

from . import transforms_of_tests as of_tests


def batch_of(*numbers: int, mark: Path | None = None) -> pa.RecordBatch:
    schema = pa.schema([("n", pa.int64())], metadata=None if mark is None else {"mark": str(mark)})
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=schema)


class Delivered:
    """Deliveries of a transforming reader, in order."""

    def __init__(self, transform: Transform, readers: int) -> None:
        self.transforming = Transforming(transform, readers)
        self.results: list[tuple[object, Result]] = []
        self._done = threading.Event()

    def all_of(self, items: Iterator[tuple[object, pa.RecordBatch | None]]) -> list[tuple[object, Result]]:
        for tag, batch in items:
            self.transforming.put(batch, lambda tag=tag: f"record {tag}", partial(self._deliver, tag))  # type: ignore[misc]
        self.transforming.put(None, str, lambda _: self._done.set())
        assert self._done.wait(60.0)
        return self.results

    def _deliver(self, tag: object, result: Result) -> None:
        self.results.append((tag, result))


Through = Callable[..., Delivered]


class Sevens:
    def element(self, index: int) -> int:
        return 7 * index


@pytest.fixture
def through() -> Iterator[Through]:
    before = set(psutil.Process().children())
    made: list[Delivered] = []

    def of(transform: Transform, readers: int) -> Delivered:
        made.append(Delivered(transform, readers))
        return made[-1]

    yield of
    for each in made:
        each.transforming.close()
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("readers", [0, 1, 2, 3])
def test_batches_and_other_items_are_delivered_in_order(readers: int, through: Through) -> None:
    items = [(n, None if n % 5 == 3 else batch_of(n, n + 1)) for n in range(40)]
    found = through(of_tests.doubled, readers).all_of(iter(items))
    assert [tag for tag, _ in found] == list(range(40))
    pids = set()
    for number, result in found:
        if number % 5 == 3:  # type: ignore[operator]
            assert result is None
        else:
            assert isinstance(result, pa.RecordBatch)
            assert result["n"].to_pylist() == [2 * number, 2 * number + 2]  # type: ignore[operator]
            pids |= set(result["pid"].to_pylist())
    assert pids == {os.getpid()} if readers == 0 else len(pids) == readers and os.getpid() not in pids


@pytest.mark.parametrize("readers", [0, 2])
def test_an_error_names_records_and_transform_and_is_delivered_in_order(readers: int, through: Through) -> None:
    found = through(of_tests.broken_at_seven, readers).all_of((n, batch_of(n)) for n in range(10))
    (error,) = [result for _, result in found if isinstance(result, Exception)]
    assert found[7] == (7, error)
    assert isinstance(error, DataError)
    assert str(error).startswith("transform=broken_at_seven failed at record 7: ValueError: no sevens, please (")
    assert "transforms_of_tests.py:" in str(error)


@pytest.mark.parametrize("readers", [0, 1])
def test_a_transform_may_return_a_batch_or_table_but_nothing_else(readers: int, through: Through) -> None:
    ((_, error),) = through(of_tests.text_of, readers).all_of(iter([(0, batch_of(1))]))
    assert "it returned str, but must return a pyarrow.RecordBatch" in str(error)
    ((_, found),) = through(of_tests.words, readers).all_of(iter([(0, batch_of(1, 2, 4))]))
    assert isinstance(found, pa.RecordBatch)
    assert found["word"].to_pylist() == ["word 1", "word 2", "word 1"]


def test_a_reader_that_is_killed_is_replaced_and_no_batch_is_lost(tmp_path: Path, through: Through) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    found = through(of_tests.deadly_once, 2).all_of((n, batch_of(n, mark=mark)) for n in range(20))
    assert [result["n"].to_pylist() for _, result in found] == [[n] for n in range(20)]  # type: ignore[index,union-attr]
    assert not mark.exists()


def test_a_batch_that_kills_its_readers_is_named_and_others_are_delivered(through: Through) -> None:
    found = through(of_tests.deadly_at_seven, 2).all_of((n, batch_of(n)) for n in range(12))
    assert [tag for tag, result in found if not isinstance(result, pa.RecordBatch)] == [7]
    text = "transform=deadly_at_seven failed at record 7: 3 readers in a row have ended there (signal 9)"
    assert str(found[7][1]) == text


@pytest.mark.parametrize("deaths", [2, 3])
def test_readers_that_end_while_they_start_do_not_convict_the_batch(
    deaths: int, through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = _Process.begin
    left = iter(range(deaths))

    def begin_or_die(process: _Process, function: NamedFunction) -> None:
        if next(left, None) is not None:
            raise EOFError("the other process has ended")
        begin(process, function)

    monkeypatch.setattr(_Process, "begin", begin_or_die)
    found = [result for _, result in through(of_tests.doubled, 1).all_of((n, batch_of(n)) for n in range(3))]
    if deaths == 3:
        assert isinstance(found[0], ExhaustedError)
        assert str(found[0]) == "3 readers in a row have ended while they started"
        del found[0]
    assert all(isinstance(result, pa.RecordBatch) for result in found)


def test_a_process_that_cannot_be_created_does_not_convict_the_batch(
    through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: _Process) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(_Process, "__init__", fail)
    ((_, error),) = through(of_tests.doubled, 1).all_of(iter([(0, batch_of(1))]))
    assert isinstance(error, ExhaustedError)
    assert "this machine cannot start a reader: [Errno 11] Resource" in str(error)


def test_a_result_that_cannot_be_sent_is_an_error_in_order(through: Through) -> None:
    items = [(n, "no batch" if n == 2 else batch_of(n)) for n in range(4)]
    found = through(of_tests.broken_at_seven, 1).all_of(iter(items))  # type: ignore[arg-type]
    assert isinstance(found[2][1], AttributeError)
    assert [tag for tag, result in found if isinstance(result, pa.RecordBatch)] == [0, 1, 3]


@pytest.mark.parametrize("readers", [0, 2])
def test_elements_are_read_by_index_and_an_error_names_the_index(readers: int, through: Through) -> None:
    by_index = ByIndex(of_tests.halved, is_batched=False, columns=(), first=0)
    found = through(by_index, readers).all_of((n, batch_of(n, n + 1)) for n in (2, 4, 6))
    assert [batch["half"].to_pylist() for _, batch in found[:2] if isinstance(batch, pa.RecordBatch)] == [
        [1.0, 1.5],
        [2.0, 2.5],
    ]
    (_, error) = found[2]
    assert str(error).startswith("get=halved failed at record 6: at index 7: ValueError: no sevens, please (")


def test_readers_require_an_importable_transform() -> None:
    with pytest.raises(UsageError, match="give one, or leave out readers="):
        Transforming(None, 2)
    with pytest.raises(UsageError, match="cannot be found by readers"):
        Transforming(lambda batch: batch, 1)
    with pytest.raises(UsageError, match="cannot be found by readers"):
        Transforming(partial(of_tests.doubled), 1)
    with pytest.raises(UsageError, match=r"^get=.* cannot be found by readers"):
        Transforming(ByIndex(Sevens().element, is_batched=False, columns=(), first=0), 1)


def test_closing_ends_busy_readers() -> None:
    before = set(psutil.Process().children())
    transforming = Transforming(of_tests.two_milliseconds, 2)
    for number in range(8):
        transforming.put(batch_of(number), str, lambda _: None)
    transforming.close()
    assert set(psutil.Process().children()) <= before


SCRIPT = """
import os, select, signal, sys, threading, time
import pyarrow as pa
from flightedl.client.data.readers import Transforming

def plus_one(batch):
    return pa.record_batch({"n": [n + 1 for n in batch["n"].to_pylist()]})

def endless(batch):
    os.write(1, b"begun\\n")
    time.sleep(3600)

if __name__ == "__main__":
    # As in a terminal, even if the process of the tests ignores or blocks the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    done = threading.Event()
    transforming = Transforming(plus_one, 1)

    def take(found):
        print(found["n"].to_pylist(), flush=True)
        done.set()

    transforming.put(pa.record_batch({"n": [1]}), str, take)
    done.wait()
    sleeping = Transforming(endless, 2)
    for _ in range(4):
        sleeping.put(pa.record_batch({"n": [1]}), str, lambda _: None)
    # Ends with the test. A signal just before a read without a time limit would not interrupt it.
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        pass
"""


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_a_script_leaves_no_readers_behind(way: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[2]\n"
        assert [process.stdout.readline() for _ in range(2)] == [b"begun\n"] * 2
        children = psutil.Process(process.pid).children()
        assert len(children) == 3
        if way == signal.SIGINT:
            os.killpg(process.pid, way)
        else:
            process.kill()
        errors = process.stderr.read() if way == signal.SIGINT else b""
        process.wait(30)
    assert errors.count(b"Traceback") == (way == signal.SIGINT)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_script_that_trains_on_import_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, flightedl as fe, pyarrow as pa\n"
        "from flightedl.client.data.readers import Transforming\n"
        "def same(batch):\n    return batch\n"
        "if __name__ != '__main__':\n    fe.connect(etcd='127.0.0.1:1', job='none')\n"
        "done = threading.Event()\n"
        "Transforming(same, 1).put(pa.record_batch({}), str, lambda error: (print(error), done.set()))\n"
        "done.wait()\n"
    )
    output = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "a reader cannot use transform=same: UsageError: the script that has transform= joins the job" in output
