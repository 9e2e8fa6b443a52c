"""The rules of Prometheus, the Grafana dashboard and the operations manual agree with the metrics of the code."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.metric_table import OPERATIONS, metrics, samples, table, table_in_document
from tests.support.running import running_router

ROOT: Final = Path(__file__).parents[2]
DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "deploy/grafana/dashboards/d2lpm.json").read_text("utf-8"))
PANELS: Final = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
GROUPS: Final = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text("utf-8"))["groups"]
RULES: Final = [rule for group in GROUPS for rule in group["rules"]]
ALERTS: Final = [rule for rule in RULES if "alert" in rule]
RECORDINGS: Final = [rule for rule in RULES if "record" in rule]
RECORDED: Final = [rule["record"] for rule in RECORDINGS]
QUERIES: Final = [target["expr"] for panel in PANELS for target in panel["targets"]]
LABELS: Final[dict[str, set[str]]] = {
    **{metric.name: {*metric._labelnames, "instance"} for metric in metrics()},
    **{f"{metric.name}_total": {*metric._labelnames, "instance"} for metric in metrics()},
    **{rule["record"]: set(re.findall(r"\w+", rule["expr"].split(" by (")[-1].split(")")[0])) for rule in RECORDINGS},
}
"""The labels of each metric, and those by which each recording sums."""
NAME: Final = re.compile(r"(?:\w+:)?d2lpm[_:][\w:]+")
"""The name of a metric or of a recording rule."""


def read(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expression)))


def test_the_dashboard_file_is_the_output_of_its_program() -> None:
    """The file is current; `python deploy/grafana/dashboard.py > deploy/grafana/dashboards/d2lpm.json` renews it."""
    program = [sys.executable, str(ROOT / "deploy/grafana/dashboard.py")]
    made = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout
    assert made == (ROOT / "deploy/grafana/dashboards/d2lpm.json").read_text("utf-8")


def test_the_table_of_metrics_matches_the_code() -> None:
    """The table is current; `python -m tests.support.metric_table` renews it."""
    assert table_in_document() == table()


async def test_the_table_has_every_metric_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every metric that a router exports is in the table, also those of a part that is off by default. Those of a
    cluster come from its leader alone.
    """
    for kind in ("TRACES", "METRICS"):
        monkeypatch.setenv(f"OTEL_{kind}_EXPORTER", "none")
    async with running_router("http://127.0.0.1:9", otel=True) as router, router.http.get("/metrics") as response:
        exported = set(re.findall(r"^# TYPE (\S+)", await response.text(), re.MULTILINE))
    documented = {metric.name + ("_total" if metric.type == "counter" else "") for metric in metrics()}
    assert exported == {name for name in documented if not name.startswith("d2lpm_cluster_")}


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_query_reads_metrics_that_exist(expression: str) -> None:
    """Each name is one of the router's samples or recorded by a rule."""
    assert read(expression) <= {*samples(), *RECORDED}
    assert read(expression) or expression.startswith(("up{", "absent(up{"))


def test_every_recording_rule_is_used() -> None:
    """Each recording is read by a panel or by another rule."""
    used = set().union(*(read(expression) for expression in [*QUERIES, *(rule["expr"] for rule in RULES)]))
    assert [name for name in RECORDED if name not in used] == []


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_is_explained(panel: dict[str, Any]) -> None:
    """Each panel has a title, an explanation, a unit, a name for each line, and queries to the provisioned source."""
    provisioned = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text("utf-8"))
    (source,) = provisioned["datasources"]
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in (panel, *panel["targets"]):
        assert target["datasource"] == {"type": source["type"], "uid": "${datasource}"}
    (choice,) = [choice for choice in DASHBOARD["templating"]["list"] if choice["type"] == "datasource"]
    assert (choice["query"], choice["current"]["value"]) == (source["type"], source["uid"])
    assert all(target["legendFormat"] for target in panel["targets"])
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_is_restricted_to_the_chosen_routers(expression: str) -> None:
    """Each metric of a panel has a matcher for the router, and for the model if it has that label; recordings over all
    routers have none.
    """
    for name, matchers in re.findall(r"(?<![\w:])((?:\w+:)?d2lpm[_:][\w:]+)(\{[^}]*\})?", expression):
        labels = LABELS.get(name, set())
        assert ('instance=~"$instance"' in matchers) == (":" not in name or "instance" in labels), name
        assert ('model=~"$model"' in matchers) == ("model" in labels and "instance" in labels), name


def test_no_two_panels_overlap() -> None:
    """All panels lie within the 24 columns and have unique ids and titles."""
    for panel in DASHBOARD["panels"]:
        assert 0 <= panel["gridPos"]["x"] <= 24 - panel["gridPos"]["w"]
    for one, other in itertools.combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below
    for key in ("id", "title"):
        assert len({panel[key] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_provisioned_folder_is_the_mounted_one() -> None:
    """Grafana looks for dashboards, and for its home page, where the compose file puts them."""
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/d2lpm.yml").read_text("utf-8"))
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]["grafana"]
    folder = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in service["volumes"]
    assert service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/d2lpm.json"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_is_explained_and_can_be_drawn(alert: dict[str, Any]) -> None:
    """An alert compares one expression with one number, and has a duration, a severity, texts and a section in the
    manual, at the anchor that it names.
    """
    assert re.fullmatch(r"[^<>]+ [<>] [\d.]+", alert["expr"])
    assert alert["for"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert (ROOT / path, anchor) == (OPERATIONS, alert["alert"].lower())
    section = OPERATIONS.read_text("utf-8").split(f"\n#### {alert['alert']}\n")[1].split("\n#")[0]
    assert len(section.split()) > 20, "the section says what to look at and what to do"
