"""The folder of the sockets between the processes of one router.

Its supervisor removes it in the end. One that is killed cannot, so the next start on this machine does: the supervisor
holds a lock on a file in its folder, and the kernel takes the lock from it when it dies.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from router.errors import ConfigError

LONGEST_FOLDER: Final = 96
"""Bytes of the path of the folder of sockets. The kernel takes 107 for that of a socket, macOS 103."""
PREFIX: Final = "d2lpm-"
LOCKED_FILE: Final = "owner"


@contextmanager
def socket_folder(parent: str | None = None) -> Iterator[str]:
    """Create a folder that only this user can enter, and remove it in the end. Removes those of dead routers too.

    `parent`: where; None for the usual place of temporary folders. Raises ConfigError.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"there is no folder for the sockets between the processes: {error.strerror}") from None
    with folder as path:
        if len(os.fsencode(path)) > LONGEST_FOLDER:
            raise ConfigError(f"{path} is too long for the sockets between the processes: set TMPDIR to a shorter path")
        with _locked(path):
            _remove_left(os.path.dirname(path))
            yield path


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder, if files can be locked there: without a locked file, no start removes the folder."""
    name = os.path.join(folder, LOCKED_FILE)
    with open(f"{name}.new", "wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(file.name, name)  # locked before others find it
        yield


def _remove_left(parent: str) -> None:
    """Remove the folders of this user's routers that have died."""
    with os.scandir(parent) as entries:
        left = [entry.path for entry in entries if entry.name.startswith(PREFIX) and _is_own(entry)]
    for folder in left:
        with suppress(OSError), open(os.path.join(folder, LOCKED_FILE), "rb") as file:  # no such file: not known whose
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:  # it has gone meanwhile
        return False
