"""The Grafana board: its metrics and labels exist in what a real server and router say."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cllm.observe.router_metrics import RouterMetrics
from cllm.server.auth.key_file import add_key
from repository import ROOT
from server_process import serving

SCRIPT = ROOT / "scripts" / "grafana_board.py"
BOARD: dict[str, Any] = runpy.run_path(str(SCRIPT))["board"]()
ROWS = {"Traffic", "Latency", "KV cache", "Engine", "Tenants", "Cluster"}

SELECTOR = re.compile(r"(?P<rated>rate\()?\b(?P<name>(?:cllm[:_]|process_)\w+)(?:\{(?P<matchers>[^}]*)\})?")
"""Metrics in PromQL, by their names."""


@dataclass
class Known:
    """A metric as it was scraped."""

    kind: str
    values: dict[str, set[str]] = field(default_factory=dict)
    """Of each label."""


def known_metrics(text: str) -> dict[str, Known]:
    known: dict[str, Known] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metric = known.setdefault(sample.name, Known(family.type))
            for label, value in sample.labels.items():
                metric.values.setdefault(label, set()).add(value)
    return known


@pytest.fixture(scope="module")
def of_server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """Of a server with keys, after a request."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(keys, "ann", 4)
    with serving(f"server.api_keys={keys}") as server:
        body = {"prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return known_metrics(httpx.get(f"{server.url}/metrics").text)


@pytest.fixture(scope="module")
def of_cluster(of_server: dict[str, Known]) -> dict[str, Known]:
    """Those of a server with the label `replica`, and the router's."""
    router = RouterMetrics("cllm", replicas=dict, index_blocks=int, streams=int)
    router.routed("one", 1e-4, 16, 32)
    router.retried("died")
    registry = CollectorRegistry()
    registry.register(router)
    replicas = {name: Known(one.kind, {**one.values, "replica": {"one"}}) for name, one in of_server.items()}
    return {**replicas, **known_metrics(generate_latest(registry).decode())}


PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}


def test_the_script_writes_the_board(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cllm.json"
    subprocess.run([sys.executable, str(SCRIPT), str(file)], check=True)
    assert json.loads(file.read_text("utf-8")) == BOARD


def test_metrics_and_labels_exist(of_cluster: dict[str, Known]) -> None:
    assert len(QUERIES) > 50
    for query, legend in QUERIES:
        shown = set(re.findall(r"{{(\w+)}}", legend))
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
        assert shown <= grouped, f"{query}: the legend shows a label that is summed over"
        found = list(SELECTOR.finditer(query))
        assert found, query
        for selector in found:
            metric = of_cluster.get(selector["name"])
            assert metric is not None, f"{query}: there is no metric {selector['name']}"
            matchers = dict(re.findall(r'(\w+)=~?"([^"]*)"', selector["matchers"] or ""))
            labels = set(metric.values)
            assert {*matchers, *grouped} <= labels, f"{query}: {selector['name']} has only the labels {sorted(labels)}"
            for label, value in matchers.items():
                assert value == f"${label}" or value in metric.values[label], query


def test_only_what_grows_has_a_rate(of_cluster: dict[str, Known]) -> None:
    for query, _ in QUERIES:
        for selector in SELECTOR.finditer(query):
            kind = of_cluster[selector["name"]].kind
            assert bool(selector["rated"]) == (kind in ("counter", "histogram")), f"{query}: it is a {kind}"


def test_parentheses_are_closed() -> None:
    for query, _ in QUERIES:
        depth = 0
        for character in query:
            depth += {"(": 1, ")": -1}.get(character, 0)
            assert depth >= 0, query
        assert depth == 0, query


def test_variables_list_labels_that_exist(of_cluster: dict[str, Known]) -> None:
    assert VARIABLES.keys() == {"datasource", "model_name", "replica"}
    assert VARIABLES["datasource"]["type"] == "datasource" and VARIABLES["datasource"]["query"] == "prometheus"
    for label in ("model_name", "replica"):
        query = VARIABLES[label]["query"]["query"]
        listed = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert listed and listed[2] == label and VARIABLES[label]["definition"] == query
        (selector,) = SELECTOR.finditer(listed[1])
        assert label in of_cluster[selector["name"]].values


def test_a_server_without_replicas_is_shown_too(of_server: dict[str, Known]) -> None:
    """Its metrics have no label `replica`; what matches it must match nothing as well."""
    assert "replica" not in of_server["cllm:num_requests_running"].values
    assert re.fullmatch(VARIABLES["replica"]["allValue"], "") and VARIABLES["replica"]["includeAll"]


def test_queries_use_every_variable_and_no_other() -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD))) - {"__rate_interval", "__all"}
    assert used == VARIABLES.keys()


def test_panels_are_complete_and_do_not_overlap() -> None:
    assert {panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"} == ROWS
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith("."), panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
