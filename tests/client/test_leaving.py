"""The end of a script that has not closed its session."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.session import Job
from flightedl.errors import FencedError, UnavailableError


class Session:
    """A session whose parts record their calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.job = Job.__new__(Job)
        self.job._closed = ""
        self.job._data = SimpleNamespace(leave_group=self.leave, close=lambda: None)
        self.job._model = SimpleNamespace(close=lambda _: None)
        self.job._once = SimpleNamespace(keep=lambda: self.calls.append("names kept"))
        self.job._process = SimpleNamespace(close=lambda: self.calls.append("closed"))
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
    assert codes == [1]
    assert session.calls == [None, "closed"]
    assert "flightedl: this start is over" in capsys.readouterr().err
