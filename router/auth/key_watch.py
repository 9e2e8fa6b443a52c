"""Reads the file of clients again when it is another one than before, while calls go on."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from router.auth.identity import ClientDirectory
from router.auth.keys_file import load
from router.errors import ConfigError
from router.runtime.atomic_file import FileVersion, file_version
from router.runtime.periodic import PeriodicTask

log = logging.getLogger(__name__)

SECONDS: Final = 1.0
"""Between two looks."""


class KeyWatch(PeriodicTask):
    """Looks at the file for as long as the context is entered; without a file, at nothing.

    A call that has been let in is not touched by what is read after that. A file that is wrong is refused with one line
    in the log, and what was read before it stays.
    """

    def __init__(self, path: Path | None, use: Callable[[ClientDirectory], None], every: float = SECONDS) -> None:
        """`use` is given what the file holds: at once, and after each change. Raises ConfigError for a wrong file."""
        super().__init__(every)
        self._path = path
        self._on_change = use
        self._version: FileVersion = None
        if path is not None:
            self._version = file_version(path)
            use(load(path))

    async def reload_if_changed(self) -> None:
        """Read it if it was changed."""
        if self._path is None or (mark := await asyncio.to_thread(file_version, self._path)) == self._version:
            return
        self._version = mark
        try:
            self._on_change(await asyncio.to_thread(load, self._path))
        except ConfigError as error:
            log.error("%s; the clients stay as they were", " ".join(str(error).split()))
        else:
            log.info("%s: read again", self._path)

    async def _run_once(self) -> None:
        await self.reload_if_changed()
