"""The manifests say what the code understands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from flightedl.config import ENVIRONMENT_PREFIX, MasterSettings, PserverSettings, TrainerSettings, tuned_environment

BASE = Path(__file__).parents[2] / "deploy" / "base"
VARIABLES = {
    ENVIRONMENT_PREFIX + field.name.upper()
    for kind in (MasterSettings, PserverSettings, TrainerSettings)
    for field in fields(kind)
}


def _load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((BASE / name).read_text()))


def _variables(name: str) -> dict[str, str]:
    container = _load(name)["spec"]["template"]["spec"]["containers"][0]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_every_setting_of_the_config_map_exists() -> None:
    assert _load("settings.yaml")["data"].keys() <= VARIABLES


@pytest.mark.parametrize("name", ["master.yaml", "pserver.yaml", "trainer.yaml"])
def test_every_process_is_tuned_and_its_settings_exist(name: str) -> None:
    variables = _variables(name)
    tuned = tuned_environment()
    assert {key: value for key, value in variables.items() if key in tuned} == tuned
    assert variables.keys() - tuned.keys() <= VARIABLES


def test_one_pserver_is_spare_and_one_master_stands_by() -> None:
    wanted = int(_load("settings.yaml")["data"]["FLIGHTEDL_PSERVERS"])
    assert _load("pserver.yaml")["spec"]["replicas"] == wanted + 1
    assert _load("master.yaml")["spec"]["replicas"] == 2


def test_every_file_is_part_of_the_base() -> None:
    listed = set(_load("kustomization.yaml")["resources"])
    assert listed == {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
