from __future__ import annotations

from pathlib import Path

import pytest

from flightedl.launch import orphan_reaper
from flightedl.launch.orphan_reaper import reap, remove_directory


def test_only_listed_directories_are_removed(tmp_path: Path) -> None:
    kept, removed = tmp_path / "kept", tmp_path / "with a space"
    for directory in (kept, removed):
        (directory / "deep").mkdir(parents=True)
    reap([f"directory {kept}\n", f"directory {removed}\n", f"forget-directory {kept}\n", "unknown word\n"])
    assert kept.exists()
    assert not removed.exists()


def test_removing_a_directory_is_idempotent(tmp_path: Path) -> None:
    remove_directory(str(tmp_path / "absent"))


def test_only_listed_groups_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(orphan_reaper, "kill_group", killed.append)
    reap(["group 5\n", "group 6\n", "forget-group 5\n", "forget-group 7\n"])
    assert killed == [6], "the id of a group that has ended may belong to another one now"
