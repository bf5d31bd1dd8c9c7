"""Recorded simulated runs replay without differences, unless the product has a bug."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.trainer.transfers import Over, TransferState
from flightedl.errors import CorruptError
from flightedl.recording.cores import CORES
from flightedl.recording.reader import recordings_in
from flightedl.recording.replay import Difference, first_difference, replay
from tests.simulation.bugs import PLANTED
from tests.simulation.cores import Outcome, run_seed
from tests.support.planting import planted

SEEDS = (16, 35, 0, 5, 77, 9, 12, 68)


def record(seed: int, directory: Path) -> Path:
    assert isinstance(run_seed(seed, record=directory), Outcome)
    return directory


def differences(directory: Path) -> list[Difference]:
    found = [replay(recording) for recording in recordings_in(directory)]
    assert sum(each.events for each in found) > 100
    return [each.difference for each in found if each.difference is not None]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Recordings of runs with some seeds."""
    return [record(seed, tmp_path_factory.mktemp(f"seed-{seed}")) for seed in SEEDS]


def test_recorded_runs_replay_without_differences(recorded: list[Path]) -> None:
    for directory in recorded[:3]:
        assert differences(directory) == []


def test_every_kind_of_core_is_recorded(recorded: list[Path]) -> None:
    records = (each for directory in recorded for run in recordings_in(directory) for _, each in run.records())
    # No simulated program marks its batches as done.
    assert {each.core.rpartition("-")[0] for each in records} == CORES.keys() - {"acknowledged"}


def test_recording_does_not_change_a_run(tmp_path: Path) -> None:
    assert run_seed(3) == run_seed(3, record=tmp_path)


def test_a_replay_does_not_depend_on_string_hashes(recorded: list[Path]) -> None:
    """Decisions of a core do not depend on the order of a set."""
    command = [sys.executable, "-m", "flightedl_tools", "replay", str(recorded[0])]
    ended = subprocess.run(
        command, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=False, timeout=50
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("bug", "core"),
    [
        ("a member before all have agreed", "master"),
        ("an epoch ends early", "master"),
        ("orders to go back are forgotten", "life"),
        ("a round closes too early", "blocks"),
        ("work of an old registration is kept", "feed"),
        ("a denial is about everything", "feed"),
        ("a refused push counts as settled", "steps"),
        ("a batch settles when the first pserver has answered", "steps"),
        ("a batch that failed arrives all the same", "steps"),
        ("a sum that failed counts as taken", "steps"),
        ("a lost sum counts as taken", "steps"),
        ("first values on one pserver", "election"),
        ("the old model is trained on", "election"),
        ("old orders are new", "snapshots"),
    ],
)
def test_a_replay_reveals_a_planted_bug(recorded: list[Path], bug: str, core: str) -> None:
    with planted([PLANTED[bug]]):
        assert_shown(recorded, core)


@pytest.mark.parametrize(
    ("owner", "method", "bug", "core"),
    [
        (PserverLife, "check_request", lambda *_: None, "life"),
        (PserverLife, "observe_master", lambda *_: None, "life"),
        (TransferState, "handle", lambda *_: Over(), "steps"),
        (TransferState, "_apply_answer", lambda *_: None, "steps"),
        (PserverSnapshots, "taken", lambda *_: False, "snapshots"),
    ],
)
def test_a_replay_reveals_a_method_that_does_nothing(
    recorded: list[Path], monkeypatch: pytest.MonkeyPatch, owner: type, method: str, bug: object, core: str
) -> None:
    monkeypatch.setattr(owner, method, bug)
    assert_shown(recorded, core)


def assert_shown(recorded: list[Path], core: str) -> None:
    process = "master" if core == "master" else "pserver" if core in {"life", "blocks", "snapshots"} else "trainer"
    for directory in recorded:
        of_process = [each for each in recordings_in(directory) if each.header.process == process]
        found = [each.difference for each in map(replay, of_process) if each.difference is not None]
        if found:
            assert found[0].core.startswith(core)
            assert found[0].expected != found[0].actual
            return
    pytest.fail("the bug does not show")


def test_the_first_differing_effect_is_named() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == (2, 2, 3, "")
    assert first_difference([1], [1, 3]) == (2, None, 3, "")
    assert first_difference([1, 2], [1]) == (2, 2, None, "")


def test_an_event_of_another_version_is_reported(tmp_path: Path) -> None:
    record(0, tmp_path)
    path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    path.write_bytes(
        path.read_bytes().replace(b'"TimePassed"', b'"TimePasses"').replace(b'"next_step"', b'"next_move"')
    )
    with pytest.raises(CorruptError, match=r"event \d+: not an event of"):
        differences(tmp_path)
