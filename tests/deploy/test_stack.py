"""Every service's command runs, and what is drawn and alerted on has data from a router under load."""

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
"""A bound: ten seconds are usual."""
DASHBOARD: Final = json.loads((ROOT / "deploy/grafana/dashboards/d2lpm.json").read_text("utf-8"))
RULES: Final = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text("utf-8"))["groups"]
VARIABLES: Final = {"$__rate_interval": "10s", "$client": ".*"}
"""As Grafana puts them in."""


def queries() -> list[Any]:
    """Of each panel, and of each rule; an alert's without its threshold."""
    found = [
        pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]
    for rule in (rule for group in RULES for rule in group["rules"]):
        expression = re.sub(r" [<>] [\d.]+$", "", rule["expr"]) if "alert" in rule else rule["expr"]
        found.append(pytest.param(expression, id=rule.get("alert") or rule["record"]))
    return found


def asked(stack: Stack, path: str, **parameters: str) -> Any:
    """What Prometheus answers."""
    answer = get(f"{stack.prometheus.url}/api/v1/{path}?{urlencode(parameters)}")
    assert answer.status == 200, answer.body
    return answer.json["data"]


def values(stack: Stack, query: str) -> list[str]:
    """Of all series, but those that are no number."""
    return [
        series["value"][1] for series in asked(stack, "query", query=query)["result"] if series["value"][1] != "NaN"
    ]


def test_the_router_has_both_workers(stack: Stack) -> None:
    """By the names that its file has for them."""
    wait_until(lambda: get(stack.router.url + "/ready").json == {"workers": 2}, DATA_SECONDS, "two workers")


def test_every_command_of_a_profile_that_runs_here_was_started(stack: Stack) -> None:
    """All but the engines', which need a GPU, and Grafana, which has no command."""
    running = {service.name for service in (stack.router, *stack.workers, stack.prometheus)}
    rest = {name for name in SERVICES if name not in running}
    assert {profile for name in rest for profile in SERVICES[name].get("profiles", ["none"])} == {
        "vllm",
        "sglang",
        "none",
    }
    assert [name for name in rest if "profiles" not in SERVICES[name]] == ["grafana"]
    assert "command" not in SERVICES["grafana"]


def test_the_health_check_tells_a_router_that_is_well(stack: Stack, image: Image) -> None:
    """Its command ends with 0 where somebody answers, and else not."""
    check = json.loads(last_instruction("HEALTHCHECK").rest.partition("CMD ")[2])
    for port, well in ((stack.router.port, True), (stack.workers[0].port, True), (9, False)):
        command = [word.replace(":8000/", f":{port}/") for word in check]
        done = subprocess.run(command, env=image.environment, capture_output=True, timeout=60, check=False)
        assert (done.returncode == 0) == well, done.stderr


def test_prometheus_scrapes_the_router(stack: Stack) -> None:
    """Its one target is up, and nothing is wrong with what it reads there."""

    def targets() -> list[tuple[str, str]]:
        return [(target["health"], target["lastError"]) for target in asked(stack, "targets")["activeTargets"]]

    wait_until(lambda: targets() == [("up", "")], DATA_SECONDS, "the target is up")


@pytest.mark.parametrize("query", queries())
def test_every_query_has_data(query: str, loaded: Stack) -> None:
    """A panel draws something, and a rule has something to compare."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    deadline = time.monotonic() + DATA_SECONDS
    while not values(loaded, query):
        assert time.monotonic() < deadline, f"no data: {query}"
        time.sleep(0.2)


def test_every_rule_is_well(loaded: Stack) -> None:
    """Prometheus evaluates each of them without an error, templates included."""

    def health() -> set[str]:
        return {rule["health"] for group in asked(loaded, "rules")["groups"] for rule in group["rules"]}

    wait_until(lambda: "unknown" not in health(), DATA_SECONDS, "every rule was evaluated")
    assert health() == {"ok"}


def test_the_metrics_are_named_as_is_usual(loaded: Stack, promtool: str) -> None:
    """Prometheus finds nothing to say about names, units, help and kinds."""
    told = get(loaded.router.url + "/metrics").body
    done = subprocess.run([promtool, "check", "metrics"], input=told, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "command",
    [("check", "config", "deploy/prometheus/prometheus.yml"), ("test", "rules", "tests/deploy/alerts.yml")],
    ids=["configuration", "alerts"],
)
def test_promtool_is_content(command: tuple[str, ...], promtool: str) -> None:
    """The files are valid; every alert fires in trouble, not before its time, and never on an ordinary day."""
    done = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried(rules: Path) -> None:
    """The file of trouble expects each of them."""
    named = {
        rule["alert"]
        for group in yaml.safe_load(rules.read_text("utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    tried = (Path(__file__).parent / "alerts.yml").read_text("utf-8")
    assert [name for name in named if f'alertname="{name}"' not in tried] == []
