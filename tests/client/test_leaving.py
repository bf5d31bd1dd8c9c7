"""The end of a script that has not closed its session."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.data.job_data import JobData
from flightedl.client.session import Job
from flightedl.errors import DataError, FencedError, LostDataError, UnavailableError, exit_code_of


class Session:
    """A session whose parts record their calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.job = Job.__new__(Job)
        self.job._closed = ""
        self.job._data = SimpleNamespace(leave_group=self.leave, close=lambda: None)
        self.job._model = SimpleNamespace(close=lambda _: None)
        self.job._once = SimpleNamespace(keep=lambda: self.calls.append("names kept"))
        self.job._process = SimpleNamespace(close=lambda *, is_clean: self.calls.append("closed"))
        self._error = error

    def leave(self, error: BaseException | None) -> None:
        self.calls.append(error)
        if self._error is not None:
            raise self._error


def test_a_script_that_ends_leaves_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    session = Session()
    session.job._leave_at_exit()
    session.job.close()
    assert session.calls == [None, "names kept", "closed"]


def test_a_script_that_raises_does_not_leave_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("a mistake of the script")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    session = Session()
    session.job._leave_at_exit()
    assert session.calls == [error, "closed"]


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (None, True),
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(1), False),
        (UnavailableError("the disk is full"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_names_are_free_again_if_the_work_under_them_may_be_unfinished(
    error: BaseException | None, is_kept: bool
) -> None:
    session = Session()
    with pytest.raises(type(error)) if error is not None else nullcontext(), session.job:
        if error is not None:
            raise error
    assert ("names kept" in session.calls) == is_kept
    assert session.calls[-1] == "closed"


def test_a_rank_whose_start_is_over_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(os, "_exit", codes.append)
    session = Session(FencedError("this start is over"))
    session.job._leave_at_exit()
    assert codes == [75]
    assert session.calls == [None, "closed"]
    assert "flightedl: this start is over" in capsys.readouterr().err


def test_a_session_that_is_closed_while_an_exception_is_handled_keeps_no_names() -> None:
    session = Session()
    error = ValueError("a mistake of the script")
    with pytest.raises(ValueError, match="a mistake"), closing(session.job):
        raise error
    assert session.calls == [error, "closed"]


def test_a_session_that_was_opened_while_an_exception_was_handled_may_end_cleanly() -> None:
    session = Session()
    try:
        importlib.import_module("an_absent_package")
    except ImportError as error:
        session.job._handled_at_start = error
        session.job.close()
    assert session.calls == [None, "names kept", "closed"]


class Left(Session):
    """A session whose loop has ended with an error that the script has caught."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.told: list[BaseException | None] = []
        data = JobData.__new__(JobData)
        data._dataset = None
        data._group = SimpleNamespace(error=error, close=lambda: None)  # type: ignore[assignment]
        data._attendance = SimpleNamespace(leave=self.told.append)  # type: ignore[assignment]
        data._closing = threading.Event()
        self.job._data = data


@pytest.mark.parametrize("end", [None, SystemExit(0)], ids=repr)
def test_an_error_of_a_loop_that_the_script_has_caught_is_raised_at_the_end(end: SystemExit | None) -> None:
    error = DataError("the file is away")
    session = Left(error)
    with pytest.raises(DataError, match="the file is away"):
        session.job._end("it was closed", end)
    assert session.told == [error], "the rank leaves cleanly"
    assert session.calls == ["closed"]


def test_another_error_of_the_script_is_not_replaced_by_that_of_a_loop() -> None:
    error = ValueError("a mistake")
    session = Left(DataError("the file is away"))
    session.job._end("it was closed", error)
    assert session.told == [error]


def test_a_script_that_hides_the_loss_of_data_still_ends_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.delattr(sys, "last_value", raising=False)
    Left(LostDataError("8 records were set aside")).job._leave_at_exit()
    assert codes == [4]
    assert "8 records were set aside" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(256), 0),
        (SystemExit("no data"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError(), 1),
        (DataError(""), 2),
        (LostDataError(""), 4),
        (FencedError(""), 75),
    ],
    ids=repr,
)
def test_the_exit_code_follows_from_the_exception(error: BaseException | None, code: int) -> None:
    assert exit_code_of(error) == code
