"""The bench command: its workloads, and small real runs."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from flightedl_tools.bench import data
from flightedl_tools.bench.dense import STANDARD, Comparison, against_tcp, default_steps, rows_of
from flightedl_tools.bench.floor import floor_side
from flightedl_tools.bench.recovery import accepted_pushes, longest_pause
from flightedl_tools.bench.sides import Measured, Side, Spread, ratio, table_of, take_turns
from flightedl_tools.bench.sparse import standard
from flightedl_tools.bench.tables import TableWorkload, steps_of
from flightedl_tools.bench.trainer import Workload, run_steps
from flightedl_tools.main import command

ROOT = Path(__file__).parents[2]


def test_the_shapes_of_a_workload_add_up_to_its_size() -> None:
    assert Workload(mb=4).shapes == [1 << 20]
    assert STANDARD["tiny"].shapes == [1000] * 1000
    assert Workload(mb=1, parameters=4).size_bytes == 1 << 20


@pytest.mark.parametrize("workload", STANDARD.values(), ids=str)
def test_every_turn_has_a_bounded_number_of_steps(workload: Workload) -> None:
    assert 3 <= default_steps(workload) <= 100


def test_an_unknown_workload_is_rejected() -> None:
    assert CliRunner().invoke(command, ["bench", "dense", "huge"]).exit_code == 2


def test_the_gain_of_shared_memory_is_reported() -> None:
    took = Measured(step_s=0.25, bytes_per_s=5e8, cpu_s_per_gb=0.5, server_bytes=10**8)
    shared = replace(took, cpu_s_per_gb=0.2)
    compared = Comparison(
        Workload(path="shared"), took, shared, (2.0, 1.9, 2.25), took, (0.9, 0.8, 1.0), (2.5, 2.0, 3.0)
    )
    assert against_tcp(compared) == (
        "64 MB, sgd, async, 1 x 1, shared: 2.50 x as fast as by TCP (2.00 to 3.00), "
        "with 0.40 of its processor time for a GB"
    )
    assert against_tcp(Comparison(Workload(), took, took, (1.0, 1.0, 1.0))) == ""
    assert [row[3] for row in rows_of(compared)] == ["2.00 (1.90 to 2.25)", "0.90 (0.80 to 1.00)"]


@pytest.mark.parametrize(("kind", "clients", "is_sync"), [("line", 1, False), ("line", 2, True), ("flight", 2, False)])
def test_the_floor_runs_steps(kind: str, clients: int, is_sync: bool) -> None:
    with floor_side(kind, clients, is_sync=is_sync) as side:
        times = take_turns([side], 2, [50])
        measured = side.measured()
    assert len(times[0]) == 2
    assert 0 < measured.step_s < 1
    assert measured.steps_per_s > 1
    assert measured.bytes_per_s == pytest.approx(8 * 650 * clients / measured.step_s)


class _Ordered:
    """Worker whose steps take the number of seconds in their orders."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name, self._count = log, name, 0

    def order(self, count: int, choice: int = 0) -> None:
        self._log.append(f"{self._name} {count} {choice}")
        self._count = count

    def answer(self) -> dict[str, Any]:
        return {"seconds": [float(self._count)] * self._count, "cpu_s": 1.0, "threads": 1}


def test_the_first_side_alternates_and_warm_up_does_not_count() -> None:
    log: list[str] = []
    sides = [Side([cast("Any", _Ordered(log, name))], [], 4, choice=place) for place, name in enumerate("ab")]
    times = take_turns(sides, 2, [4, 6])
    assert log == ["a 2 0", "b 3 1", "a 4 0", "b 6 1", "b 6 1", "a 4 0"]
    assert times == [[4.0, 4.0], [6.0, 6.0]]
    assert [side.measured().step_s for side in sides] == [4.0, 6.0]
    assert ratio(*times) == pytest.approx(4 / 6)


def test_the_spread_of_turns_is_their_interquartile_range() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert str(Spread.of([1.0, 2.0])) == "1.5 (1.25 to 1.75)"


def test_all_columns_but_the_first_are_aligned_to_the_right() -> None:
    table = table_of("numbers", ("what", "ms"), [("a step", "1.0")])
    assert [column.justify for column in table.columns] == ["left", "right"]


