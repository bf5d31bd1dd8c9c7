"""Every option and argument of every command rejects invalid texts with one sentence and exit code 2.

The test walks click's tree, so that it fails for a new option without a row. Types of numbers and choices determine
their invalid values. ``INVALID_TEXTS`` lists invalid texts, and ``ANY_TEXT`` has reasons why
some texts cannot be invalid.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flightedl_tools.main import command, run_command_line
from tests.support.processes import closed_port

#: Remaining arguments of each command, in addition to the option under test; "{}" is a directory of the test.
WHOLE = {
    "run": ["{}/script.py"],
    "prove": ["{}/script.py"],
    "plot": ["{}"],
    "data serve": ["{}/x.csv"],
    "checkpoint export": ["{}/kept", "{}/model.npz"],
    "checkpoint list": ["{}/kept"],
    "checkpoint restore": ["{}/kept", "1"],
    "checkpoint verify": ["{}/kept"],
    "dataset convert": ["{}/x.csv", "--to", "{}/new", "--to-format", "csv"],
    "dataset index": ["{}/x.csv"],
    "dataset inspect": ["{}/x.csv"],
    "dataset split": ["{}/x.csv", "--to", "{}/new", "--shards", "1"],
    "mode": ["async"],
    "tasks drop": ["--all"],
    "tasks retry": ["--all"],
    "submit": ["--image", "i", "--dry-run", "{}/script.py"],
    "logs": ["job"],
    "scale trainers": ["1"],
    "scale pservers": ["1"],
    "autoscale": ["--max", "2"],
    "cancel": ["job"],
    "certs create": ["{}/certs"],
    "certs renew": ["{}/certs"],
    "replay": ["{}"],
    "model get": ["w", "w.npy"],
    "model show": ["w"],
    "forget": ["job"],
    "follow": ["{}/copy"],
    "table export": ["{}/t.parquet", "--table", "t"],
    "table import": ["{}/x.csv", "--table", "t", "--checkpoint", "{}/kept"],
}
JOBS = ["UPPER", "a b", ""]
ABSENT = "{}/absent"
#: Option -> invalid values, for all commands or for one.
INVALID_TEXTS: dict[str, list[str]] = {
    "--job": JOBS,
    "--etcd": ["host", "host:x", "host:99999", "a:1,b"],
    "--log-level": ["LOUD", ""],
    "--name": ["a b", "a/b", ""],
    "--tls-dir": [ABSENT],
    "url": [ABSENT, "nonsense://x"],
    "follow url": ["nonsense://x"],
    "urls": [ABSENT, "nonsense://x"],
    "directory": [ABSENT],
    "--format": ["nonsense"],
    "--to-format": ["nonsense"],
    "--to": ["memory://x", "/proc/x/y"],
    "--columns": ["nonsense"],
    "--types": ["x", "x=nonsense", "=int64", "nonsense=int64"],
    "--names": ["a,,b", "I3-I1", "a,a"],
    "--delimiter": ["::", "\N{LATIN SMALL LETTER E WITH ACUTE}"],
    "--data-moved": ["/old", "=/new"],
    "run script_or_module": [ABSENT + ".py"],
    "prove script_or_module": [ABSENT + ".py"],
    "prove --faults": ["nonsense", "trainer,", ""],
    "prove --budget": ["x", "5 minutes", "0", "-1", ""],
    "plot runs": [ABSENT],
    "doctor --report": [ABSENT + "/x"],
    "dataset convert --filter": ["a", "a ~ 1"],
    "mode kind": ["nonsense"],
    "model get --rows": ["3", "a:b"],
    "model get --columns": [""],
    "submit script_or_module": ["absent.py"],
    "submit --server-cpu-limit": ["lots"],
    "submit --trainer-cpu-limit": ["lots"],
    "submit --node-selector": ["x"],
    "submit --volume": ["x"],
    "submit --annotation": ["x"],
    "submit --pod-template": [ABSENT],
    "submit --image": [""],
    "submit --trainers": ["x", "3..2"],
    "submit --set": ["x", "FLIGHTEDL_NOPE=1"],
    "submit --with": [ABSENT],
    "submit --server-cpu": ["lots"],
    "submit --server-memory": ["lots"],
    "submit --trainer-cpu": ["lots"],
    "submit --trainer-memory": ["lots"],
    "certs create --host": ["bad host!", ""],
    "certs create directory": ["/dev/null/x"],
    "forget job": JOBS,
}
_LATER = "the server that is started refuses it"
_CLUSTER = "only the cluster knows it"
_ASKED = "only what it is looked for in knows it"
#: Option -> reason why its text cannot be validated. Overrides ``INVALID_TEXTS``.
ANY_TEXT: dict[str, str] = {
    "--null-values": "any text may stand for a null",
    "arguments": "the script's",
    "--checkpoint": _LATER,
    "--bind": _LATER,
    "--advertise": _LATER,
    "--record": _LATER,
    "master --tls-dir": _LATER,
    "pserver --tls-dir": _LATER,
    "run --tls-dir": _LATER,
    "autoscale --tls-dir": "the cluster is asked before",
    "run --output": "made if it is absent",
    "prove --output": "made if it is absent",
    "prove --metric": _ASKED,
    "plot --output": "tests/curves: nothing is drawn of no values",
    "plot --metric": _ASKED,
    "output": _ASKED,
    "model list prefix": _ASKED,
    "model show name": _ASKED,
    "follow --etcd": "it may be started later",
    "serve --etcd": "it may be started later",
    "model get name": _ASKED,
    "--table": _ASKED,
    "--namespace": _CLUSTER,
    "--context": _CLUSTER,
    "logs job": _CLUSTER,
    "cancel job": _CLUSTER,
    "--secret": _CLUSTER,
    "--etcd-image": _CLUSTER,
    "--image-pull-secret": _CLUSTER,
    "--service-account": _CLUSTER,
    "--priority-class": _CLUSTER,
    "--toleration": _CLUSTER,
    "--queue": _CLUSTER,
}


def commands() -> Iterator[tuple[str, click.Command]]:
    def below(group: click.Command, context: click.Context, path: list[str]) -> Iterator[tuple[str, click.Command]]:
        if not isinstance(group, click.Group):
            yield " ".join(path), group
            return
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            yield from below(found, click.Context(found, parent=context), [*path, name])

    return below(command, click.Context(command), [])


def name_of(parameter: click.Parameter) -> str:
    return parameter.opts[0] if isinstance(parameter, click.Option) else str(parameter.name)


def of_type(kind: click.ParamType) -> list[str]:
    """Return invalid values for a number or choice of this type."""
    found: list[str] = []
    if isinstance(kind, click.Choice):
        return ["nonsense"]
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        found += ["x", ""]
        if isinstance(kind, click.types.FloatParamType):
            found += ["nan", "inf"]
        lowest, highest = getattr(kind, "min", None), getattr(kind, "max", None)
        found += ["-1000000"] if lowest is None else [str(math.floor(lowest) - 1)]
        found += [] if highest is None else [str(math.ceil(highest) + 1)]
    return found


def rows() -> Iterator[tuple[str, str, list[str]]]:
    for path, found in COMMANDS.items():
        for parameter in found.params:
            name = name_of(parameter)
            key = f"{path} {name}"
            if (
                getattr(parameter, "is_flag", False)
                or key in ANY_TEXT
                or (name in ANY_TEXT and key not in INVALID_TEXTS)
            ):
                continue
            yield path, name, INVALID_TEXTS.get(key, INVALID_TEXTS.get(name)) or of_type(parameter.type)


COMMANDS = dict(commands())


@pytest.mark.parametrize(("path", "name", "values"), [pytest.param(*row, id=" ".join(row[:2])) for row in rows()])
def test_nonsense_is_rejected(
    path: str,
    name: str,
    values: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert values, "list invalid values of the new option in INVALID_TEXTS, or a reason in ANY_TEXT why there are none"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server was started"))
    (tmp_path / "script.py").write_text("")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    words = {name, name.removeprefix("--").replace("-", "_")}
    with closed_port() as port:
        monkeypatch.setenv("FLIGHTEDL_ETCD", f"127.0.0.1:{port}")
        for value in values:
            given = value.format(tmp_path)
            code = run_command_line([*path.split(), *replaced(path, name, given, tmp_path)])
            message = capfd.readouterr().err
            assert code == 2, f"{value!r}: exit {code}: {message}"
            assert "Traceback" not in message
            assert any(word.lower() in message.lower() for word in words) or (given and given in message), message


def test_the_tables_have_no_rows_of_removed_options() -> None:
    names = {name_of(parameter) for found in COMMANDS.values() for parameter in found.params}
    keys = {f"{path} {name_of(parameter)}" for path, found in COMMANDS.items() for parameter in found.params}
    assert {*INVALID_TEXTS, *ANY_TEXT} <= names | keys


def replaced(path: str, name: str, given: str, place: Path) -> list[str]:
    """Return a complete command line with this value."""
    complete = [each.format(place) for each in WHOLE.get(path, [])]
    if name.startswith("-"):
        if name in complete:
            complete[complete.index(name) + 1] = given
            return complete
        return [name, given, *complete] if path in {"run", "submit"} else [*complete, name, given]
    arguments = [name_of(each) for each in COMMANDS[path].params if isinstance(each, click.Argument)]
    at = arguments.index(name)
    options = [number for number, each in enumerate(complete) if each.startswith("--")]
    values = [number + 1 for number in options if complete[number] not in {"--dry-run", "--all"}]
    positions = [number for number in range(len(complete)) if number not in {*options, *values}]
    if at < len(positions):
        complete[positions[at]] = given
        return complete
    return [*complete, given]
