"""Recording files: written in the background, truncated by crashes, and read back."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any, Self

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.master import events
from flightedl.errors import CorruptError, NotFoundError, UsageError
from flightedl.recording import writer
from flightedl.recording.reader import recordings_in
from flightedl.recording.writer import BackgroundFile, Recorder, recording_process
from tests.support.contracts.coordinator import eventually


def record(directory: Path, count: int) -> Path:
    with recording_process(str(directory), "master", "demo", SystemClock()) as recorder:
        assert recorder is not None
        core = recorder.core("master")
        for number in range(count):
            core.record(float(number), events.WaitEnded(number))
    (path,) = directory.iterdir()
    return path


def numbers(directory: Path) -> list[int]:
    (recording,) = recordings_in(directory)
    return [number for number, _ in recording.records()]


def test_recording_is_off_by_default() -> None:
    with recording_process("", "master", "demo", SystemClock()) as recorder:
        assert recorder is None


def test_the_recording_is_complete_at_the_end(tmp_path: Path) -> None:
    record(tmp_path / "new" / "place", 1000)
    (recording,) = recordings_in(tmp_path / "new" / "place")
    found = [each for _, each in recording.records()]
    assert (recording.header.process, recording.header.job) == ("master", "demo")
    assert [each.at for each in found] == [float(number) for number in range(1000)]
    assert {each.name for each in found} == {"WaitEnded"}


def test_events_reach_the_disk_soon(tmp_path: Path) -> None:
    with recording_process(str(tmp_path), "master", "demo", SystemClock()) as recorder:
        assert recorder is not None
        recorder.core("master").record(0.0, events.TimePassed())
        eventually(lambda: any(path.read_bytes().count(b"\n") == 2 for path in tmp_path.iterdir()))


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_truncated_file_is_read_up_to_its_last_complete_line(tmp_path: Path, cut: int) -> None:
    path = record(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    assert numbers(tmp_path) == [1, 2]


def test_a_last_line_of_zeros_is_ignored(tmp_path: Path) -> None:
    path = record(tmp_path, 2)
    path.write_bytes(path.read_bytes() + b"\x00" * 50 + b"\n")
    assert numbers(tmp_path) == [1, 2]


def test_a_damaged_line_before_the_last_raises_an_error(tmp_path: Path) -> None:
    path = record(tmp_path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[3:]]))
    with pytest.raises(CorruptError, match="event 2 is damaged"):
        numbers(tmp_path)


def test_a_process_that_died_at_once_has_no_recording(tmp_path: Path) -> None:
    path = record(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(NotFoundError, match="has no recordings"):
        recordings_in(tmp_path)


def test_another_format_is_rejected(tmp_path: Path) -> None:
    path = record(tmp_path, 0)
    path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":3'))
    with pytest.raises(CorruptError, match="format 3"):
        recordings_in(tmp_path)


def test_an_unwritable_directory_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot write a recording"),
        recording_process(str(tmp_path / "file"), "master", "demo", SystemClock()),
    ):
        pass


class FullDisk:
    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_training_continues_when_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = BackgroundFile(tmp_path / "x")
    file._file.close()
    file._file = FullDisk()  # type: ignore[assignment]
    recorder = Recorder("master", "1", "demo", SystemClock(), file.write)
    core = recorder.core("master")
    with caplog.at_level(logging.WARNING):
        core.record(0.0, events.TimePassed())
        eventually(lambda: file.write(b"") is False)
        for _ in range(3):
            core.record(0.0, events.TimePassed())
        file.close()
    assert caplog.text.count("recording has stopped, training continues") == 1
    assert "No space left" in caplog.text


def test_recording_stops_at_its_size_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = BackgroundFile(tmp_path / "x", limit_bytes=100)
    with caplog.at_level(logging.WARNING):
        while file.write(b"0123456789\n"):
            pass
        file.close()
    assert "has reached its limit" in caplog.text


def test_a_value_that_cannot_be_encoded_ends_only_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[bytes] = []
    recorder = Recorder("master", "1", "demo", SystemClock(), lines.append)
    with caplog.at_level(logging.WARNING):
        recorder.core("master").record(0.0, events.StatusReceived([object()]))  # type: ignore[list-item]
        recorder.core("master").record(0.0, events.TimePassed())
    assert len(lines) == 1
    assert "cannot be recorded" in caplog.text


class SlowDisk:
    """A file that takes three bytes at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, data: memoryview) -> int:
        return self._file.write(data[:3])

    def close(self) -> None:
        self._file.close()


def test_lines_that_the_system_accepts_in_parts_are_written_completely(tmp_path: Path) -> None:
    file = BackgroundFile(tmp_path / "unused")
    disk: Any = SlowDisk(tmp_path / "file")
    file._file = disk
    assert file.write(b"0123456789\n")
    file.close()
    disk.close()
    assert (tmp_path / "file").read_bytes() == b"0123456789\n"


def test_the_buffer_is_limited_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_KEPT_BYTES", 10)
    file = BackgroundFile(tmp_path / "file")
    for number in range(1, 4):
        assert file.write(b"1234567\n"), "lines that were written count as waiting"
        eventually(lambda: (tmp_path / "file").stat().st_size == 8 * number)  # noqa: B023 - called in this loop
    assert not file.write(b"more than the buffer\n")
    file.close()


def test_only_the_oldest_of_many_hidden_strings_is_forgotten() -> None:
    core = Recorder("master", "n", "demo", SystemClock(), lambda _: True).core("x")
    texts = [f"cannot open /secret/place/{number}" for number in range(writer._HIDDEN_COUNT + 1)]
    for text in texts:
        assert "secret" not in core.hidden(text)
    lines = [core.without_hidden(text.encode()) for text in texts]
    assert sum(b"secret" in line for line in lines) == 1
    assert b"secret" in lines[0]


def test_a_hidden_string_that_contains_a_kept_one_is_replaced_as_a_whole() -> None:
    core = Recorder("master", "n", "demo", SystemClock(), lambda _: True).core("x")
    core.hidden("/secret/place")
    core.keep_hidden()
    text = "cannot open /secret/place/file"
    shown = core.hidden(text)
    assert core.without_hidden(text.encode()) == shown.encode()
    assert b"secret" not in core.without_hidden(b"see /secret/place")
