from __future__ import annotations

from pathlib import Path

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
