"""Writes the Helm chart in ``deploy/chart`` from what is rendered; for developers.

The chart is one template: the rendering with names in the place of values, and with every line that is not in all
variants under its condition. A variant is a set of *features*, and a condition a conjunction of features that are there
or not. The template uses ``if``, ``range`` and values, and nothing else.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.values import ClusterJob, Scaling

from .documents import as_yaml

_HEAD = "# Written by `python -m flightedl_tools.manifests`.\n"

#: What stands in the rendering -> what it is in the template.
TOKENS: Mapping[str, str] = {
    "releasename0": "{{ .Release.Name }}",
    "image0": '"{{ .Values.image }}"',
    "target0": '"{{ .Values.script }}"',
    "checkpoint0": '"{{ .Values.checkpoint }}"',
    "secret0": '"{{ .Values.secret }}"',
    "etcd0": "{{ .Values.etcd.host }}",
    "700001": "{{ .Values.trainers }}",
    "700002": "{{ .Values.pservers }}",
    "700003": "{{ .Values.etcd.port }}",
    "700004": "{{ .Values.replicas }}",
    "700005": "{{ .Values.masters }}",
    "700006": "{{ .Values.maximum }}",
    "700007": "{{ .Values.keepSeconds }}",
}
_ARGUMENT = "argument0"
#: In place of the line of an argument; the indent is that of the line.
_ARGUMENTS = ("{{- range .Values.arguments }}", '- "{{ . }}"', "{{- end }}")

_FULL = ClusterJob(
    job="releasename0",
    image="image0",
    target="target0",
    arguments=(_ARGUMENT,),
    trainers=700001,
    pservers=700002,
    spares=700004 - 700002,
    masters=700005,
    checkpoint="checkpoint0",
    secret="secret0",  # noqa: S106 - a name
    scaling=Scaling(700001, 700006),
    keep_s=700007,
)


class Feature(NamedTuple):
    """What may be part of a job or not."""

    #: Conditions of the template.
    with_it: str
    without_it: str
    #: How the values differ without it.
    changes: Mapping[str, Any]


FEATURES: Mapping[str, Feature] = {
    "tls": Feature(".Values.tls", "(not .Values.tls)", {"tls": False, "insecure": True}),
    "etcd": Feature("(not .Values.etcd.host)", ".Values.etcd.host", {"etcd": "etcd0:700003"}),
    "secret": Feature(".Values.secret", "(not .Values.secret)", {"secret": ""}),
    "scaling": Feature(".Values.maximum", "(not .Values.maximum)", {"scaling": None}),
}
_CHART = """\
apiVersion: v2
name: flightedl
description: A job of elastic deep-learning training, which counts every batch exactly once
type: application
version: 0.1.0
appVersion: 0.1.0
"""
_VALUES = """\
# Of all processes: flightedl's image, or one made from it.
image: flightedl
# Path in the image, or dotted name of a module; and its arguments.
script: /app/train.py
arguments: []
trainers: 2
# More than 0: a loop adds trainers up to so many, while they are worth it.
maximum: 0
# Pservers that hold the model; pods for them, spares included.
pservers: 2
replicas: 3
masters: 2
# URL; without one none are kept.
checkpoint: ""
# A Secret whose keys are variables of all processes, such as AWS_ACCESS_KEY_ID.
secret: ""
# Certificates from the Secrets RELEASE-server, RELEASE-trainer, RELEASE-reader (with a maximum) and RELEASE-etcd.
tls: true
# An etcd that is there already; without a host the job has one of its own.
etcd:
  host: ""
  port: 2379
# How long the finished trainers stay.
keepSeconds: 600
"""


class _Line(NamedTuple):
    text: str
    #: In which variants it is.
    variants: frozenset[frozenset[str]]


def files() -> dict[str, str]:
    """Path below ``deploy/`` -> text."""
    return {
        "chart/Chart.yaml": _HEAD + _CHART,
        "chart/values.yaml": _HEAD + _VALUES,
        "chart/templates/job.yaml": _HEAD + "".join(f"{line}\n" for line in _template()),
    }


def variants() -> Iterator[frozenset[str]]:
    """All sets of features, the full one first."""
    for count in range(len(FEATURES), -1, -1):
        yield from map(frozenset, itertools.combinations(sorted(FEATURES), count))


def job_of(variant: Iterable[str]) -> ClusterJob:
    """The values of a variant, with tokens in them."""
    changes: dict[str, Any] = {}
    for name, feature in FEATURES.items():
        if name not in variant:
            changes |= feature.changes
    return replace(_FULL, **changes)


def _template() -> Iterator[str]:
    rendered = {variant: {_key(each): each for each in render(job_of(variant))} for variant in variants()}
    for key in dict.fromkeys(itertools.chain.from_iterable(rendered.values())):
        merged: list[_Line] = []
        for variant, objects in rendered.items():
            if key in objects:
                merged = _merged(merged, ["---", *as_yaml([objects[key]]).splitlines()], variant)
        for condition, lines in itertools.groupby(merged, key=lambda line: _condition(line.variants)):
            if condition:
                yield f"{{{{- if {condition} }}}}"
            for line in lines:
                yield from _with_values(line.text)
            if condition:
                yield "{{- end }}"


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _merged(known: Sequence[_Line], lines: Sequence[str], variant: frozenset[str]) -> list[_Line]:
    """Known lines and those of one more variant, each once, in the order of both."""
    matcher = difflib.SequenceMatcher(None, [line.text for line in known], lines, autojunk=False)
    found: list[_Line] = []
    for what, start, end, first, last in matcher.get_opcodes():
        if what == "equal":
            found += [line._replace(variants=line.variants | {variant}) for line in known[start:end]]
        else:
            found += known[start:end]
            found += [_Line(line, frozenset({variant})) for line in lines[first:last]]
    return found


def _condition(where: frozenset[frozenset[str]]) -> str:
    """The conjunction that holds in these variants and no others; empty: it always holds."""
    needed = frozenset.intersection(*where)
    excluded = frozenset(FEATURES) - frozenset.union(*where)
    expected = {each for each in variants() if needed <= each and not excluded & each}
    assert where == expected, f"not a conjunction: {sorted(map(sorted, where))}"
    terms = [FEATURES[name].with_it for name in sorted(needed)]
    terms += [FEATURES[name].without_it for name in sorted(excluded)]
    return " ".join(["and", *terms]) if len(terms) > 1 else "".join(terms)


def _with_values(line: str) -> Iterator[str]:
    if _ARGUMENT in line:
        begin, item, end = _ARGUMENTS
        yield from (begin, line.replace(f"- {_ARGUMENT}", item), end)
        return
    for token, value in TOKENS.items():
        # Within quotes of YAML's own, or a longer text, it needs none.
        bare = value if line.endswith(f" {token}") else value.strip('"')
        line = line.replace(token, bare)
    yield line
