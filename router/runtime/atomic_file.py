"""Atomic replacement of a file: a reader sees either all of the old content or all of the new."""

import os
from collections.abc import Iterable
from pathlib import Path

FileVersion = tuple[int, int, int] | None
"""Modification time in nanoseconds, size and inode: different after a change or replacement. None for no file."""


def replace_file(path: Path, blocks: Iterable[bytes]) -> None:
    """Replace the file's content atomically, with mode 0600. The new content is on disk when this returns.

    Raises OSError on failure; the old file then stays.
    """
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    # O_EXCL creates a new file, so that a symbolic link placed here by an attacker is not followed.
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def file_version(path: Path) -> FileVersion:
    """Return the file's present version, to be compared with a later one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
