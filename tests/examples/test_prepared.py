import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from flightedl.errors import DataError
from flightedl.examples.prepared import prepared_directory


def write_one(directory: Path) -> None:
    (directory / "part.txt").write_text("complete")


def never(directory: Path) -> None:
    raise AssertionError("prepared twice")


def silent(line: str) -> None:
    raise AssertionError(f"said {line!r}")


def test_a_directory_is_prepared_once_and_reused(tmp_path):
    made = prepared_directory(tmp_path / "deep" / "data", "kind-1", write_one, silent)
    assert made == tmp_path / "deep" / "data"
    assert (made / "part.txt").read_text() == "complete"
    assert prepared_directory(made, "kind-1", never, silent) == made


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "data").mkdir()
    made = prepared_directory(tmp_path / "data", "kind-1", write_one, silent)
    assert (made / "part.txt").read_text() == "complete"


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepared_directory(Path("data"), "kind-1", write_one, silent) == tmp_path / "data"


def test_the_second_of_two_processes_waits_and_reports_that(tmp_path):
    writing, waiting = Event(), Event()
    lines = []

    def slowly(directory: Path) -> None:
        writing.set()
        assert waiting.wait(10)
        assert not (tmp_path / "data").exists()
        write_one(directory)

    def report(line: str) -> None:
        lines.append(line)
        waiting.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(prepared_directory, tmp_path / "data", "kind-1", slowly, silent)
        assert writing.wait(10)
        second = threads.submit(prepared_directory, tmp_path / "data", "kind-1", never, report)
        assert first.result(10) == second.result(10) == tmp_path / "data"
    assert lines == [f"waiting for {tmp_path / 'data'}"]


def test_a_failure_leaves_nothing_and_can_be_retried(tmp_path):
    def full(directory: Path) -> None:
        write_one(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"No space left on device.*--data"):
        prepared_directory(tmp_path / "data", "kind-1", full, silent)
    assert [path.name for path in tmp_path.iterdir()] == [".data.lock"]
    prepared_directory(tmp_path / "data", "kind-1", write_one, silent)


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from flightedl.examples.prepared import prepared_directory\n"
        "def killed(directory):\n"
        "    (directory / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepared_directory(Path(sys.argv[1]), 'kind-1', killed, print)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "data")], check=False, timeout=30)
    assert ended.returncode == -9
    assert not (tmp_path / "data").exists()
    assert any(tmp_path.glob(".data.partial-*/half"))
    prepared_directory(tmp_path / "data", "kind-1", write_one, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".data.lock", "data"]


def test_a_directory_of_another_kind_is_rejected(tmp_path):
    prepared_directory(tmp_path / "data", "kind-1", write_one, silent)
    with pytest.raises(DataError, match="holds kind-1, not kind-2: delete it"):
        prepared_directory(tmp_path / "data", "kind-2", never, silent)


def test_unknown_files_are_rejected_and_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="holds other files"):
        prepared_directory(tmp_path, "kind-1", never, silent)
    with pytest.raises(DataError, match="not a directory"):
        prepared_directory(tmp_path / "thesis.txt", "kind-1", never, silent)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_directory_that_appears_during_the_search_is_found(tmp_path, monkeypatch):
    """Another process renames its directory into place between two checks."""
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        monkeypatch.setattr(Path, "read_bytes", real)
        prepared_directory(tmp_path / "data", "kind-1", write_one, silent)
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert prepared_directory(tmp_path / "data", "kind-1", never, silent) == tmp_path / "data"
