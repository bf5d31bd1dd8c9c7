"""Background work always reports how it ended."""

from __future__ import annotations

import threading

import pytest

from flightedl.errors import ExhaustedError, FlightedlError, InternalError, UnavailableError
from flightedl.process.background import Background


def test_the_result_is_available_when_the_work_has_ended() -> None:
    may_end = threading.Event()
    outcomes: list[int | FlightedlError] = []

    def work() -> int:
        may_end.wait(10.0)
        return 7

    background = Background("work", work, outcomes.append)
    assert background.result() is None
    assert background.error is None
    may_end.set()
    assert background.result(10.0) == 7
    assert outcomes == [7]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (UnavailableError("the store does not answer"), UnavailableError),
        (MemoryError(), ExhaustedError),
        (StopIteration(), InternalError),
        (SystemExit(3), InternalError),
    ],
)
def test_every_error_ends_the_work(raised: BaseException, kind: type[FlightedlError]) -> None:
    outcomes: list[FlightedlError | None] = []

    def work() -> None:
        raise raised

    background = Background("work", work, outcomes.append)
    with pytest.raises(kind):
        background.result(10.0)
    assert [type(outcome) for outcome in outcomes] == [kind]
    assert type(background.error) is kind
