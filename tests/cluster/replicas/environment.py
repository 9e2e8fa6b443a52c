"""`python -m tests.cluster.replicas.environment`: gets a Valkey or Redis server, as `tests.deploy.environment` gets
Prometheus: the one on the path, or else Debian's package, unpacked into `.venv` and not installed.
"""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.deploy.environment import ROOT, CannotGetError, unpack

FOLDER: Final = ROOT / ".venv" / "cluster"
SERVERS: Final = ("valkey-server", "redis-server")
PACKAGES: Final = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
"""The server is a link to a program of the tools; the libraries are what these need besides the usual ones."""


def store_server() -> Path | None:
    """Return the path of a server, or None if there is none."""
    for name in SERVERS:
        unpacked = FOLDER / "usr" / "bin" / name
        found = shutil.which(name)
        if found or unpacked.exists():
            return Path(found) if found else unpacked
    return None


def store_environment() -> Mapping[str, str]:
    """Return what the environment needs besides, so that the server finds its libraries."""
    folders = [str(folder) for folder in (FOLDER / "usr" / "lib").glob("*") if folder.is_dir()]
    return {"LD_LIBRARY_PATH": ":".join(folders)}


def main() -> int:
    """Get the server, and return the exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory() as made:
            if store_server() is None:
                unpack(PACKAGES, Path(made), FOLDER)
    except CannotGetError as reason:
        print(f"cluster environment: {reason}", file=sys.stderr)
        return 1
    print(f"cluster environment: {store_server()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
