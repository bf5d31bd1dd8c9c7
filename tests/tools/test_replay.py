"""``flightedl replay``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flightedl_tools.main import run_command_line
from tests.simulation.bugs import CORE_BUGS
from tests.simulation.client import Simulation
from tests.support.planting import planted

SEED = 9
BUG = "a member before all have agreed"


@pytest.fixture(scope="module")
def recorded(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("recorded")
    simulation.record(SEED, directory, features={"groups": False})
    return str(directory)


def test_a_replay_without_differences_succeeds(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["replay", recorded]) == 0
    output = capsys.readouterr()
    assert "events, same effects" in output.out
    assert not output.err


def test_differences_are_reported(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    with planted([CORE_BUGS[BUG]]):
        assert run_command_line(["replay", recorded]) == 1
    output = capsys.readouterr()
    assert "another effect at event" in output.out
    assert "recorded:" in output.err
    assert ", master-1: event" in output.err


def test_differences_are_reported_as_json(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    with planted([CORE_BUGS[BUG]]):
        assert run_command_line(["replay", recorded, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["processes"]
    differences = [each["difference"] for each in found if each["difference"] is not None]
    assert differences[0]["core"] == "master-1"
    assert differences[0]["expected"] != differences[0]["actual"]


def test_a_directory_without_recordings_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["replay", str(tmp_path)]) == 2
    assert "has no recordings" in capsys.readouterr().err
