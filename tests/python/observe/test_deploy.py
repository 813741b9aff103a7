"""The dashboard and the alerts in deploy/: every metric and every label that they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kit import small_pool
from transfer.kit import pair_of

import kvpool
from kvpool.control.router.metrics import Metrics
from kvpool.observe import migration_metrics, rebalancing_metrics, storage_metrics
from kvpool.observe.metrics import PoolCollector

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvpool.json").read_text())
ALERTS = (DEPLOY / "prometheus" / "kvpool-alerts.yml").read_text()
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def queries() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) >= 15
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    # The only YAML that this needs to read: what stands behind `expr:`, on the line or indented below it.
    found += re.findall(r"^        expr: (?:\|\n((?:          .*\n)+)|.*$)", ALERTS, re.MULTILINE)
    found += re.findall(r"^        expr: ([^|\n].*)$", ALERTS, re.MULTILINE)
    return [one for one in found if one]


@pytest.fixture(scope="module")
def exposed():
    """The names that pools and routers expose, and the labels of each."""
    name = "local://deploy-test"
    families = []
    with pair_of("loopback") as pair:
        pair.a.transfer(pair.to_b, pair.a.alloc(1)).wait()
        families += PoolCollector(pair.a).collect()
    with kvpool.Cluster.join(name) as cluster, small_pool() as pool:
        pool.attach(cluster, name="a")
        families += PoolCollector(pool).collect()
    kvpool.Cluster.forget(name)
    families += _described(migration_metrics, rebalancing_metrics, storage_metrics)
    families += Metrics().registry.collect()
    labels: dict[str, set[str]] = {}
    for family in families:
        names = {family.name + suffix for suffix in SUFFIXES[family.type]}
        for one in names:
            labels.setdefault(one, {"le"} if one.endswith("_bucket") else set()).update(
                *(sample.labels for sample in family.samples)
            )
    return labels


def _described(*modules):
    """Of collectors whose subjects take long to make: the names in their source, without labels."""
    from prometheus_client.core import CounterMetricFamily

    names = {name for module in modules for name in re.findall(r'"(kvpool_\w+)"', Path(module.__file__).read_text())}
    return [CounterMetricFamily(name, "text") for name in sorted(names)]


def test_every_metric_that_the_dashboard_and_the_alerts_name_exists(exposed):
    named = {name for query in queries() for name in re.findall(r"\bkvpool_\w+", query)}
    assert len(named) > 30
    assert named - set(exposed) == set()


def test_labels_that_select_are_those_of_the_metric(exposed):
    selected = [
        (name, label)
        for query in queries()
        for name, selector in re.findall(r"\b(kvpool_\w+)\{([^}]*)\}", query)
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)", selector)
    ]
    assert len(selected) > 30
    assert [(name, label) for name, label in selected if label not in exposed[name]] == []


def test_no_metric_has_a_label_that_prometheus_keeps_for_itself(exposed):
    """It would rename ours to exported_instance, and every query that names it would group by the scraped address."""
    declared = {
        collector._name: set(collector._labelnames)  # a metric without a sample shows no labels
        for collector in Metrics().registry._collector_to_names
        if hasattr(collector, "_labelnames")
    }
    assert sum(map(bool, declared.values())) >= 10
    assert {name for name, labels in [*exposed.items(), *declared.items()] if labels & {"instance", "job"}} == set()


def test_the_dashboard_has_no_panel_twice_and_they_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_each_alert_says_when_how_bad_and_what_it_means():
    names = re.findall(r"^      - alert: (\w+)$", ALERTS, re.MULTILINE)
    assert len(names) == len(set(names)) >= 10
    assert ALERTS.count("        expr: ") == ALERTS.count("          summary: ") == len(names)
    assert ALERTS.count("labels: { severity: ") == len(names)


def test_the_alerts_are_yaml():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    groups = yaml.safe_load(ALERTS)["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in rules)
    assert sorted(rule["expr"].strip() for rule in rules) == sorted(
        re.sub(r"^ {10}", "", one, flags=re.MULTILINE).strip() for one in queries()[-len(rules) :]
    )
