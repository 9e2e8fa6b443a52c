"""The version of the router before this one, from the history of the repository."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from router.channel.codec import channel_version
from router.persistence.state_file import FORMAT
from tests.deploy.environment import ROOT

SCHEMA: Final = ("router/channel", "router/core/model", "router/persistence/state_file.py")
"""Where messages and state are defined. Only a commit that changes these can change their version."""
MOST_COMMITS: Final = 40
ASKED: Final = (
    "from router.channel.codec import channel_version; from router.persistence.state_file import FORMAT;"
    " print(channel_version(), FORMAT)"
)
"""The program that prints the versions of messages and state."""


class NoHistoryError(Exception):
    """The repository does not have the version before, as after a shallow clone."""


def version_before(folder: Path) -> Path:
    """Unpack the last version whose messages or state are of another version into this folder.

    Returns where its code is. Raises NoHistoryError.
    """
    own = f"{channel_version()} {FORMAT}"
    for commit in _commits():
        source = folder / commit[:12]
        source.mkdir()
        _unpack(f"{commit}~1", source)
        asked = subprocess.run(
            [sys.executable, "-c", ASKED],
            cwd=source,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        if asked.stdout.strip() != own:
            return source
    raise NoHistoryError(f"the last {MOST_COMMITS} commits of {', '.join(SCHEMA)} have no other version")


def _commits() -> Iterator[str]:
    """Yield the last commits that may have changed the version, the newest first. Raises NoHistoryError."""
    yield from _git("log", f"-{MOST_COMMITS}", "--format=%H", "--", *SCHEMA).decode().split()


def _unpack(commit: str, folder: Path) -> None:
    archive = folder / "code.tar"
    archive.write_bytes(_git("archive", commit, "router", "workers", "pyproject.toml"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()


def _git(*words: str) -> bytes:
    """Return what git prints. Raises NoHistoryError if it cannot."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, timeout=300, check=True).stdout
    except OSError as error:
        raise NoHistoryError(f"there is no git: {error}") from None
    except subprocess.CalledProcessError as error:
        raise NoHistoryError(f"git {' '.join(words)}: {error.stderr.decode().strip()}") from None
