"""The bench command: what it runs, and one small real run."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from flightedl_tools.bench.dense import STANDARD, Workload, default_steps
from flightedl_tools.main import command


def test_the_shapes_of_a_workload_make_its_size() -> None:
    assert Workload(mb=4).shapes == [1 << 20]
    assert STANDARD["tiny"].shapes == [1000] * 1000
    assert Workload(mb=1, parameters=4).size_bytes == 1 << 20


@pytest.mark.parametrize("workload", STANDARD.values(), ids=str)
def test_every_turn_has_a_few_steps_and_not_too_many(workload: Workload) -> None:
    assert 3 <= default_steps(workload) <= 100


def test_an_unknown_workload_is_refused() -> None:
    assert CliRunner().invoke(command, ["bench", "dense", "huge"]).exit_code == 2


@pytest.mark.etcd
@pytest.mark.slow
def test_a_small_run_compares_both_sides() -> None:
    arguments = ["bench", "dense", "custom", "--mb", "1", "--steps", "2", "--turns", "1", "--json"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["bare"]["step_s"] > 0
    assert found["flightedl"]["bytes_per_s"] > 0
    assert found["ratio"] > 0
