"""The Helm chart: for whatever values, its template gives what ``flightedl submit`` applies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.values import ClusterJob, Scaling

from .test_manifests import by_name

CHART = Path(__file__).parents[2] / "deploy" / "chart"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
DEFAULT = ClusterJob(job="demo", image="flightedl", target="/app/train.py")
_VALUE = re.compile(r"\{\{ ([\w.]+) \}\}")


def looked_up(name: str, values: Mapping[str, Any]) -> Any:
    """``.Values.etcd.host``"""
    found: Any = values
    for part in name.removeprefix(".").split("."):
        found = found[part]
    return found


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """``.Values.x``, ``(not .Values.x)``, or ``and`` before several of them."""
    terms = re.findall(r"\(not [\w.]+\)|\.[\w.]+", condition)
    assert " ".join(terms) == condition.removeprefix("and "), condition
    return all(
        not looked_up(term[5:-1], values) if term.startswith("(not ") else looked_up(term, values) for term in terms
    )


def rendered(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """What Helm makes of the few kinds of lines that are there."""
    shown, repeated = True, None
    for line in template.splitlines():
        if match := re.fullmatch(r"\{\{- if (.+) \}\}", line):
            shown = holds(match[1], values)
        elif match := re.fullmatch(r"\{\{- range (\S+) \}\}", line):
            repeated = looked_up(match[1], values)
        elif line == "{{- end }}":
            if repeated is None:
                shown = True
            repeated = None
        elif shown and repeated is not None:
            yield from (line.replace("{{ . }}", each) for each in repeated)
        elif shown:
            yield _VALUE.sub(lambda match: str(looked_up(match[1], values)), line)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {}),
        ({"tls": False}, {"tls": False, "insecure": True}),
        ({"etcd": {"host": "etcd.example", "port": 2399}}, {"etcd": "etcd.example:2399"}),
        (
            {"trainers": 3, "maximum": 9, "pservers": 4, "replicas": 6, "masters": 3, "image": "mine:2"},
            {"trainers": 3, "scaling": Scaling(3, 9), "pservers": 4, "spares": 2, "masters": 3, "image": "mine:2"},
        ),
        (
            {
                "secret": "store",
                "checkpoint": "s3://b/c",
                "script": "my.module",
                "arguments": ["a", "--b=1"],
                "maximum": 7,
            }
            | {"tls": False, "etcd": {"host": "h", "port": 1}, "keepSeconds": 5},
            {"secret": "store", "checkpoint": "s3://b/c", "target": "my.module", "arguments": ("a", "--b=1")}
            | {"scaling": Scaling(2, 7), "tls": False, "insecure": True, "etcd": "h:1", "keep_s": 5},
        ),
    ],
    ids=["default", "insecure", "external etcd", "numbers", "everything else"],
)
def test_the_template_gives_what_is_rendered(given: dict[str, Any], changes: dict[str, Any]) -> None:
    assert given.keys() <= VALUES.keys()
    values = {"Values": VALUES | given, "Release": {"Name": "demo"}}
    template = (CHART / "templates" / "job.yaml").read_text()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = list(yaml.load_all("\n".join(rendered(template, values)), Loader=loader))
    assert by_name([each for each in found if each]) == by_name(render(replace(DEFAULT, **changes)))


def test_the_chart_is_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "flightedl")
