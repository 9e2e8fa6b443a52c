"""A file that is replaced in one step: whoever reads it sees all of the old one or all of the new one."""

import os
from collections.abc import Iterable
from pathlib import Path

FileVersion = tuple[int, int, int] | None
"""By which a file that was changed or replaced is told from what it was; None where there is none."""


def replace_file(path: Path, blocks: Iterable[bytes]) -> None:
    """Put these bytes in the place of what is there, with mode 0600; they are on the disk when this returns.

    Raises OSError, and then the old file stays.
    """
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    # A new file always: a symbolic link that somebody puts there is not followed.
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
    """What the file is now, for whoever looks whether it is another one later."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
