"""Predicted costs of a job: constants are fitted to simulated measurements, and the busiest part is shown first."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.scale import (
    LARGE,
    SMALL,
    Constants,
    Job,
    Machines,
    Seen,
    Shape,
    fitted,
    loads,
    processes_of,
    requests_per_s,
    scale,
)
from flightedl.master.progress import report_every_s

COST = Constants(
    step_s=3e-4,
    step_server_s=1e-4,
    trainer_gb_s=0.5,
    message_s=2e-4,
    server_gb_s=0.6,
    master_s=0.01,
    request_s=5e-4,
    etcd_s=0.02,
    etcd_process_s=4e-4,
)


def seen_of(shape: Shape) -> Seen:
    requests = requests_per_s(shape.trainers, 10.0)
    return Seen(
        shape,
        COST.trainer_cpu_s(shape),
        COST.servers_cpu_s(shape),
        COST.master_cpu_s(requests),
        COST.etcd_cpu_s(processes_of(shape)),
        100.0,
        requests,
    )


def test_constants_fitted_to_small_jobs_predict_large_ones() -> None:
    found = fitted([seen_of(shape) for shape in SMALL])
    for shape in LARGE:
        assert found.trainer_cpu_s(shape) == pytest.approx(COST.trainer_cpu_s(shape), rel=1e-6)
        assert found.servers_cpu_s(shape) == pytest.approx(COST.servers_cpu_s(shape), rel=1e-6)
    assert found.request_s == pytest.approx(COST.request_s)
    assert found.etcd_process_s == pytest.approx(COST.etcd_process_s)


def test_constants_that_noise_would_make_negative_are_zero() -> None:
    seen = [seen_of(shape) for shape in SMALL]
    # Measurements in which etcd works less with more trainers.
    odd = [
        Seen(each.shape, each.trainer_s, each.servers_s, each.master_s, 0.1 / each.shape.trainers, 1, 1)
        for each in seen
    ]
    found = fitted(odd)
    assert found.etcd_process_s == 0
    assert found.etcd_s > 0


def test_a_dense_model_of_100_gb_exceeds_the_network_and_rows_do_not() -> None:
    dense = Job(Shape(1000, 64, 100 * 10**9), 100e9, step_s=0.2, task_s=30)
    busiest = loads(dense, COST, Machines())[0]
    assert busiest.what == "a server's network"
    # Each server transfers a 64th of the model for each of 5,000 steps per second, over 3.125 GB/s.
    assert busiest.part == pytest.approx(5000 * 100e9 / 64 / 3.125e9)
    rows = Job(Shape(1000, 64, 20 * 10**6), 100e9, step_s=0.25, task_s=30)
    assert all(load.part < 1 for load in loads(rows, COST, Machines()))
    hurried = loads(Job(rows.shape, 100e9, step_s=0.1, task_s=30), COST, Machines())[0]
    assert hurried.what == "a server's Python"
    assert hurried.part == pytest.approx(10_000 * COST.message_s)


@pytest.mark.parametrize(("trainers", "seconds"), [(1, 0.5), (100, 0.5), (400, 2.0), (1000, 5.0), (100_000, 5.0)])
def test_each_trainer_reports_less_often_with_more_trainers(trainers: int, seconds: float) -> None:
    assert report_every_s(trainers) == seconds


def test_the_command_has_help() -> None:
    shown = CliRunner().invoke(scale, ["--help"])
    assert shown.exit_code == 0
    assert "busiest" in shown.output
    assert CliRunner().invoke(scale, ["--trainers", "0"]).exit_code == 2
