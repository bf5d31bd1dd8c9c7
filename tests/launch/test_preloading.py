"""Modules that scripts import are imported once, before later trainers are forked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from flightedl.launch import forking
from flightedl.launch.forking import ForkServer
from flightedl.launch.preloading import modules_of
from flightedl.launch.processes import Children

from .conftest import Until


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            '"""Doc."""\nfrom __future__ import annotations\nimport os, torch\nimport numpy as np\n',
            "torch torch._dynamo",
        ),
        ("import flightedl as fe\nfrom pandas import DataFrame\nimport pandas\n", "pandas"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n", ""),
        ("import pandas\nimport own_module\nimport torch\n", "pandas"),
        ("from .near import x\nimport torch\n", ""),
        ("try:\n    import torch\nexcept ImportError:\n    pass\n", ""),
        ("def main():\n    import torch\n", ""),
        ("import torch\n  invalid", ""),
        ("import pandas\nimport click\nimport torch\n", "pandas"),  # The script has a package of this name.
    ],
)
def test_only_the_first_imports_of_a_script_count(script: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "click").mkdir()
    assert modules_of(str(tmp_path / "train.py")) == expected.split()


def test_modules_of_users_are_not_searched_and_those_of_flightedl_are() -> None:
    assert modules_of("flightedl.examples.digits_torch") == ["torch", "torch._dynamo"]
    assert modules_of("flightedl.examples.flights") == []
    assert modules_of("flightedl.examples.missing") == modules_of("somebody.train") == modules_of("") == []


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    (tmp_path / "early.py").write_text("VALUE = 1\n")
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "shows.py").write_text("import sys\nprint('early' in sys.modules)\n")
    return {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}


def shown(forks: ForkServer, children: Children, environment: Mapping[str, str]) -> str:
    made = forks.start("trainer", "shows", (), environment)
    assert made is not None
    child = children.adopt("child-0", made)
    assert child.wait(30.0) == 0
    return child.tail()[-1]


def test_later_trainers_have_what_is_preloaded_if_their_variables_are_the_same(
    children: Children, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(forking, "modules_of", lambda target: [target] if target else [])
    with ForkServer(environment) as forks:
        assert shown(forks, children, environment) == "False"
        forks.preload("early")
        until(lambda: shown(forks, children, environment) == "True")
        assert shown(forks, children, {**environment, "OTHER": "1"}) == "True"
        assert shown(forks, children, {**environment, "OMP_NUM_THREADS": "2"}) == "False"


@pytest.mark.parametrize("module", ["threaded", "missing"])
def test_trainers_are_forked_from_before_modules_that_cannot_be_preloaded(
    module: str, children: Children, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(forking, "modules_of", lambda target: ["early", module] if target else [])
    with ForkServer(environment) as forks:
        forks.preload("train.py")
        assert forks._preloaded is not None
        server = forks._preloaded._process
        assert server is not None
        until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE)
        assert shown(forks, children, environment) == "False"
