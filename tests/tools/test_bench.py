"""The bench command: what it runs, and one small real run."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from flightedl_tools.bench.dense import (
    BY_TCP,
    STANDARD,
    Comparison,
    PeerComparison,
    Workload,
    against_tcp,
    as_table,
    default_steps,
    has_peers,
)
from flightedl_tools.bench.peers import BLOCK_ELEMENTS, PEERS, Peer, blocks, installed, missing_line, peer_side
from flightedl_tools.bench.sides import Measured
from flightedl_tools.bench.steady import accepted_pushes, longest_pause
from flightedl_tools.bench.tables.whole import RowPeer, missing, standard
from flightedl_tools.bench.tables.workloads import as_numbers, steps_of, workloads_of
from flightedl_tools.bench.trainer import run_steps
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


def test_a_peer_whose_package_is_not_here_is_named_in_one_line() -> None:
    nowhere = Peer("Nowhere", "peer_nowhere", "no_such_package_of_anybody")
    found = installed([*PEERS, nowhere])
    assert nowhere not in found
    assert PEERS[0] in found
    assert missing_line(PEERS) == ""
    assert missing_line(PEERS[:-2]) == "not installed, so not compared: gloo, Ray"


def test_the_blocks_of_a_peer_cover_its_array() -> None:
    count = 2 * BLOCK_ELEMENTS + 7
    assert [range(count)[part] for part in blocks(count)] == [
        range(BLOCK_ELEMENTS),
        range(BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS),
        range(2 * BLOCK_ELEMENTS, count),
    ]


@pytest.mark.parametrize("peer", [peer for peer in installed() if peer.package != "torch"], ids=lambda peer: peer.name)
def test_each_peer_that_is_installed_steps(peer: Peer) -> None:
    """PyTorch's take seconds to start; they step in the small run below."""
    with peer_side(peer, BLOCK_ELEMENTS + 5) as side:
        side.run(2)
        measured = side.measured()
    assert 0 < measured.step_s < 60
    assert measured.bytes_per_s == pytest.approx(8 * (BLOCK_ELEMENTS + 5) / measured.step_s)
    assert measured.server_bytes > 4 * BLOCK_ELEMENTS


def test_peers_stand_below_the_workloads_that_they_do_the_like_of() -> None:
    assert [name for name, workload in STANDARD.items() if has_peers(workload)] == ["sgd", "small"]
    assert not has_peers(Workload(wire="bfloat16"))
    took = Measured(step_s=0.25, bytes_per_s=5e8, cpu_s_per_gb=0.5, server_bytes=10**8)
    compared = Comparison(Workload(), took, took, 1.0, (PeerComparison("gloo", took, 0.75),))
    columns = {str(column.header): list(column.cells) for column in as_table([compared]).columns}
    assert columns["workload"] == ["64 MB, sgd, async, 1 x 1: flightedl", "  gloo"]
    assert columns["ratio"] == ["1.00", "0.75"]
    assert columns["GB/s"] == ["0.50", "0.50"]
    assert "flightedl ms" in [column.header for column in as_table([Comparison(Workload(), took, took, 1.0)]).columns]


def test_what_shared_memory_gains_is_told() -> None:
    took = Measured(step_s=0.25, bytes_per_s=5e8, cpu_s_per_gb=0.5, server_bytes=10**8)
    shared = replace(took, cpu_s_per_gb=0.2)
    by_tcp = (PeerComparison(BY_TCP, took, 0.9, (0.8, 1.0)),)
    compared = Comparison(Workload(path="shared"), took, shared, 2.0, by_tcp, (1.9, 2.25), (2.5, 2.0, 3.0))
    assert against_tcp(compared) == (
        "64 MB, sgd, async, 1 x 1, shared: 2.50 x as fast as by TCP (2.00 to 3.00), "
        "with 0.40 of its processor time for a GB"
    )
    assert against_tcp(replace(compared, over_tcp=None)) == ""
    columns = {str(column.header): list(column.cells) for column in as_table([compared]).columns}
    assert columns["ratio"] == ["2.00 (1.90 to 2.25)", "0.90 (0.80 to 1.00)"]


