"""``flightedl prove``: its strikes, its verdict, and real proofs of a right and a wrong script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.launch.policy import Role
from flightedl.launch.proof import Run, band_of, proof_of
from flightedl.launch.strikes import strikes
from flightedl.recording.account import Account
from flightedl_tools.main import run_command_line

from ..docs.pages import ROOT, sections, sessions_in
from ..docs.shapes import shape

EXACT = Account(expected=8, blocks=2, lost=0, double=0, foreign=0, stray=0, excluded=0, computed=9, findings={})


def run(seed: int | None, final: float | None = None, found: Account | None = EXACT, reason: str = "") -> Run:
    return Run(
        seed=seed,
        seconds=2.0 if seed is None else 4.0,
        exit_code=1 if reason else 0,
        reason=reason,
        strikes={} if seed is None else {"kill master": 1, "kill trainer": 2},
        account=found,
        final=final,
    )


def test_a_seed_determines_the_strikes() -> None:
    def first(seed: int) -> list[object]:
        return list(islice(strikes(seed, [Role.TRAINER, Role.PSERVER], every_s=1.0, lease_s=2.0), 400))

    assert first(3) == first(3) != first(4)


def test_strikes_are_kills_and_freezes_of_all_roles_sometimes_two_at_once() -> None:
    found = list(islice(strikes(0, list(Role), every_s=1.0, lease_s=2.0), 2000))
    assert {each.role for each in found} == set(Role)
    assert 0.8 < sum(each.after_s for each in found) / sum(each.after_s > 0 for each in found) < 1.2
    assert 400 < sum(each.after_s == 0 for each in found) < 600
    frozen = [each.frozen_s for each in found if each.frozen_s]
    assert 600 < len(frozen) < 800
    assert 0.2 <= min(frozen) < 0.4 < 3.6 < max(frozen) <= 4.0


def test_exact_runs_are_a_proof() -> None:
    proof = proof_of("d", "loss", [run(None), run(None)], [run(5), run(6)])
    assert proof.is_proved
    assert proof.verdict == "proved: 2 x kill master, 4 x kill trainer in 2 runs of 8 batches: 0 lost, 0 double"
    assert (proof.seed, proof.goodput, proof.expected) == (5, 0.5, 32)


def test_the_verdict_names_the_seed_and_what_it_found() -> None:
    wrong = msgspec.structs.replace(EXACT, lost=1, findings={"lost": "1 batch not counted by every block (1/0/0)"})
    proof = proof_of("d", "loss", [run(None)], [run(5), run(6, found=wrong)])
    assert (proof.is_proved, proof.seed, proof.lost) == (False, 6, 1)
    assert proof.verdict == "not proved: with seed 6, 1 batch not counted by every block (1/0/0)"


def test_a_run_that_did_not_end_is_not_accused_of_losing_the_rest() -> None:
    wrong = msgspec.structs.replace(EXACT, lost=1, findings={"lost": "1 batch not counted by every block (1/0/0)"})
    proof = proof_of("d", "loss", [run(None)], [run(5, found=wrong, reason="the run did not end")])
    assert proof.verdict == "not proved: with seed 5, the run did not end"


def test_a_script_that_ends_before_the_first_strike_is_not_proved() -> None:
    calm = msgspec.structs.replace(run(5), strikes={})
    proof = proof_of("d", "loss", [run(None)], [calm, calm])
    assert not proof.is_proved
    assert proof.verdict.endswith("the script ended before any process was struck; give it more data")


def test_a_final_loss_outside_the_band_is_only_a_warning() -> None:
    undisturbed = [run(None, 1.0), run(None, 1.2), run(None, 1.1)]
    proof = proof_of("d", "loss", undisturbed, [run(5, 2.2), run(6, 2.3), run(7, None)])
    assert proof.is_proved
    assert proof.band == pytest.approx((-0.046, 2.246), abs=1e-3)
    assert proof.warnings == ["with seed 6, the final loss is 2.3, outside -0.04604 to 2.246"]


def test_the_band_contains_99_percent_of_random_values() -> None:
    finals = np.random.default_rng(0).normal(5.0, 0.5, (20_000, 4))
    bands = [band_of(list(finals[n, :3])) for n in range(len(finals))]
    inside = [band is not None and band[0] <= final <= band[1] for band, final in zip(bands, finals[:, 3], strict=True)]
    assert 0.985 < np.mean(inside) < 0.995


def test_the_band_of_equal_values_leaves_room_for_rounding() -> None:
    assert band_of([2.0, 2.0, 2.0]) == pytest.approx((1.98, 2.02))


def test_too_few_runs_have_no_band() -> None:
    assert band_of([2.0, 2.1]) is None
    proof = proof_of("d", "loss", [run(None, 1.0), run(None, 1.1)], [run(5, 9.0)])
    assert (proof.band, proof.warnings) == (None, [])


def test_a_slow_first_run_does_not_count_as_goodput() -> None:
    slow = msgspec.structs.replace(run(None), seconds=20.0)
    assert proof_of("d", "loss", [slow, run(None), run(None)], [run(5)]).goodput == 0.5


#: A trainer of 400 batches. With "next", it pushes a gradient a second time, in the name of the next batch.
SCRIPT = """
import sys, time
import msgspec, numpy as np
import flightedl as fe
from flightedl.domain.trainer.membership import Begun

