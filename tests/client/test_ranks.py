"""Sources of a process's rank in its group."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.data.ranks import rank_and_size
from flightedl.errors import UsageError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("torch.distributed", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def torch_with(rank: int, size: int, *, is_initialized: bool = True) -> Any:
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: is_initialized,
        get_rank=lambda: rank,
        get_world_size=lambda: size,
    )


def test_a_single_process_is_a_group_of_one() -> None:
    assert rank_and_size("auto") == (0, 1)


def test_torchrun_sets_the_rank_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_with(0, 1, is_initialized=False))
    assert rank_and_size("auto") == (3, 4)


def test_an_initialized_process_group_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_with(1, 2))
    assert rank_and_size("auto") == (1, 2)


@pytest.mark.parametrize("is_initialized", [True, False])
def test_jax_provides_the_rank_once_it_has_joined_a_cluster(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool
) -> None:
    jax = SimpleNamespace(
        distributed=SimpleNamespace(is_initialized=lambda: is_initialized),
        process_index=lambda: 2,
        process_count=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert rank_and_size("auto") == ((2, 3) if is_initialized else (0, 1))


def test_a_rank_may_be_a_pair_or_a_mesh_dimension_or_a_process_group() -> None:
    assert rank_and_size((1, 2)) == (1, 2)
    assert rank_and_size(SimpleNamespace(ndim=1, get_local_rank=lambda: 1, size=lambda: 4)) == (1, 4)
    assert rank_and_size(SimpleNamespace(rank=lambda: 2, size=lambda: 4)) == (2, 4)


@pytest.mark.parametrize("group", ["torch", (1,), (1, 2, 3), 4, SimpleNamespace(ndim=2, get_local_rank=lambda: 0)])
def test_anything_else_is_refused(group: Any) -> None:
    with pytest.raises(UsageError, match="group is"):
        rank_and_size(group)


@pytest.mark.parametrize("group", [(2, 2), (-1, 2), (0, 0), ("a", "b")])
def test_a_rank_outside_the_group_is_rejected(group: Any) -> None:
    with pytest.raises(UsageError, match="a rank is from 0"):
        rank_and_size(group)


def test_independently_started_trainers_are_not_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_and_size("auto", "trainer-0") == (0, 1)
    with pytest.raises(UsageError, match="these trainers are not a group"):
        rank_and_size("auto", "trainer-1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_and_size("auto", "trainer-1") == (1, 2)


def test_an_incomplete_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="RANK, WORLD_SIZE"):
        rank_and_size("auto")
