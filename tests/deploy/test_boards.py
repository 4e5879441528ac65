"""The Grafana boards: every query is valid, and its metrics and labels exist in what a real server and router say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cllm.observe.router_metrics import RouterMetrics
from cllm.server.auth.key_file import add_key
from promql_kit import InvalidQueryError, selectors_of
from repository import ROOT
from server_process import serving

FOLDER = ROOT / "deploy" / "grafana"
BOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in ("cllm", "cllm-cluster")}
ROWS = {"Traffic", "Latency", "KV cache", "Engine", "Tenants"}

each_board = pytest.mark.parametrize("name", BOARDS)


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


@pytest.fixture
def known(request: pytest.FixtureRequest, name: str) -> dict[str, Known]:
    metrics: dict[str, Known] = request.getfixturevalue({"cllm": "of_server", "cllm-cluster": "of_cluster"}[name])
    return metrics


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[name]["panels"] if panel["type"] != "row"]


def queries(name: str) -> Iterator[tuple[str, str]]:
    """Each query, and the legend that goes with it."""
    for panel in panels(name):
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def variables(name: str) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in BOARDS[name]["templating"]["list"]}


def test_the_boards_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "grafana_boards.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python scripts/grafana_boards.py"


def test_an_outdated_board_is_noticed(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "grafana_boards.py").read_text("utf-8")
    copy = tmp_path / "scripts" / "grafana_boards.py"
    copy.parent.mkdir()
    copy.write_text(script, "utf-8")
    run = [sys.executable, str(copy)]
    assert subprocess.run([*run, "--check"], check=False, capture_output=True).returncode == 1
    assert not (tmp_path / "deploy").exists()
    subprocess.run(run, check=True)
    assert subprocess.run([*run, "--check"], check=False).returncode == 0
    board = tmp_path / "deploy" / "grafana" / "cllm.json"
    board.write_text(board.read_text("utf-8").replace("Hit rate", "Hits"), "utf-8")
    assert subprocess.run([*run, "--check"], check=False, capture_output=True).returncode == 1


@each_board
def test_metrics_and_labels_exist(name: str, known: dict[str, Known]) -> None:
    assert len(list(queries(name))) > 40
    for query, legend in queries(name):
        shown = set(re.findall(r"{{(\w+)}}", legend))
        selectors = selectors_of(query)
        assert selectors, query
        for selector in selectors:
            metric = known.get(selector.name)
            assert metric is not None, f"{query}: there is no metric {selector.name}"
            used = {*selector.matchers, *selector.grouped, *shown}
            assert used <= set(metric.values), f"{query}: {selector.name} has only the labels {sorted(metric.values)}"
            for label, (operator, value) in selector.matchers.items():
                assert value == f"${label}" or (operator == "=" and value in metric.values[label]), query
            assert shown <= selector.grouped, f"{query}: the legend shows a label that is summed over"


@each_board
def test_only_what_grows_has_a_rate(name: str, known: dict[str, Known]) -> None:
    for query, _ in queries(name):
        for selector in selectors_of(query):
            grows = known[selector.name].kind in ("counter", "histogram")
            assert selector.rated == grows, f"{query}: {selector.name} is a {known[selector.name].kind}"


@each_board
def test_variables_list_labels_that_exist(name: str, known: dict[str, Known]) -> None:
    found = variables(name)
    assert found.keys() == {"datasource", "model_name"} | ({"replica"} if name == "cllm-cluster" else set())
    assert found["datasource"]["type"] == "datasource" and found["datasource"]["query"] == "prometheus"
    for label in found.keys() - {"datasource"}:
        query = found[label]["query"]["query"]
        listed = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert listed and listed[2] == label and found[label]["definition"] == query
        (selector,) = selectors_of(listed[1])
        assert {label, *selector.matchers} <= set(known[selector.name].values)


@each_board
def test_queries_use_every_variable_and_no_other(name: str) -> None:
    text = json.dumps(BOARDS[name])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == variables(name).keys()


@each_board
def test_panels_are_complete_and_do_not_overlap(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == name and {panel["title"] for panel in board["panels"] if panel["type"] == "row"} >= ROWS
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(name):
        assert panel["title"] and panel["description"].endswith("."), panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0


@pytest.mark.parametrize(
    "query",
    [
        "sum(rate(a_total[5m])",  # a parenthesis is missing
        "rate(a_total)",
        "sum(a_total[5m])",
        "a_total[5m]",
        "rates(a_total[5m])",
        'a{b~"c"}',
        "a b",
        "sum by (a (b)",
        "histogram_quantile(a, b)",
        "",
        "rate(a_total[five])",
    ],
)
def test_the_parser_refuses_what_is_no_query(query: str) -> None:
    with pytest.raises(InvalidQueryError):
        selectors_of(query)


def test_the_parser_finds_metrics_and_labels() -> None:
    query = 'sum by (x, y) (rate(a:b_total{c=~"$c", d="e"}[5m])) / (max(f) > 0)'
    first, second = selectors_of(query)
    assert (first.name, first.rated, first.grouped) == ("a:b_total", True, {"x", "y"})
    assert first.matchers == {"c": ("=~", "$c"), "d": ("=", "e")}
    assert (second.name, second.rated, second.grouped, second.matchers) == ("f", False, set(), {})
