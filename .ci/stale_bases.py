"""Find commits that took back tests of others: those made on a stale base, in a tree without the tests.

After a rebase, history does not show the tree in which a commit was made. Its effect does: tests disappear soon after
another commit has added them. A commit is reported if, in one file, it deletes a test that is at most two days old,
and adds fewer tests than it deletes. Renamed tests are therefore not reported,
nor are tests that HEAD defines, in whichever file. To delete a young test on purpose, name it in the message of the
commit, or of a later one.

Run ``python .ci/stale_bases.py [REPOSITORY]``. The exit code is 1 if there are such commits among those of the last
two days.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field

_YOUNG_S = 2 * 86_400
_WORD = re.compile(r"\btest_\w+")
_TEST = re.compile(r"([+-])\s*(?:async )?def (test_\w+)\(")
#: Separate the fields of a commit from each other and from its changes. No file of the repository contains them.
_COMMIT, _FIELD = "\x1e", "\x1f"


@dataclass
class Commit:
    """A commit, and how often it adds (positive) or deletes (negative) each test of each file."""

    name: str
    committed_s: int
    message: str
    changes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def subject(self) -> str:
        return self.message.splitlines()[0]


def commits(repository: str) -> list[Commit]:
    """Return the commits of the last four days before HEAD that change tests, oldest first."""
    newest_s = int(_git(repository, "log", "-1", "--format=%ct") or 0)
    fields = _COMMIT + _FIELD.join(("%h", "%ct", "%B")) + _FIELD
    text = _git(
        repository, "log", "--reverse", "--topo-order", "--no-renames", "--first-parent", "-m", "-U0", "-p",
        f"--since={newest_s - 2 * _YOUNG_S}", f"--format={fields}", "--", "tests",
    )  # fmt: skip
    return [_commit(part) for part in text.split(_COMMIT)[1:]]


def _commit(part: str) -> Commit:
    name, committed_s, message, changes = part.split(_FIELD)
    commit = Commit(name, int(committed_s), message.strip())
    file = ""
    for line in changes.splitlines():
        if line.startswith(("--- a/", "+++ b/")):
            file = line[6:]
        elif found := _TEST.match(line):
            commit.changes[file][found[2]] += 1 if found[1] == "+" else -1
    return commit


def taken_back(repository: str) -> list[str]:
    """Describe each commit of the last two days that takes back tests of another commit."""
    history = commits(repository)
    defined = set(_WORD.findall(_git(repository, "grep", "-hE", r"def test_\w+\(", "HEAD", "--", "tests")))
    born: dict[str, Commit] = {}
    found = []
    for place, commit in enumerate(history):
        lost: dict[str, list[str]] = defaultdict(list)
        kept = defined | set(_WORD.findall("\n".join(each.message for each in history[place:])))
        for tests in commit.changes.values():
            deleted = [test for test, change in tests.items() if change < 0 and tests.total() < 0]
            for test in sorted(set(deleted) - kept):
                origin = born.get(test)
                if origin is not None and commit.committed_s - origin.committed_s <= _YOUNG_S:
                    lost[f"{origin.name} ({origin.subject})"].append(test)
        for tests in commit.changes.values():
            born.update({test: commit for test, change in tests.items() if change > 0})
        if history[-1].committed_s - commit.committed_s <= _YOUNG_S:
            found += [
                f"{commit.name} ({commit.subject}) deletes {', '.join(tests)}, which {origin} added"
                for origin, tests in lost.items()
            ]
    return found


def _git(repository: str, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", repository, *arguments], capture_output=True, text=True, errors="replace", check=False
    )
    return done.stdout


def main(repository: str = ".") -> int:
    """Print what is wrong, and return the exit code."""
    found = taken_back(repository)
    if found:
        found.append(
            "Restore tests that a commit took back unnoticed; name those deleted on purpose in a commit message."
        )
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
