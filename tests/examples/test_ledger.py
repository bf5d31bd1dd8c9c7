"""What the ledger's account says about counts that are wrong."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from flightedl.examples.ledger import (
    CLOCK,
    PARAMETERS,
    account,
    balance,
    batches_of,
    clock_is_right,
    findings,
    worth_of,
)


def counts(epochs: int = 2, records: int = 10) -> dict[str, np.ndarray]:
    return {**{name: np.ones((epochs, records), np.float32) for name in PARAMETERS}, CLOCK: np.full(1, 4.0)}


def test_counts_are_exact() -> None:
    assert balance(counts()) == (0, 0)
    assert list(findings(counts(), 5)) == []


def test_a_loss_in_one_epoch_is_not_hidden_by_a_double_in_another() -> None:
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
    assert batches_of(records, per_task, 3) == expected


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
def test_the_clock_and_versions(mode: str, optimizer: str, count: float, versions: set[int], is_right: bool) -> None:
    chosen = argparse.Namespace(epochs=2, records=10, per_task=5, batch_size=3, mode=mode, optimizer=optimizer)
    assert clock_is_right(chosen, count, versions, lambda _: None) is is_right


def test_what_a_record_is_worth_in_a_mean() -> None:
    assert worth_of(5, 3, 2, 0).tolist() == [1, 1, 1, 1, 1]
    # Tasks of 7 and 2 records, batches of 2, pairs of them averaged: 2 + 2, 2 + 1, 2.
    parts = [2 / 4] * 4 + [2 / 3] * 2 + [1 / 3] + [1] * 2
    assert worth_of(9, 7, 2, 2).tolist() == parts
    exact = {name: np.array([parts], np.float32) for name in PARAMETERS}
    assert balance(exact, parts) == (0, 0)
    exact["second"][0, 6] = 1
    assert balance(exact, parts) == (0, 1)


def test_the_account_is_the_same_in_every_trainer_and_ends_with_the_verdict() -> None:
    chosen = argparse.Namespace(epochs=2, records=10, per_task=5, batch_size=3, mode="async", optimizer="sgd")
    exact = counts() | {CLOCK: np.full(1, 8.0)}
    assert account(chosen, exact, {8})[0]
    exact["third"][1, 3] = 0
    is_exact, sentences = account(chosen, exact, {8})
    assert not is_exact
    assert sentences[-1] == "10 records x 2 epochs: 1 lost, 0 double"
