"""Every block of docs/torch.md runs unchanged, as do blocks of docs/frameworks.md that need no other package."""

from __future__ import annotations

from pathlib import Path

import pytest

from .page import prepare, run_blocks


@pytest.mark.parametrize(
    ("page", "group"), [("torch.md", "torch"), ("local-sgd.md", "torch"), ("frameworks.md", "sklearn")]
)
def test_every_block_runs(page: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    run_blocks(page, group)
