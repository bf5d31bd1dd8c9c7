"""Simulation of the cluster: no batch is lost or applied twice, and planted bugs are found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.cores import BUGS, Found, Outcome, run_seed, run_seeds
from tests.simulation.cores.runs import Summary
from tests.support.marks import all_marks

from .found_at import seeds_for
from .test_found_bugs import FOUND

#: Number of times that seeds must have reached a mark for a test to require it: rarer ones may be missed by chance.
OFTEN = 4
#: Bugs that are found quickly enough for every run of the tests.
QUICK = (
    "no dedupe",
    "apply before check",
    "snapshot without applied",
    "marks of the open round are saved",
    "reported before it is written",
    "old views are taken",
    "no generation check",
    "nothing is reopened",
    "delete before publish",
    "a manifest that failed is written",
    "the middle batch is dropped",
    "an evaluation ends early",
    "any answer admits",
    "drained by any checkpoint",
    "an older state is gone on from",
    "the last checkpoint is not waited for",
    "only the first of a sum is marked",
    "a mode begins anywhere",
    "writes are not fenced",
    "the first batches are dropped",
    "an answer that comes too late is forgotten",
    "work of an old registration is kept",
    "a denial is about everything",
    "reported before the sum is pushed",
    "done before ack",
    "a failed increment swallows changes",
    "bases are deleted",
    "a new master takes increments for bases",
    "removed rows return",
    "admission begins anew",
    "frozen blocks are updated",
    "an earlier attempt's copy is adopted",
    "moved blocks forget their batches",
    "moved blocks forget their clocks",
    "blocks leave within a round",
    "blocks move during a checkpoint",
    "views change while blocks move",
    "blocks arrive during a cut",
    "a deposed master follows its successor",
    "a surplus process keeps its index",
    "half of a copy is taken over",
    "an index is claimed while its standby lives",
    "a copy names batches that it lacks",
    "a copy of moved blocks is taken over",
)


def report(found: list[Found]) -> str:
    return "\n".join(f"{f.story}\ntests.simulation.cores --seed {f.seed}: {f.problem}" for f in found)


@pytest.fixture
def require_marks(request):
    """Require that these seeds still reach the marks that they reached before, so that a fault path is not lost.

    The files in ``marks/`` have the marks that were reached several times. ``pytest --rewrite`` writes them. A mark may
    be removed if these seeds miss it by chance, but other seeds reach it: ``tests.simulation.cores --marks``.
    """

    def require(name: str, summary: Summary) -> None:
        file = Path(__file__).parent / "marks" / f"{name}.txt"
        if request.config.getoption("--rewrite"):
            file.write_text("".join(f"{mark}\n" for mark, count in sorted(summary.marks.items()) if count >= OFTEN))
        missing = set(file.read_text().splitlines()) - summary.marks.keys()
        assert not missing, f"never reached by these seeds any more: {missing}"

    return require


def test_a_few_seeds(require_marks):
    summary = run_seeds(range(8))
    assert not summary.found, report(summary.found)
    require_marks("few", summary)
    assert summary.fault_count > 8 * 100
    assert summary.checkpoints > 0


def test_a_few_seeds_with_rows():
    summary = run_seeds(range(3), has_rows=True)
    assert not summary.found, report(summary.found)
    assert summary.increments > 5


def test_a_few_seeds_with_moves():
    summary = run_seeds(range(6), has_moves=True)
    assert not summary.found, report(summary.found)
    assert summary.moves > 5


def test_a_few_seeds_with_standbys():
    summary = run_seeds(range(4), has_standbys=True)
    assert not summary.found, report(summary.found)
    assert summary.takeovers > 5


@pytest.mark.seeds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_moves", [False, True], ids=["", "moves"])
@pytest.mark.parametrize(
    "seeds", [range(4000, 4004), pytest.param(range(4004, 4080), marks=pytest.mark.storm)], ids=str
)
def test_many_seeds_with_standbys(seeds, has_moves):
    summary = run_seeds(seeds, has_standbys=True, has_moves=has_moves, has_rows=True)
    assert not summary.found, report(summary.found)
    assert summary.takeovers > 5


@pytest.mark.seeds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_rows", [False, True], ids=["", "rows"])
@pytest.mark.parametrize(
    "seeds", [range(3000, 3010), pytest.param(range(3010, 3100), marks=pytest.mark.storm)], ids=str
)
def test_many_seeds_with_moves(seeds, has_rows, require_marks):
    summary = run_seeds(seeds, has_moves=True, has_rows=has_rows)
    assert not summary.found, report(summary.found)
    if not has_rows:
        require_marks("moves", summary)


@pytest.mark.seeds
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [range(2000, 2008), pytest.param(range(2008, 2100), marks=pytest.mark.storm)], ids=str
)
def test_many_seeds_with_rows(seeds, require_marks):
    summary = run_seeds(seeds, has_rows=True)
    assert not summary.found, report(summary.found)
    require_marks("rows", summary)


@pytest.mark.seeds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
@pytest.mark.parametrize("recovery", ["replay", "rollback"])
@pytest.mark.parametrize(
    "seeds", [range(1000, 1005), pytest.param(range(1005, 1050), marks=pytest.mark.storm)], ids=str
)
def test_many_seeds(mode, recovery, seeds, require_marks):
    summary = run_seeds(seeds, mode=mode, recovery=recovery)
    assert not summary.found, report(summary.found)
    require_marks(f"{mode}-{recovery}", summary)
    assert summary.modes == {mode: len(seeds)}


def test_a_job_without_faults_ends():
    summary = run_seeds(range(4), fault_scale=0.0)
    assert not summary.found, report(summary.found)
    assert summary.fault_count == 0


def test_expected_marks_exist():
    expected = {
        line for file in (Path(__file__).parent / "marks").glob("*.txt") for line in file.read_text().splitlines()
    }
    assert expected <= all_marks()
    assert len(expected) >= 15


@pytest.mark.parametrize("seed", [7, 9])
def test_a_seed_determines_the_run(seed):
    """In these runs, etcd is restored from a backup with the leases of its time."""
    first, second = run_seed(seed), run_seed(seed)
    assert isinstance(first, Outcome)
    assert first == second


@pytest.mark.parametrize("flaw", QUICK)
def test_a_planted_bug_is_found(flaw):
    assert run_seeds(seeds_for(flaw), flaws=[flaw]).found, BUGS[flaw]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flaw",
    [
        pytest.param(flaw, marks=pytest.mark.storm if flaw in FOUND else pytest.mark.seeds)
        for flaw in BUGS
        if flaw not in QUICK
    ],
)
def test_a_planted_bug_is_found_sooner_or_later(flaw):
    assert run_seeds(seeds_for(flaw), flaws=[flaw]).found, BUGS[flaw]


def test_the_command_names_the_seed():
    command = [sys.executable, "-m", "tests.simulation.cores", "--seeds", "20", "--planted", "no dedupe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert re.search(r"^--seed \d+: Violation", done.stdout, re.MULTILINE)
    assert "1 violations" in done.stdout
