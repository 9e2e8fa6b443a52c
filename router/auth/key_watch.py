"""Reloads the clients file when it changes, without interrupting calls."""

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

CHECK_SECONDS: Final = 1.0
"""Time between two checks of the file."""


class KeyWatch(PeriodicTask):
    """Checks the clients file periodically while the context is entered, and reloads it when it has changed.

    Calls that are admitted already are not affected. An invalid file is rejected with one log line, and the clients
    read before stay. Without a file there is nothing to do.
    """

    def __init__(
        self,
        path: Path | None,
        on_change: Callable[[ClientDirectory], None],
        interval: float = CHECK_SECONDS,
        *,
        goes_on: bool = False,
    ) -> None:
        """Load the file and pass its clients to `on_change`, now and after each change.

        `interval`: seconds between two checks; `goes_on`: whether to wait for the next change if the file is invalid
        now, as when a process is started again. Raises ConfigError if the file is invalid now and it does not go on.
        """
        super().__init__(interval)
        self._path = path
        self._on_change = on_change
        self._version: FileVersion = None
        if path is not None:
            self._version = file_version(path)
            try:
                on_change(load(path))
            except ConfigError as error:
                if not goes_on:
                    raise
                log.error("%s; no client is known until the file is corrected", " ".join(str(error).split()))

    async def reload_if_changed(self) -> None:
        """Reload the file if it has changed."""
        if self._path is None or (version := await asyncio.to_thread(file_version, self._path)) == self._version:
            return
        self._version = version
        try:
            self._on_change(await asyncio.to_thread(load, self._path))
        except ConfigError as error:
            log.error("%s; the clients stay as they were", " ".join(str(error).split()))
        else:
            log.info("%s: reloaded", self._path)

    async def _run_once(self) -> None:
        await self.reload_if_changed()