def test_idle_peers_are_stopped() -> None:
    def state() -> str:
        return psutil.Process(side._workers[0].process.pid).status()

    with peer_side(PEERS[0], 1000) as side:
        side.run(1)
        for _ in range(200):
            if state() == psutil.STATUS_STOPPED:
                break
            time.sleep(0.01)
        assert state() == psutil.STATUS_STOPPED
        side.run(2)
    assert side._workers[0].process.returncode == 0


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_compares_both_sides() -> None:
    """Of up to twelve processes, five of which import PyTorch."""
    arguments = ["bench", "dense", "custom", "--mb", "1", "--steps", "2", "--turns", "1", "--peers", "--json"]
    arguments += ["--path", "shared"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["bare"]["step_s"] > 0
    assert found["flightedl"]["bytes_per_s"] > 0
    assert found["ratio"] > 0
    assert [peer["name"] for peer in found["peers"]] == [BY_TCP, *(peer.name for peer in installed())]
    assert found["over_tcp"][0] == pytest.approx(found["ratio"] / found["peers"][0]["ratio"])
    assert all(peer["ratio"] > 0 for peer in found["peers"])


def test_a_pause_counts_where_it_touches_the_time_that_is_looked_at():
    pushes = [0.0, 1.0, 2.0, 5.0, 5.5, 9.0]
    assert longest_pause(pushes, 1.5, 5.2) == 3.0, "what began before"
    assert longest_pause(pushes, 5.1, 6.0) == 3.5, "what ends after"
    assert longest_pause(pushes, 0.5, 1.5) == 1.0
    assert longest_pause(pushes, 8.5, 13.0) == 4.0, "what has not ended"


def test_pushes_are_read_as_they_were_written(tmp_path):
    (tmp_path / "one").write_bytes(struct.pack("dd", 1.0, 2.5) + b"abc")
    (tmp_path / "two").write_bytes(b"")
    assert accepted_pushes(tmp_path) == {"one": [1.0, 2.5]}


def test_rows_are_measured() -> None:
    given = ["bench", "sparse", "speed", "growth", "--rows", "5000", "--dim", "4", "--ids", "500", "--turns", "2"]
    done = CliRunner().invoke(command, [*given, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["ids"] for one in found["speed"]] == ["uniform", "Zipf 1.05"]
    assert all(one["gather_ratio"] > 0 and one["adagrad_ratio"] > 0 for one in found["speed"])
    assert 0 < found["growth"]["increment_bytes"] < found["growth"]["base_bytes"] / 20
    told = CliRunner().invoke(command, given).stdout
    assert "row-wise Adagrad" in told
    assert "rows made a second" in told


def test_all_sides_have_the_same_ids() -> None:
    workloads = [workload for workload, _ in standard(is_full=False, rows=[2600], dims=[4], ids=[260])]
    assert workloads_of(as_numbers(workloads)) == workloads
    assert [workload.group.tables for workload in workloads] == [1, 26, 100, 1]
    for workload in workloads:
        steps = steps_of(workload)
        assert np.array_equal(steps, steps_of(workload))
        assert np.shape(steps)[1:] == (workload.group.tables, workload.ids_of_one)
        assert 0 <= np.min(steps) <= np.max(steps) < workload.group.rows_of_one


def test_who_cannot_be_compared_is_named() -> None:
    nothing = RowPeer("Nothing", "peer_nothing", "no_such_package")
    found = missing([nothing, RowPeer("No", "peer_no", "numpy", "no-such-command")])
    assert found == [
        "Nothing is not compared: the Python package no_such_package is not installed",
        "No is not compared: there is no no-such-command on PATH",
    ]


@pytest.mark.etcd
def test_a_small_run_of_tables_between_processes() -> None:
    given = ["bench", "sparse", "whole", "--rows", "2600", "--dim", "4", "--ids", "260", "--turns", "2"]
    done = CliRunner().invoke(command, [*given, "--no-peers", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["whole"]
    assert [[side["by_other"] is None for side in one["sides"]] for one in found] == [
        [alone] * 2 for alone in (1, 0, 0, 1)
    ]
    assert all([side["side"] for side in one["sides"]] == ["flightedl", "flightedl, rows asked ahead"] for one in found)
    assert all(side["step_s"] > 0 and side["cpu_s"] > 0 for one in found for side in one["sides"])


class _Batches(list[int]):
    """Stands for a dataset."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_an_order_is_a_loop_of_its_own_which_is_left_with_nobody_waited_for() -> None:
    data, steps = _Batches(range(10)), list[int]()
    seconds, cpu_s = run_steps(cast("Any", data), lambda: steps.append(1), 3)
    # The fourth batch only says that the third is through.
    assert len(seconds) == len(steps) == 3
    assert min(*seconds, cpu_s) >= 0
    assert data.is_closed
