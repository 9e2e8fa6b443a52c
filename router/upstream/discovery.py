"""Finds workers: by the addresses that a host name has, and in a file; looks again and again.

Whatever cannot be looked up or read changes nothing: what was found last counts.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, TypeAdapter, ValidationError

from router.config.settings import WorkerAddress, distinct
from router.config.sources import read_yaml, refusal
from router.errors import ConfigError
from router.runtime.atomic_file import FileVersion, file_version
from router.runtime.periodic import PeriodicTask

log = logging.getLogger(__name__)

WARN_SECONDS: Final = 60.0
"""Seconds between two lines in the log about a source that cannot be used."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes host and port; gives the addresses. Raises OSError where there are none."""
Workers = tuple[WorkerAddress, ...]
_WORKERS: Final = TypeAdapter(Annotated[Workers, AfterValidator(distinct)])


async def resolve(host: str, port: int) -> Sequence[str]:
    """By the event loop's resolver: a host's IPv4 addresses, or where it has none, those of IPv6.

    Not both: a host that has one of each is one worker.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {family: [str(at[0]) for of, *_, at in found if of == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []


class WorkerSource(Protocol):
    """Where workers are named."""

    name: str

    async def read(self) -> Workers | None:
        """Those named now; None where that has not changed. Raises OSError or ConfigError where it cannot be told."""


class DnsSource:
    """The addresses of one host name, each of which is a worker."""

    def __init__(self, url: str, resolve: Resolve) -> None:
        parts = urlsplit(url)
        self.name = url
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._resolve = resolve

    async def read(self) -> Workers:
        """See `WorkerSource`."""
        return tuple(self._worker(address) for address in sorted(set(await self._resolve(self._host, self._port))))

    def _worker(self, address: str) -> WorkerAddress:
        at = f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"
        # A scope like fe80::1%eth0 is of this machine alone, and no part of a name.
        id_ = f"{address.partition('%')[0]}:{self._port}"
        return WorkerAddress(url=f"http://{at}", id=id_)


class FileSource:
    """A YAML file with a list of workers; read where it is another one than before (see `file_version`)."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.name = str(path)
        self._path = path
        self._version: FileVersion = None
        self._was_read = False

    async def read(self) -> Workers | None:
        """See `WorkerSource`; a file with a mistake is told of once, until it changes again."""
        seen = await asyncio.to_thread(file_version, self._path)
        if self._was_read and seen == self._version:
            return None
        self._was_read, self._version = True, seen
        return await asyncio.to_thread(read_workers, self._path)


def read_workers(path: Path) -> Workers:
    """The workers that a file lists. Raises ConfigError, with one line that does not repeat any key."""
    document = read_yaml(str(path))
    if document is None:  # as it may be while it is written
        raise ConfigError(f"{path}: empty; [] is a list of no workers")
    try:
        return _WORKERS.validate_python(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {refusal(error)}") from None


class Discovery(PeriodicTask):
    """Looks at every source as long as the context is entered, and tells what each one names."""

    def __init__(self, sources: Iterable[WorkerSource], tell: Callable[[str, Workers], None], interval: float) -> None:
        """`interval`: seconds between two looks."""
        super().__init__(interval)
        self._sources = list(sources)
        self._on_workers = tell
        self._warned_at: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Look once, so that the first call finds the workers; then keep looking."""
        await self._run_once()
        return await super().__aenter__()

    async def _run_once(self) -> None:
        await asyncio.gather(*(self._read(source) for source in self._sources))

    async def _read(self, source: WorkerSource) -> None:
        try:
            workers = await source.read()
        except (OSError, UnicodeError, ConfigError) as error:
            self._warn(source.name, error)
        else:
            if workers is not None:
                self._on_workers(source.name, workers)

    def _warn(self, name: str, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(error, ConfigError) or now >= self._warned_at.get(name, -WARN_SECONDS) + WARN_SECONDS:
            self._warned_at[name] = now
            told = str(error) if isinstance(error, ConfigError) else f"{name}: {error}"
            log.warning("%s; the workers stay as they were", told)
