"""The ledger's reports about wrong counts."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from flightedl.examples.ledger import (
    CLOCKS,
    MODES,
    PARAMETERS,
    account,
    addends_of,
    balance,
    batch_sizes,
    clocks_are_right,
    findings,
    ids_of,
    weights_findings,
    wide_findings,
)


def counts(epochs: int = 2, records: int = 10) -> dict[str, np.ndarray]:
    return {name: np.ones((epochs, records), np.float32) for name in PARAMETERS} | clocks(4.0)


def clocks(count: float, *shares: float) -> dict[str, np.ndarray]:
    return {name: np.array([count, *shares]) for name in CLOCKS}


def test_exact_counts_are_accepted() -> None:
    assert balance(counts()) == (0, 0)
    assert list(findings(counts(), 5)) == []


def test_a_loss_is_not_hidden_by_a_duplicate_in_another_epoch() -> None:
    wrong = counts()
    for name in PARAMETERS:
        wrong[name][0, 6:8] = 0
        wrong[name][1, 6:8] = 2
    assert balance(wrong) == (6, 6)
    assert list(findings(wrong, 5))[:2] == [
        "lost in first, epoch 1: 2 records (2 of task 1), such as record 6, which counts 0.000",
        "double in first, epoch 2: 2 records (2 of task 1), such as record 6, which counts 2.000",
    ]


@pytest.mark.parametrize(("records", "per_task", "expected"), [(10, 5, 4), (11, 5, 5), (9, 5, 4), (4, 5, 2)])
def test_batches_do_not_span_tasks(records: int, per_task: int, expected: int) -> None:
    assert len(batch_sizes(records, per_task, 3, is_shuffled=False)) == expected


def test_tasks_of_shuffled_records_have_whole_batches() -> None:
    assert batch_sizes(11, 5, 3, is_shuffled=False) == [3, 2, 3, 2, 1]
    assert batch_sizes(11, 5, 3, is_shuffled=True) == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("mode", "optimizer", "count", "versions", "is_right"),
    [
        ("async", "adam", 7.999999, {8}, True),
        ("async", "adam", 7.98, {8}, False),
        ("async", "sgd", 8.0, {7, 8}, False),
        ("sync", "sgd", 8.0, {3}, True),
        ("sync", "sgd", 7.0, {3}, False),
        ("mean", "adam", 3.0, {3}, True),
    ],
)
def test_the_clock_must_match_the_versions(
    mode: str, optimizer: str, count: float, versions: set[int], is_right: bool
) -> None:
    chosen = argparse.Namespace(epochs=2, records=10, per_task=5, batch_size=3, mode=mode, optimizer=optimizer)
    right = 3.0 if mode == "mean" else 8.0
    each = [np.array([right]), np.array([count]), np.array([right])]
    assert clocks_are_right(chosen, each, versions, lambda _: None) is is_right


def report_on(*shares: float) -> list[str]:
    """Return the report about shares in a mean of two batches of 20 records and one of 5, in one epoch."""
    return list(weights_findings(np.array([shares]), [20, 20, 5]))


def test_shares_equal_those_of_the_records_in_a_round() -> None:
    assert (
        report_on(20 / 45, 20 / 45, 5 / 45)
        == report_on(1, 20 / 25, 5 / 25)
        == report_on(0.5, 0.5, 1)
        == report_on(1, 1, 1)
        == []
    )


def test_shares_with_wrong_weights_are_reported() -> None:
    # Two batches of a round with 25 records that is divided by its members, and one batch alone.
    assert report_on(1 / 2, 1, 1 / 2) == [
        "rounds of 10 records have 5 records together",
        "rounds of 40 records have 20 records together",
    ]
    # The last batch joins a round that is divided by the records of all three, and also the next round.
    assert report_on(20 / 45, 20 / 45, 1) == ["rounds of 45 records have 40 records together"]
    assert report_on(1, 1, 0) == ["batch 2 of epoch 1, of 5 records, has 0.0000 of its round"]
    assert report_on(2, 1, 1) == ["batch 0 of epoch 1, of 20 records, has 2.0000 of its round"]


def test_a_mean_is_counted_by_shares() -> None:
    chosen = argparse.Namespace(epochs=2, records=10, per_task=5, batch_size=3, mode="mean", optimizer="sgd")
    assert MODES["mean"].shows_shares("sgd")
    assert not MODES["mean"].shows_shares("adam")
    # In both epochs: 3 and 3 records in a round, 2 alone, 2 alone.
    exact = counts() | clocks(6.0, *[0.5, 1, 0.5, 1] * 2)
    for name in PARAMETERS:
        exact[name][:, [0, 1, 2, 5, 6, 7]] = 0.5
    assert account(chosen, exact, {6})[0]
    assert not account(chosen, exact | clocks(6.0, *[0.5, 1, 0.5, 0.4] * 2), {6})[0]
    exact["third"][1, 5] = 0
    assert account(chosen, exact, {6})[1][-1] == "10 records x 2 epochs: 1 lost, 0 double"


def test_the_share_of_a_record_in_a_mean_is_computed() -> None:
    assert addends_of(5, 3, 2, 0).tolist() == [1, 1, 1, 1, 1]
    # Tasks of 7 and 2 records, batches of 2, pairs of them averaged: 2 + 2, 2 + 1, 2.
    parts = [2 / 4] * 4 + [2 / 3] * 2 + [1 / 3] + [1] * 2
    assert addends_of(9, 7, 2, 2).tolist() == parts
    exact = {name: np.array([parts], np.float32) for name in PARAMETERS}
    assert balance(exact, parts) == (0, 0)
    exact["second"][0, 6] = 1
    assert balance(exact, parts) == (0, 1)


def test_every_trainer_prints_the_same_account_and_verdict() -> None:
    chosen = argparse.Namespace(epochs=2, records=10, per_task=5, batch_size=3, mode="async", optimizer="sgd")
    exact = counts() | clocks(8.0)
    assert account(chosen, exact, {8})[0]
    exact["third"][1, 3] = 0
    is_exact, sentences = account(chosen, exact, {8})
    assert not is_exact
    assert sentences[-1] == "10 records x 2 epochs: 1 lost, 0 double"


def test_rows_that_count_all_records_are_reported_by_epoch() -> None:
    worth = np.ones(10)
    wide = np.full((2, 5), 10.0, np.float32)
    assert wide_findings(wide, worth) == []
    wide[1, 3:] = 9
    assert wide_findings(wide, worth) == ["2 wide ids are wrong in epoch 2, such as 3, which counts 9.000, not 10.000"]


def test_reported_ids_equal_the_pushed_ids() -> None:
    assert ids_of("records", np.zeros((2, 5))).tolist() == [-2, -1, 0, 1, 2]
    assert ids_of("wide", np.zeros((2, 3))).tolist() == [0, 1, 2]
