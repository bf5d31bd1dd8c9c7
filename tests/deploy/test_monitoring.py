"""The dashboard and the alert rules query existing metrics with existing labels."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry

from flightedl.adapters.instruments import PrometheusInstruments
from flightedl.client.progress import Totals
from flightedl.client.progress import figures as trainer_figures
from flightedl.domain.master.effects import Kind
from flightedl.errors import ERRORS_BY_CODE
from flightedl.master.metrics import MEASURES as OF_MASTERS
from flightedl.master.metrics import figures as master_figures
from flightedl.messages.status import PserverStatusReply, StatusReply, TableCounts
from flightedl.process.http_page import Asked
from flightedl.process.metrics_page import Metrics
from flightedl.pserver.meter import MEASURES as OF_PSERVERS
from flightedl.pserver.metrics import figures as pserver_figures

HERE = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((HERE / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel["targets"]]


NEEDED = {field.name: 0 for field in msgspec.structs.fields(PserverStatusReply) if field.required}
OF_A_MASTER = StatusReply(job="a", state="", checkpoint="c-3", checkpoint_age_s=1.0, events={"a": 1}, reports={"a": 1})
OF_A_PSERVER = PserverStatusReply(
    **{**NEEDED, "members": [], "rows": {"a": 1}, "refused_calls": {"a": 1}, "tables": [TableCounts(name="t")]}
)
PAGES = {
    "master": (OF_MASTERS, master_figures(OF_A_MASTER)),
    "pserver": (OF_PSERVERS, pserver_figures(OF_A_PSERVER)),
    "trainer": ((), trainer_figures(Totals(logged={"loss": 0.5}), 1.0)),
}


def promtool(*arguments: str, stdin: bytes = b"") -> None:
    """Run Prometheus's own check."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", str(HERE / "alerts.yaml"))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_fire.yaml")))


@pytest.mark.parametrize("role", PAGES)
def test_prometheus_accepts_every_page(role: str) -> None:
    measures, figures = PAGES[role]
    registry, labels = CollectorRegistry(), {"job": "a", "role": role, "index": "0"}
    PrometheusInstruments(registry, labels, measures)
    page = Metrics(labels, lambda: figures, registry).page(Asked("/metrics", "", threading.Event()))
    assert isinstance(page.body, bytes)
    promtool("check", "metrics", stdin=page.body)


def known() -> dict[str, str]:
    """Return each metric's label, in addition to those of the process."""
    figures = {name: figure for _, page in PAGES.values() for name, figure in page.items()}
    found = {name: figure.label for name, figure in figures.items()}
    for measure in (*OF_MASTERS, *OF_PSERVERS):
        found[f"{measure.name}_bucket" if measure.buckets else f"{measure.name}_total"] = measure.label
    return {f"flightedl_{name}": label for name, label in found.items()}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_queried_metric_and_label_exists(expression: str) -> None:
    figures = known()
    labels = {"job", "role", "index", "le", "instance"}
    for name in re.findall(r"\bflightedl_\w+", expression):
        assert name in figures, f"{name} is shown by no page"
        labels.add(figures[name])
    asked = re.findall(r"by \(([^)]*)\)", expression) + re.findall(r"[{,](\w+)=", expression)
    assert {label.strip() for each in asked for label in each.split(",")} <= labels


def test_kinds_and_codes_named_by_rules_exist() -> None:
    for expression in EXPRESSIONS:
        assert set(re.findall(r'kind="(\w+)"', expression)) <= {kind.value for kind in Kind}
        assert set(re.findall(r'code="(\w+)"', expression)) <= set(ERRORS_BY_CODE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"runbook", "summary", "description"}
    assert rule["annotations"]["runbook"] == f"docs/alerts/{rule['alert']}.md"


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"][name] for name in "xywh") for panel in PANELS]
    assert len(set(places)) == len(PANELS) == len({panel["id"] for panel in PANELS})
    assert all(x + width <= 24 for x, _, width, _ in places)


def test_every_histogram_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    assert all(
        f"flightedl_{measure.name}_bucket" in shown for measure in (*OF_MASTERS, *OF_PSERVERS) if measure.buckets
    )
