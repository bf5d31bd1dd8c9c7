"""The package is cheap to import, and its imports respect the layers."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flightedl

ROOT = Path(flightedl.__file__).resolve().parent.parent
HEAVY = {
    "numpy",
    "pyarrow",
    "numba",
    "llvmlite",
    "s3fs",
    "fsspec",
    "etcd3",
    "grpc",
    "click",
    "rich",
    "msgspec",
    "asyncio",
}


def loaded_by(program: str) -> set[str]:
    """Return the top-level modules that a new interpreter has loaded after running a program."""
    program += "\nimport json, sys\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import flightedl") & HEAVY == set()


def test_importing_the_package_loads_only_its_root_module() -> None:
    """Other modules are loaded when a name is first used; those needed for typing take milliseconds."""
    program = "import sys\nbefore = set(sys.modules)\nimport flightedl\nprint(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    names = loaded.stdout.split()
    assert [name for name in names if name.startswith("flightedl")] == ["flightedl"]
    assert len(names) < 60, names


def test_settings_of_optimizers_need_no_kernels() -> None:
    assert loaded_by("import flightedl as fe; fe.Adam(lr=0.1); fe.Sync()") & {"numba", "llvmlite", "s3fs"} == set()


def test_a_trainer_loads_no_kernels() -> None:
    assert loaded_by("import flightedl as fe; fe.connect") & {"numba", "llvmlite", "s3fs"} == set()


def test_reading_parquet_loads_no_pandas() -> None:
    program = "import flightedl as fe; fe.connect; from flightedl.formats import reader; import pyarrow as pa"
    assert importlib.util.find_spec("pandas"), "the examples install pandas, so pyarrow could load it"
    assert loaded_by(program) & {"pandas"} == set()


def test_the_help_of_the_command_loads_no_server_modules() -> None:
    program = "from flightedl_tools.main import run_command_line\nassert run_command_line(['--help']) == 0"
    assert loaded_by(program) & {"numpy", "pyarrow", "numba", "etcd3", "rich"} == set()


def test_every_public_name_can_be_imported() -> None:
    for name in flightedl.__all__:
        assert getattr(flightedl, name) is not None
    assert set(flightedl.__all__) <= set(dir(flightedl))
    assert set(flightedl.__all__) == {*flightedl._MODULE_OF, "errors", "decode"}


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = flightedl.absent


def test_the_layers_hold() -> None:
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_types_are_published() -> None:
    assert (ROOT / "flightedl" / "py.typed").is_file()


def test_every_package_is_shipped() -> None:
    root = Path(__file__).parents[1]
    listed = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    mapped = {"flightedl": "flightedl", "tools": "flightedl_tools", "schemas": "flightedl_schemas"}
    found = {
        ".".join([mapped[top], *path.parent.relative_to(root / top).parts])
        for top in mapped
        for path in (root / top).rglob("__init__.py")
        if not path.is_relative_to(root / "tools" / "generators")
    }
    assert listed == found


TOPS = ("flightedl", "tools")
PACKAGES = sorted(path.parent for top in TOPS for path in (ROOT / top).rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_the_map_of_a_package_names_every_module_in_it(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    named = {name.partition(".")[0] for name in re.findall(r"``([\w.]+)``", docstring)}
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    missing = sorted(module for module in modules if not module.startswith("__") and module not in named)
    assert not missing, f"name them in the docstring of {package.name}/__init__.py, as ``{missing[0]}``"
