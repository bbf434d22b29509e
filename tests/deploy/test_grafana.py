"""Grafana's dashboards, and their queries on a Prometheus that scrapes a server under load."""

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from asking import MODEL, complete
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from metrics_page import documented
from prometheus import Prometheus
from running import HTTP, Server

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))}
VARIABLES = {"$job": "outrider", "$instance": ".*", "$__rate_interval": "30s"}
SILENT = {"Drafter collapsed", "Error of the predicted step time", "Step time, predicted and taken"}
"""Panels that may stay empty or at 0: an alarm, and two that need a profile of this machine."""

OF_OTHERS = {"Block-diffusion models", "Keys", "Learning"}
"""Rows of panels that stay empty with other models, without keys, and on a server that does not learn
(tests/lossless/test_spiffy.py, test_learning.py, tests/server/http/test_limits.py)."""


def targets() -> list[tuple[str, str, str]]:
    """Panel title, legend and expression of every query that most models answer."""
    queries, row = [], ""
    for dashboard in DASHBOARDS.values():
        for panel in dashboard["panels"]:
            row = panel["title"] if panel["type"] == "row" else row
            if row not in OF_OTHERS:
                queries += [
                    (panel["title"], target["legendFormat"], target["expr"]) for target in panel.get("targets", ())
                ]
    return queries


def choices(dashboard: dict[str, Any]) -> dict[str, str]:
    """The first value of every variable with values in the dashboard."""
    variables = dashboard["templating"]["list"]
    return {f"${found['name']}": found["query"].split(",")[0] for found in variables if found["type"] == "custom"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_field_is_of_grafanas_schema(name: str) -> None:
    plugins.register_default_plugins()
    written = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARDS[name])), object_pairs_hook=_without_nulls)
    assert written == DASHBOARDS[name]


def _without_nulls(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None}


def test_panels_query_existing_metrics() -> None:
    assert list(DASHBOARDS) == ["overview", "sla", "speculation"]
    for dashboard in DASHBOARDS.values():
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(titles) == len(set(titles))
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                assert panel["description"]
                assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                place = panel["gridPos"]
                assert place["x"] + place["w"] <= 24
                for target in panel["targets"]:
                    metrics = re.findall(r"(?:outrider_|sglang:)\w+", target["expr"])
                    assert target["expr"].count('{job=~"$job",instance=~"$instance"') == len(metrics) > 0


def test_queries_of_a_learning_server_are_documented() -> None:
    made = documented("metric of a server that learns")
    named = {f"{name}_total" if kind == "counter" else name for name, (kind, _) in made.items()}
    for file in ("grafana/dashboards/speculation.json", "prometheus/alerts.yml"):
        asked = set(re.findall(r"outrider_learn_\w+", (FOLDER.parent / file).read_text()))
        assert asked
        assert asked <= named


def test_provisioning_names_existing_files() -> None:
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/outrider.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).name == (FOLDER / "dashboards").name


def load(server: Server) -> None:
    """Requests of all kinds, and an error."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "stream": False},
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0, "min_tokens_per_second": 0.01},
        {"temperature": 0, "min_tokens_per_second": 1e6},
    ]
    asked = [{"max_tokens": 24, "ignore_eos": True} | kinds[number % len(kinds)] for number in range(15)]
    prompts = [f"{number}, {number + 1}, {number + 2}, {number}, {number + 1}, " * 3 for number in range(15)]
    with ThreadPoolExecutor(5) as pool:
        answers = [
            pool.submit(complete, server, prompt, speculate=True, **body)
            for prompt, body in zip(prompts, asked, strict=True)
        ]
        for answer in answers:
            answer.result()
    for number in range(5):
        body = {"model": MODEL, "prompt": prompts[number], "max_tokens": 16, "stream": True}
        assert HTTP.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert HTTP.post(f"{server.url}/v1/completions", json={"max_tokens": -1}, timeout=20).status_code == 400


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped the server before, during and after the load."""
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
    try:
        started.wait_for_scrapes(2)
        for scrapes in (1, 2):
            load(server)  # a rate needs two scrapes of a series
            started.wait_for_scrapes(scrapes)
        yield started
    finally:
        started.stop()


def test_every_query_returns_data_of_a_server_under_load(prometheus: Prometheus) -> None:
    chosen = VARIABLES | {
        name: value for dashboard in DASHBOARDS.values() for name, value in choices(dashboard).items()
    }
    empty = []
    for title, legend, expression in targets():
        for name, value in chosen.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        values = [float(series["value"][1]) for series in prometheus.ask(expression)]
        if title not in SILENT and not any(math.isfinite(value) for value in values):
            empty.append((title, legend, expression, values))
    assert not empty


def test_rules_are_evaluated_without_an_alarm(prometheus: Prometheus) -> None:
    prometheus.wait_for_scrapes(2)
    for rule in yaml.safe_load((FOLDER.parent / "prometheus/rules.yml").read_text())["groups"][0]["rules"]:
        if "step_prediction" not in rule["record"]:
            assert prometheus.ask(rule["record"]), rule["record"]
    assert prometheus.ask('ALERTS{alertstate="firing"}') == []
