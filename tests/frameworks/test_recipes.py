"""The recipes for accelerate, Lightning, JAX and optax run as they stand in the docs, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..torch.page import prepare, run_blocks

# What these packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_a_recipe_for_pytorch(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    names: dict[str, object] = {"__name__": "__main__"}
    run_blocks("torch.md", "torch", names, only=1)
    run_blocks("torch.md", package, names)


def test_jax_and_optax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    run_blocks("frameworks.md", "jax")