folder, is_wrong = sys.argv[1], sys.argv[2] == "next"
gradient = {"v": np.full(8, -1.0)}
with fe.connect() as job:
    data = job.dataset(f"{folder}/*.parquet", batch_size=5, epochs=2)
    model = job.parameters({"v": np.zeros(8)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
    for batch in data:
        time.sleep(0.01)
        model.step(gradient)
        job.log(loss=1.0)
        current = model.steps.current
        if is_wrong and current.batch.number == 2:
            is_wrong = False
            model.close_batch()
            other = msgspec.structs.replace(current.batch, number=3)
            model.open_batch(other, Begun(current.member, 1))
            model.step(gradient)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"k": np.arange(1000)}), tmp_path / "k.parquet", row_group_size=50)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_right_script_is_proved(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["prove", script, "--budget", "20s", "--seed", "1", "--json", "--", ".", "right"]) == 0
    captured = capsys.readouterr()
    proof = json.loads(captured.out)
    assert (proof["is_proved"], proof["lost"], proof["double"], proof["seed"]) == (True, 0, 0, 1)
    printed = set(map(shape, [*captured.err.splitlines(), proof["verdict"]]))
    (shown,) = sessions_in(sections(ROOT / "docs" / "prove.md")["Proving a script"])
    lines = [line for line in shown.splitlines() if not line.startswith("$ ") and not line.endswith("...")]
    assert {*map(shape, lines)} <= printed, "docs/prove.md shows other output"
    assert proof["expected"] == 400 * len(proof["runs"])
    assert proof["metric"] == "loss"
    assert sum(proof["strikes"].values()) >= 3
    assert not list(Path(proof["directory"]).glob("run-*/recording")), "recordings of exact runs are deleted"


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_push_in_the_name_of_another_batch_is_found(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["prove", script, "--budget", "40s", "--output", "kept", "--", ".", "next"]) == 1
    printed = capsys.readouterr().out
    assert "pushed by a trainer whose loop had not received it" in printed
    assert "not proved: without being disturbed" in printed
    assert list(Path("kept").glob("run-1/recording/*.jsonl"))


def test_an_output_that_exists_is_refused(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("kept/run-1").mkdir(parents=True)
    assert run_command_line(["prove", script, "--output", "kept"]) == 2
    assert "run-1 already exists: choose another place (--output)" in capsys.readouterr().err


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.timeout(60)
def test_ctrl_c_leaves_no_process(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flightedl_tools", "prove", script, "--", ".", "right"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        logs = tmp_path / "runs" / "prove-train" / "run-1" / "logs"
        deadline = time.monotonic() + 30
        while not list(logs.glob("trainer-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert len(children) >= 5
    assert not psutil.wait_procs(children, timeout=5)[1]
