"""Gets what the deployment tests need beside the project's own environment. Standard library only.

Prometheus: the one on the path, or else Debian's package, unpacked into `.venv` and not installed, so that root is
not needed.
The compose specification's JSON schema: from the last docker-compose that was written in Python. The schema only
describes data and is older than the specification, so any compose of today accepts a file that the schema accepts.
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
    """Something is not available on this machine. The message says what and why in one line."""


def program(name: str) -> Path | None:
    """Return the path of prometheus or promtool, or None if it is missing."""
    unpacked = FOLDER / "usr" / "bin" / name
    found = shutil.which(name)
    return unpacked if unpacked.exists() else Path(found) if found else None


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Run a command. Raises CannotGetError with its last line of output if it fails or is missing."""
    try:
        done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotGetError(f"there is no {command[0]} here") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise CannotGetError(f"{command[0]} {command[-1]} failed: {said[-1]}")


def unpack(packages: Sequence[str], folder: Path, target: Path) -> None:
    """Unpack Debian's packages into `target`. If the machine's package lists lack one, fetch lists into `folder` first.

    `folder`: an empty one, which is of no use afterwards.
    """
    try:
        run(["apt-get", "download", *packages], folder)
    except CannotGetError:
        for needed in ("state/lists/partial", "cache/archives/partial"):
            (folder / needed).mkdir(parents=True)
        own = [f"-oDir::State={folder}/state", f"-oDir::Cache={folder}/cache"]
        own += ["-oDir::State::status=/var/lib/dpkg/status", "-oAPT::Sandbox::User="]
        run(["apt-get", *own, "update"], folder)
        run(["apt-get", *own, "download", *packages], folder)
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", package, target], folder)


def get_schema(folder: Path) -> None:
    """Take the schema out of docker-compose's wheel. Nothing else of the wheel is used."""
    run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, COMPOSE], folder)
    (wheel,) = folder.glob("docker_compose-*.whl")
    SCHEMA.write_bytes(zipfile.ZipFile(wheel).read(IN_WHEEL))


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory() as made:
            if program("prometheus") is None or program("promtool") is None:
                unpack(["prometheus"], Path(made), FOLDER)
            if not SCHEMA.exists():
                get_schema(Path(made))
    except CannotGetError as reason:
        print(f"deploy environment: {reason}", file=sys.stderr)
        return 1
    print(f"deploy environment: {program('prometheus')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
