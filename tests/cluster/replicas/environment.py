"""`python -m tests.cluster.replicas.environment`: gets a Valkey or Redis server, nginx and HAProxy, as
`tests.deploy.environment` gets Prometheus: those on the path, or else Debian's packages, unpacked into `.venv` and not
installed.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.deploy.environment import ROOT, CannotGetError, unpack

FOLDER: Final = ROOT / ".venv" / "cluster"
STORE: Final = ("valkey-server", "redis-server")
"""The names of a store's program."""
PROGRAMS: Final[Mapping[Sequence[str], Sequence[str]]] = {
    STORE: ("redis-server", "redis-tools", "libjemalloc2", "liblzf1"),
    ("nginx",): ("nginx",),
    ("haproxy",): ("haproxy", "liblua5.3-0", "libopentracing1", "libopentracing-c-wrapper0"),
}
"""Debian's packages of each program. Redis' server is a link to a program of the tools; the libraries are what they
need besides the usual ones."""


def program(names: Sequence[str]) -> Path | None:
    """Return the path of the first of these programs that is there, or None."""
    for name in names:
        unpacked = [FOLDER / "usr" / folder / name for folder in ("bin", "sbin")]
        if found := shutil.which(name):
            return Path(found)
        if there := [path for path in unpacked if path.exists()]:
            return there[0]
    return None


def library_path() -> Mapping[str, str]:
    """Return what the environment needs besides, so that unpacked programs find their libraries."""
    folders = [str(folder) for folder in (FOLDER / "usr" / "lib").glob("*") if folder.is_dir()]
    return {"LD_LIBRARY_PATH": ":".join(folders)}


def main() -> int:
    """Get what is missing, and return the exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        for names, packages in PROGRAMS.items():
            if program(names) is None:
                with TemporaryDirectory() as made:
                    unpack(packages, Path(made), FOLDER)
    except CannotGetError as reason:
        print(f"cluster environment: {reason}", file=sys.stderr)
        return 1
    print("cluster environment:", *(program(names) for names in PROGRAMS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
