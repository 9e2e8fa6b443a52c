"""Runs the services of docker-compose.yml as processes, by their own commands, at free ports of this machine."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.engine.processes import Server, free_ports
from tests.support.dockerfile import ROOT

from .environment import program
from .image import Image

SERVICES: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
INTERVAL: Final = re.compile(r"((?:scrape|evaluation)_interval): \w+")
DEFAULT: Final = re.compile(r"\$\{\w+:-([^}]*)\}")
"""A variable of compose that is not set, with its default."""


class Service(Server):
    """One service of docker-compose.yml, as a process."""

    def __init__(self, name: str, image: Image, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        """Prepare the service. Call `place` before `start`: its files may name the other services."""
        self._service = SERVICES[name]
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        ours = "build" in self._service
        self.admin_port = free_ports(1)
        """Where operators reach the router."""
        here = {"D2LPM_HOST": "127.0.0.1", "D2LPM_PORT": "{port}", "D2LPM_ADMIN_PORT": str(self.admin_port)}
        port = here if name == "router" else {}
        variables = {**(image.environment if ours else {}), **port, "PYTHONPATH": "", **(environment or {})}
        entrypoint = self._service.get("entrypoint", image.entrypoint if ours else [str(program(name))])
        words = [DEFAULT.sub(r"\1", word) for word in [*entrypoint, *self._service["command"]]]
        super().__init__(name, self._command_here(words), variables, self._folder / "log", self._folder)

    def place(self, others: Iterable["Service"]) -> None:
        """Copy the mounted files, with the other services' addresses here and with short intervals."""
        addresses = {rf"{other.name}:(?!9000)\d+": f"127.0.0.1:{other.port}" for other in others}
        addresses |= {f"{other.name}:9000": f"127.0.0.1:{other.admin_port}" for other in others}
        for source, target in self._mounts():
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_here(source.read_text("utf-8"), addresses), "utf-8")
            for file in source.rglob("*"):
                if file.is_file():
                    copied = target / file.relative_to(source)
                    copied.parent.mkdir(parents=True, exist_ok=True)
                    copied.write_text(_here(file.read_text("utf-8"), addresses), "utf-8")

    @property
    def admin_url(self) -> str:
        """The URL at which operators reach the router."""
        return f"http://127.0.0.1:{self.admin_port}"

    def _mounts(self) -> Iterable[tuple[Path, Path]]:
        """Yield each mounted file or folder of the project, and its place here."""
        for mount in self._service.get("volumes", []):
            source, target, *_ = mount.split(":")
            if source.startswith("./"):
                yield ROOT / source, self._folder / target.lstrip("/")

    def _command_here(self, words: list[str]) -> list[str]:
        targets = [mount.split(":")[1] for mount in self._service.get("volumes", [])]
        for target in targets:
            words = [re.sub(rf"(^|=)(?={target}\b)", rf"\1{self._folder}", word) for word in words]
        if "--port" in words:
            at = words.index("--port")
            words[at + 1] = "{port}"
            words[words.index("--host") + 1] = "127.0.0.1"
        if self._service["image"].startswith("prom/"):
            words.append("--web.listen-address=127.0.0.1:{port}")
        return words


def _here(text: str, addresses: Mapping[str, str]) -> str:
    """Return a configuration with addresses of this machine, and with intervals short enough for a test."""
    for named, address in addresses.items():
        text = re.sub(rf"(?<![\w-]){named}", address, text)
    return INTERVAL.sub(r"\1: 500ms", text)
