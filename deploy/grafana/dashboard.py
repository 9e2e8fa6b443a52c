"""Generates the Grafana dashboard: `python deploy/grafana/dashboard.py > deploy/grafana/dashboards/d2lpm.json`."""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any, Final

from panels import ROWS, TOKENS, Panel, Row

PROVISIONED: Final = "prometheus"
"""The id of the data source that deploy/grafana/provisioning sets up: the first choice of the dashboard's variable."""
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
"""Columns of Grafana's grid."""
HEIGHT: Final = 8
"""Height of a panel in rows of Grafana's grid."""
STAT_HEIGHT: Final = 4
"""Height of a panel with one number."""
PER_LINE: Final = 4
"""Most panels beside each other."""
SELECTOR: Final = re.compile(r"(?<![\w:])((?:\w+:)?d2lpm_[\w:]+)(?:\{([^}]*)\})?")
"""A metric or a recording in an expression, with its matchers."""
BY_MODEL: Final = re.compile(r"model:.*:rate5m|d2lpm_(model|queue|request|requests|failed_requests|inter_token)_.*")
"""Metrics and recordings with the label `model`."""


def scoped(expr: str) -> str:
    """Restrict each metric of an expression to the chosen routers, and to the chosen models where it has models.

    Recordings over all routers are left as they are.
    """

    def restricted(match: re.Match[str]) -> str:
        name, given = match[1], match[2]
        matchers = [given] if given else []
        if ":" not in name or name.endswith("_bucket:rate5m") or name == "model:d2lpm_requests:rate5m":
            matchers.append('instance=~"$instance"')
        if BY_MODEL.fullmatch(name):
            matchers.append('model=~"$model"')
        return f"{name}{{{','.join(matchers)}}}" if matchers else name

    return SELECTOR.sub(restricted, expr)


def dashboard(rows: tuple[Row, ...]) -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        position = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": position, "panels": []})
        y += 1
        per_line, height = (len(row.panels), STAT_HEIGHT) if row.panels[0].kind == "stat" else (PER_LINE, HEIGHT)
        for at in range(0, len(row.panels), per_line):
            line = row.panels[at : at + per_line]
            width = WIDTH // len(line)
            for column, panel in enumerate(line):
                position = {"x": column * width, "y": y, "w": width, "h": height}
                panels.append({"id": len(panels) + 1, **drawn(panel), "gridPos": position})
            y += height
    return {
        "uid": "d2lpm",
        "title": "d2lpm-router",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source(), *map(variable, VARIABLES)]},
        "panels": panels,
    }


def drawn(panel: Panel) -> dict[str, Any]:
    """Return one panel without its id and position."""
    axis = {"min": 0} if panel.unit in ("s", "percentunit", "reqps", TOKENS) else {}
    axis_max = {} if panel.axis_max is None else {"max": panel.axis_max}
    defaults = {"unit": panel.unit, "custom": custom(panel), **axis, **axis_max, **thresholds(panel)}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": scoped(query.expr),
                "legendFormat": query.legend,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    "status-history": {
        "showValue": "never",
        "legend": {"displayMode": "list", "placement": "bottom"},
        "rowHeight": 0.9,
    },
}


def custom(panel: Panel) -> dict[str, Any]:
    """Return how the values of a panel are drawn."""
    if panel.kind == "stat":
        return {}
    if panel.kind == "status-history":
        return {"fillOpacity": 90, "lineWidth": 0}
    stacking = {"mode": "normal" if panel.stacked else "none"}
    return {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 40 if panel.stacked else 5, "stacking": stacking}


def thresholds(panel: Panel) -> dict[str, Any]:
    """Return the colours of a panel whose values can alarm: a scale for a heat map, else two colours."""
    if panel.alarming is None:
        return {}
    if panel.kind == "status-history":
        steps = [{"color": "red", "value": None}, {"color": "yellow", "value": 0}, {"color": "green", "value": 1}]
        return {"color": {"mode": "continuous-RdYlGr"}, "thresholds": {"mode": "absolute", "steps": steps}}
    steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.alarming}]
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the page: the values of one label."""

    name: str
    label: str
    metric: str
    """The metric that has the label of this name."""


VARIABLES: Final = (
    Variable("instance", "Router", "d2lpm_build_info"),
    Variable("model", "Model", "d2lpm_requests_total"),
    Variable("client", "Client", "d2lpm_service_tokens_total"),
)


def source() -> dict[str, Any]:
    """Return the variable that selects the data source."""
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": PROVISIONED, "value": PROVISIONED},
    }


def variable(chosen: Variable) -> dict[str, Any]:
    """Return a variable that selects values of a label; all of them at first."""
    return {
        "name": chosen.name,
        "label": chosen.label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({chosen.metric}, {chosen.name})", "refId": chosen.name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    json.dump(dashboard(ROWS), sys.stdout, indent=2)
    print()
