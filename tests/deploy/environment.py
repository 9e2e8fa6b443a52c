"""Get what the tests of the deployment need beside the project's own environment. Standard library only.

Prometheus: the one on the path, or else Debian's package, unpacked into `.venv` and not installed, which needs no root.
The compose specification's JSON schema: out of the last docker-compose that was written in Python. It is a description
of data and older than the specification, so a file that it accepts is accepted by any compose of today.
"""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv" / "deploy"
SCHEMA: Final = FOLDER / "compose_spec.json"
COMPOSE: Final = "docker-compose==1.29.2"
IN_WHEEL: Final = "compose/config/compose_spec.json"


class CannotGetError(Exception):
    """Something cannot be had on this machine; the message says what and why in one line."""


def program(name: str) -> Path | None:
    """Where prometheus or promtool is; None where it is not."""
    unpacked = FOLDER / "usr" / "bin" / name
    found = shutil.which(name)
    return unpacked if unpacked.exists() else Path(found) if found else None


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Raises CannotGetError with the last that a command said, where it fails or is not there."""
    try:
        done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotGetError(f"there is no {command[0]} here") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise CannotGetError(f"{command[0]} {command[-1]} failed: {said[-1]}")


def get_prometheus(folder: Path) -> None:
    """Unpack Debian's package; with lists of packages of our own where the machine's do not have it."""
    try:
        run(["apt-get", "download", "prometheus"], folder)
    except CannotGetError:
        for needed in ("state/lists/partial", "cache/archives/partial"):
            (folder / needed).mkdir(parents=True)
        own = [f"-oDir::State={folder}/state", f"-oDir::Cache={folder}/cache"]
        own += ["-oDir::State::status=/var/lib/dpkg/status", "-oAPT::Sandbox::User="]
        run(["apt-get", *own, "update"], folder)
        run(["apt-get", *own, "download", "prometheus"], folder)
    (package,) = folder.glob("prometheus_*.deb")
    run(["dpkg-deb", "-x", package, FOLDER], folder)


def get_schema(folder: Path) -> None:
    """Take it out of the wheel, of which nothing else is used."""
    run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, COMPOSE], folder)
    (wheel,) = folder.glob("docker_compose-*.whl")
    SCHEMA.write_bytes(zipfile.ZipFile(wheel).read(IN_WHEEL))


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory() as made:
            if program("prometheus") is None or program("promtool") is None:
                get_prometheus(Path(made))
            if not SCHEMA.exists():
                get_schema(Path(made))
    except CannotGetError as reason:
        print(f"deploy environment: {reason}", file=sys.stderr)
        return 1
    print(f"deploy environment: {program('prometheus')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
