"""Tests the running stack: each service's command works, and dashboard and alerts have data of a router under load."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
import yaml

from tests.engine.processes import wait_until
from tests.engine.wire import get
from tests.support.dockerfile import ROOT, last_instruction

from .conftest import Stack
from .image import Image
from .stack import SERVICES

DATA_SECONDS: Final = 60.0
"""Timeout for data to appear; ten seconds are usual."""
DASHBOARD: Final = json.loads((ROOT / "deploy/grafana/dashboards/d2lpm.json").read_text("utf-8"))
LABEL_VALUES: Final = re.compile(r"^label_values\((\w+), (\w+)\)$")
RULES: Final = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text("utf-8"))["groups"]
VARIABLES: Final = {"$__rate_interval": "10s", "$client": ".*", "$instance": ".*", "$model": ".*"}
"""Variables of the dashboard, with values such as Grafana inserts."""


def queries() -> list[Any]:
    """Return the query of each panel, variable and rule, an alert's without its threshold."""
    found = [
        pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
        for row in DASHBOARD["panels"]
        for panel in (row, *row.get("panels", []))  # a row that is folded up holds its panels
        for target in panel.get("targets", [])
    ]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            ((metric, label),) = LABEL_VALUES.findall(variable["query"]["query"])
            found.append(pytest.param(f'{metric}{{{label}!=""}}', id=f"variable {variable['name']}"))
    for rule in (rule for group in RULES for rule in group["rules"]):
        if rule["expr"].startswith("absent(") or "d2lpm_cluster_" in rule["expr"]:
            continue  # the first have data when nothing else has, the others with several replicas
        expression = re.sub(r" [<>] [\d.]+$", "", rule["expr"]) if "alert" in rule else rule["expr"]
        found.append(pytest.param(expression, id=rule.get("alert") or rule["record"]))
    return found


def asked(stack: Stack, path: str, **parameters: str) -> Any:
    """Return the data of Prometheus's answer."""
    answer = get(f"{stack.prometheus.url}/api/v1/{path}?{urlencode(parameters)}")
    assert answer.status == 200, answer.body
    return answer.json["data"]


def values(stack: Stack, query: str) -> list[str]:
    """Return the value of each series, except those that are NaN."""
    return [
        series["value"][1] for series in asked(stack, "query", query=query)["result"] if series["value"][1] != "NaN"
    ]


def test_the_router_has_both_workers(stack: Stack) -> None:
    """The router reaches both workers by the names in its file."""
    wait_until(lambda: get(stack.router.url + "/ready").json == {"workers": 2}, DATA_SECONDS, "two workers")


def test_every_service_that_can_run_here_was_started(stack: Stack) -> None:
    """Every service runs here, except the engines, which need a GPU, and Grafana, which has no command."""
    running = {service.name for service in (stack.router, *stack.workers, stack.prometheus)}
    rest = {name for name in SERVICES if name not in running}
    assert {profile for name in rest for profile in SERVICES[name].get("profiles", ["none"])} == {
        "vllm",
        "sglang",
        "none",
    }
    assert [name for name in rest if "profiles" not in SERVICES[name]] == ["grafana"]
    assert "command" not in SERVICES["grafana"]


def test_the_health_check_succeeds_only_where_a_server_answers(stack: Stack, image: Image) -> None:
    """The image's health check ends with 0 if a server answers at its port, and fails if none does."""
    check = json.loads(last_instruction("HEALTHCHECK").rest.partition("CMD ")[2])
    for port, well in ((stack.router.port, True), (stack.workers[0].port, True), (9, False)):
        environment = {**image.environment, "D2LPM_PORT": str(port)}
        done = subprocess.run(check, env=environment, capture_output=True, timeout=60, check=False)
        assert (done.returncode == 0) == well, done.stderr


def test_prometheus_scrapes_the_router(stack: Stack) -> None:
    """Prometheus has one target, which is up and is scraped without an error."""

    def targets() -> list[tuple[str, str]]:
        return [(target["health"], target["lastError"]) for target in asked(stack, "targets")["activeTargets"]]

    wait_until(lambda: targets() == [("up", "")], DATA_SECONDS, "the target is up")


@pytest.mark.parametrize("query", queries())
def test_every_query_has_data(query: str, loaded: Stack) -> None:
    """Each query of a panel, a variable or a rule returns data."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    deadline = time.monotonic() + DATA_SECONDS
    while not values(loaded, query):
        assert time.monotonic() < deadline, f"no data: {query}"
        time.sleep(0.2)


def test_every_rule_is_evaluated_without_an_error(loaded: Stack) -> None:
    """Prometheus evaluates every rule and its templates without an error."""

    def health() -> set[str]:
        return {rule["health"] for group in asked(loaded, "rules")["groups"] for rule in group["rules"]}

    wait_until(lambda: "unknown" not in health(), DATA_SECONDS, "every rule was evaluated")
    assert health() == {"ok"}


def test_the_metrics_follow_the_conventions_of_prometheus(loaded: Stack, promtool: str) -> None:
    """Promtool finds no fault with the metrics' names, units, help texts and types."""
    exposition = get(loaded.router.admin_url + "/metrics").body
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "command",
    [("check", "config", "deploy/prometheus/prometheus.yml"), ("test", "rules", "tests/deploy/alerts.yml")],
    ids=["configuration", "alerts"],
)
def test_promtool_accepts_the_configuration_and_the_alerts(command: tuple[str, ...], promtool: str) -> None:
    """The files are valid, and every alert fires in trouble, not before its time, and never on an ordinary day."""
    done = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_rule_test(rules: Path) -> None:
    """The file of rule tests, alerts.yml, names every alert among those that it expects."""
    named = {
        rule["alert"]
        for group in yaml.safe_load(rules.read_text("utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    tried = (Path(__file__).parent / "alerts.yml").read_text("utf-8")
    assert [name for name in named if f'alertname="{name}"' not in tried] == []
