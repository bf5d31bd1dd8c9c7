"""How long the holder of a leased key may act, and when it renews."""

from __future__ import annotations

import pytest

from flightedl.domain.tenure import Tenure


def test_a_key_is_trusted_for_two_thirds_of_its_time_to_live_after_sending_a_renewal() -> None:
    tenure = Tenure("k", 6.0, 10.0)
    assert tenure.left_s(13.0) == 1.0
    tenure.renewed(12.0, 13.5)
    assert tenure.left_s(15.0) == 1.0
    assert tenure.lost_because == ""
    assert tenure.left_s(16.0) == 0.0
    assert tenure.lost_because == "the lease of k was not renewed for 4.0 s"


def test_a_loss_is_final_and_keeps_its_first_reason() -> None:
    tenure = Tenure("k", 6.0, 10.0)
    assert tenure.lose("released") == "released"
    assert tenure.lose("again") == "released"
    tenure.renewed(11.0, 11.0)
    assert (tenure.left_s(11.0), tenure.pause_s(11.0, is_troubled=False)) == (0.0, 0.0)


def test_a_renewal_that_returns_too_late_does_not_count() -> None:
    tenure = Tenure("k", 6.0, 10.0)
    tenure.renewed(13.9, 14.0)
    assert tenure.renewed_at == 10.0
    assert tenure.lost_because


@pytest.mark.parametrize(
    ("now", "is_troubled", "pause_s"),
    [(10.0, False, 1.0), (10.4, False, 0.6), (12.0, False, 0.0), (12.0, True, 0.3), (13.9, True, 0.1)],
)
def test_it_renews_six_times_per_time_to_live_and_more_often_after_failures(
    now: float, is_troubled: bool, pause_s: float
) -> None:
    assert Tenure("k", 6.0, 10.0).pause_s(now, is_troubled=is_troubled) == pytest.approx(pause_s)