@pytest.mark.etcd
def test_a_small_run_compares_both_sides() -> None:
    arguments = ["bench", "dense", "custom", "--mb", "1", "--steps", "2", "--turns", "1", "--path", "shared", "--json"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["bare"]["step_s"] > 0
    assert found["flightedl"]["bytes_per_s"] > 0
    assert found["by_tcp"]["step_s"] > 0
    assert found["over_tcp"][0] == pytest.approx(found["ratio"][0] / found["ratio_by_tcp"][0])


@pytest.mark.etcd
def test_a_small_step_is_compared_with_the_floor() -> None:
    done = CliRunner().invoke(command, ["bench", "latency", "async", "--turns", "1", "--json"])
    assert done.exit_code == 0, done.output
    floor, busy = json.loads(done.stdout)
    assert floor["value"] > 0
    assert "floor" in floor["other"]
    assert floor["is_met"] == (floor["value"] <= floor["limit"])
    assert busy["value"] > 0


def test_a_pause_counts_if_it_overlaps_the_interval():
    pushes = [0.0, 1.0, 2.0, 5.0, 5.5, 9.0]
    assert longest_pause(pushes, 1.5, 5.2) == 3.0, "the pause began before the interval"
    assert longest_pause(pushes, 5.1, 6.0) == 3.5, "the pause ends after the interval"
    assert longest_pause(pushes, 0.5, 1.5) == 1.0
    assert longest_pause(pushes, 8.5, 13.0) == 4.0, "the pause has not ended"


def test_pushes_survive_writing_and_reading(tmp_path):
    (tmp_path / "one").write_bytes(struct.pack("dd", 1.0, 2.5) + b"abc")
    (tmp_path / "two").write_bytes(b"")
    assert accepted_pushes(tmp_path) == {"one": [1.0, 2.5]}


def test_rows_are_measured() -> None:
    program = [sys.executable, "-m", "benchmarks.rows", "5000", "4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "rows made a second" in done.stdout


def test_benchmarks_for_developers_can_be_imported() -> None:
    """The benchmark of kernels is tested with PyTorch; that of restarts requires torchdata."""
    others = {"kernels", "data_restarts"}
    names = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - others)
    program = f"import importlib; [importlib.import_module(f'benchmarks.{{each}}') for each in {names}]"
    ran = [sys.executable, "-c", program]
    done = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_all_sides_use_the_same_ids() -> None:
    workloads = [workload for workload, _ in standard(is_full=False, rows=[2600], dims=[4], ids=[260])]
    assert msgspec.json.decode(msgspec.json.encode(workloads), type=list[TableWorkload]) == workloads
    assert [workload.group.tables for workload in workloads] == [1, 26, 100, 1]
    for workload in workloads:
        steps = steps_of(workload)
        assert np.array_equal(steps, steps_of(workload))
        assert np.shape(steps)[1:] == (workload.group.tables, workload.ids_of_one)
        assert 0 <= np.min(steps) <= np.max(steps) < workload.group.rows_of_one


@pytest.mark.etcd
@pytest.mark.storm
def test_a_small_run_of_tables_works_between_processes() -> None:
    given = ["bench", "sparse", "--rows", "2600", "--dim", "4", "--ids", "260", "--turns", "2", "--json"]
    done = CliRunner().invoke(command, given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    ours = ["flightedl", "flightedl, prefetched rows"]
    assert [[side["side"] for side in one["sides"]] for one in found] == [
        [*ours, *floor] for floor in (["floor"], [], [], ["floor"])
    ]
    assert [one["sides"][0]["by_other"] is None for one in found] == [True, False, False, True]
    assert [one["sides"][1]["by_floor"] is None for one in found] == [False, True, True, False]
    assert all(side["step_s"] > 0 for one in found for side in one["sides"])


class _Batches(list[int]):
    """A minimal dataset."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_each_order_runs_a_separate_loop_and_leaves_it_without_waiting() -> None:
    data, steps = _Batches(range(10)), list[int]()
    seconds, cpu_s = run_steps(cast("Any", data), lambda: steps.append(1), 3)
    # The fourth batch only shows that the third one has completed.
    assert len(seconds) == len(steps) == 3
    assert min(*seconds, cpu_s) >= 0
    assert data.is_closed


def test_all_sides_of_the_data_read_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_RECORDS", 4000), ("_PIECE", 1000), ("_SAMPLES", 128)):
        monkeypatch.setattr(data, name, value)
    for name, path in data.write(tmp_path).items():
        records = 128 if name == "tar" else 4000
        count = records // data.batch_size(name)
        once = list(islice(data.endless(name, str(path)), 2 * count))
        assert sum(batch.num_rows for batch in once) == 2 * records
        assert once[0].equals(once[count])
        shares = [next(data.endless(name, str(path), start, 2)) for start in range(2)]
        assert not shares[0].equals(shares[1])
        for batch in once:
            data.use(batch)


@pytest.mark.etcd
@pytest.mark.storm
def test_a_small_run_of_the_data_works() -> None:
    done = CliRunner().invoke(command, ["bench", "data", "--format", "arrow", "--turns", "2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (arrow,) = found["formats"]
    assert {"flightedl", "pyarrow"} <= arrow["records_per_s"].keys()
    assert min(arrow["by_pyarrow"], arrow["overlap"], found["two_readers"]) > 0
