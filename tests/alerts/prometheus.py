"""A real Prometheus with the project's configuration and rules, in which a minute lasts two seconds.

Alerts speak of minutes. `shortened` divides every `for:` and every window in the rules by `FACTOR`, all alike, and
leaves thresholds, expressions and labels as they are. Prometheus scrapes and evaluates every second, so that the
shortest window, of a minute, still holds two samples.
"""

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx
import yaml

from tests.deploy.environment import program
from tests.engine.processes import Server
from tests.engine.wire import get
from tests.support.dockerfile import ROOT

FACTOR: Final = 30
FOLDER: Final = ROOT / "deploy" / "prometheus"
DURATION: Final = re.compile(r"(?:(?<=for: )|(?<=\[))(\d+)([smh])\b")
SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


def shortened(rules: str) -> str:
    """Return the rules with every duration divided by `FACTOR`."""
    return DURATION.sub(lambda found: f"{int(found[1]) * SECONDS[found[2]] // FACTOR}s", rules)


class Prometheus(Server):
    """Prometheus at a free port, with one target."""

    def __init__(self, folder: Path, target: str) -> None:
        """`target`: host and port of the router."""
        self._file = folder / "prometheus.yml"
        rules = (FOLDER / "rules.yml").read_text("utf-8")
        (folder / "rules.yml").write_text(shortened(rules), "utf-8")
        self.set_targets([target])
        command = [str(program("prometheus")), f"--config.file={self._file}", f"--storage.tsdb.path={folder}/data"]
        command += ["--web.enable-lifecycle", "--web.listen-address=127.0.0.1:{port}"]
        super().__init__("prometheus", command, {}, folder / "prometheus.log")

    def set_targets(self, targets: list[str]) -> None:
        """Write the configuration. A Prometheus that runs reads it at `reload`."""
        configuration: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
        configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        self._file.write_text(yaml.safe_dump(configuration), "utf-8")

    def reload(self) -> None:
        """Read the configuration again."""
        httpx.post(f"{self.url}/-/reload", trust_env=False).raise_for_status()

    def _data(self, path: str) -> Any:
        return get(f"{self.url}/api/v1/{path}").json["data"]

    def scrapes(self) -> bool:
        """Return whether the router has been scraped without an error."""
        targets = self._data("targets")["activeTargets"]
        return [target["health"] for target in targets] == ["up"]

    def holds(self, query: str) -> bool:
        """Return whether a query has a result."""
        return bool(self._data("query?" + urlencode({"query": query}))["result"])

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that are pending or firing, with their labels, state and value."""
        found: list[dict[str, Any]] = self._data("alerts")["alerts"]
        return found

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self.alerts() if alert["state"] == "firing"}
