"""Recorded simulated runs replay without differences, unless the product has a bug."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.trainer.transfers import Over, TransferState
from flightedl.errors import CorruptError
from flightedl.recording.calls import CorePlayer
from flightedl.recording.cores import CORES
from flightedl.recording.reader import recordings_in
from flightedl.recording.recorded import recorded as made_recorded
from flightedl.recording.replay import Difference, first_difference, replay
from flightedl.recording.values import BEGUN
from flightedl.recording.writer import Recorder
from tests.simulation.bugs import CORE_BUGS
from tests.simulation.client import Simulation
from tests.support.planting import planted

#: The first three show all bugs. The others are there for the case that a changed scenario no longer does.
SEEDS = (9, 2, 8, 22, 25, 32, 1, 18, 12, 29)


def differences(directory: Path) -> list[Difference]:
    found = [replay(recording) for recording in recordings_in(directory)]
    assert sum(each.events for each in found) > 100
    return [each.difference for each in found if each.difference is not None]


class Runs:
    """Directories with the recordings of simulated jobs, each made when it is first needed."""

    def __init__(self, simulation: Simulation, directory: Path) -> None:
        self._simulation = simulation
        self._directory = directory

    def __iter__(self) -> Iterator[Path]:
        return map(self.run, SEEDS)

    def run(self, seed: int) -> Path:
        directory = self._directory / str(seed)
        if not directory.exists():
            directory.mkdir()
            self._simulation.record(seed, directory, features={"groups": False})
        return directory


@pytest.fixture(scope="module")
def recorded(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(simulation, tmp_path_factory.mktemp("recorded"))


def test_recorded_runs_replay_without_differences(recorded: Runs) -> None:
    for seed in SEEDS[:3]:
        assert differences(recorded.run(seed)) == []


def test_every_kind_of_core_is_recorded(recorded: Runs) -> None:
    records = (each for run in recordings_in(recorded.run(SEEDS[0])) for _, each in run.records())
    # No simulated program marks its batches as done.
    assert {each.core.rpartition("-")[0] for each in records} == CORES.keys() - {"acknowledged"}


class RecordedPlayer(CorePlayer):
    """Replays into a core that is itself recorded."""

    def play(self, at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        found = super().play(at, name, event)
        if name == BEGUN:
            recorder = Recorder("any", "1", "demo", SystemClock(), lambda _: None, is_strict=True)
            arguments = self._arguments(self._kind.core.__init__, event, at)
            self._core = made_recorded(recorder, {}, self._kind.core, **arguments)
        return found


def test_recording_does_not_change_decisions(recorded: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.recording.replay.CorePlayer", RecordedPlayer)
    assert differences(recorded.run(SEEDS[0])) == []


def test_a_replay_does_not_depend_on_string_hashes(recorded: Runs) -> None:
    """Decisions of a core do not depend on the order of a set."""
    command = [sys.executable, "-m", "flightedl_tools", "replay", str(recorded.run(SEEDS[0]))]
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
        ("first values on one pserver", "election"),
        ("the old model is trained on", "election"),
    ],
)
def test_a_replay_reveals_a_planted_bug(recorded: Runs, bug: str, core: str) -> None:
    with planted([CORE_BUGS[bug]]):
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
    recorded: Runs, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, bug: object, core: str
) -> None:
    monkeypatch.setattr(owner, method, bug)
    assert_shown(recorded, core)


def assert_shown(recorded: Runs, core: str) -> None:
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


def test_an_event_of_another_version_is_reported(recorded: Runs, tmp_path: Path) -> None:
    path = max(recorded.run(SEEDS[0]).iterdir(), key=lambda path: path.stat().st_size)
    data = path.read_bytes().replace(b'"TimePassed"', b'"TimePasses"').replace(b'"next_step"', b'"next_move"')
    (tmp_path / path.name).write_bytes(data)
    with pytest.raises(CorruptError, match=r"event \d+: not an event of"):
        differences(tmp_path)
