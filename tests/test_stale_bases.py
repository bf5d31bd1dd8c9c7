"""Tests of the check that refuses commits which take back the tests of others (.ci/stale_bases.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "stale_bases.py"
OURS = "def test_ours() -> None: ...\n"
THEIRS = "def test_theirs() -> None: ...\ndef test_more_of_theirs() -> None: ...\n"


class Repository:
    """A repository in which one commit follows the other, a minute apart unless stated otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now_s = 1_700_000_000
        self._git("init", "-q")
        self.commit("Begin", test_shared=OURS)
        self.commit("Add theirs", test_shared=OURS + THEIRS)

    def commit(self, message: str, after_s: int = 60, **files: str) -> None:
        self._now_s += after_s
        for name, text in files.items():
            file = self.path / "tests" / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, "utf-8")
        self._git("add", ".")
        self._git("commit", "-q", "-m", message)

    def _git(self, *arguments: str) -> None:
        when = f"{self._now_s} +0000"
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", self.path, *identity, *arguments], check=True, env={**os.environ, **dates})

    def check(self) -> tuple[int, str]:
        done = subprocess.run([sys.executable, SCRIPT, self.path], capture_output=True, text=True, check=False)
        assert not done.stderr
        return done.returncode, done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_commit_made_without_tests_of_another_one_is_refused(repository: Repository) -> None:
    repository.commit("Add ours", test_shared=OURS + "def test_new() -> None: ...\n")
    repository.commit("Add what follows", test_other=OURS)

    code, said = repository.check()

    assert code == 1
    assert said.endswith("on purpose in a commit message.\n")
    assert "(Add ours) deletes test_more_of_theirs, test_theirs, which" in said
    assert "(Add theirs) added" in said


def test_restored_tests_are_not_reported(repository: Repository) -> None:
    repository.commit("Add ours", test_shared=OURS)
    repository.commit("Restore theirs, in another file", test_restored=THEIRS)

    assert repository.check() == (0, "")


def test_renamed_tests_are_not_reported(repository: Repository) -> None:
    repository.commit("Rename", test_shared=(OURS + THEIRS).replace("theirs", "others"))

    assert repository.check() == (0, "")


def test_a_message_can_name_tests_that_are_deleted_on_purpose(repository: Repository) -> None:
    repository.commit("Delete\n\ntest_theirs shows the same as test_ours.", test_shared=OURS)
    assert repository.check()[0] == 1  # for test_more_of_theirs

    repository.commit("Say more\n\ntest_more_of_theirs was deleted on purpose.", test_other=OURS)
    assert repository.check() == (0, "")


def test_tests_older_than_two_days_can_be_deleted(repository: Repository) -> None:
    repository.commit("Delete", after_s=49 * 3600, test_shared=OURS)

    assert repository.check() == (0, "")


def test_a_folder_without_a_repository_passes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")
