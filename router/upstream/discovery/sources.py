"""Finds workers by the addresses of a host name and in a file, and repeats this periodically.

A failed lookup or an unreadable file changes nothing: the workers found last stay.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, TypeAdapter, ValidationError

from router.config.addresses import WorkerAddress, distinct
from router.config.sources import read_yaml, refusal
from router.errors import ConfigError
from router.runtime.atomic_file import FileVersion, file_version
from router.runtime.periodic import PeriodicTask

log = logging.getLogger(__name__)

WARN_SECONDS: Final = 60.0
"""Least time between two log lines about a source that cannot be looked up."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes host and port and returns the addresses. Raises OSError if there are none."""
Workers = tuple[WorkerAddress, ...]
_WORKERS: Final = TypeAdapter(Annotated[Workers, AfterValidator(distinct)])


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return a host's IPv4 addresses or, if it has none, its IPv6 addresses, by the event loop's resolver.

    Never both: a host with one address of each kind is one worker.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {family: [str(at[0]) for of, *_, at in found if of == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []


class WorkerSource(Protocol):
    """A place that names workers."""

    name: str

    async def read(self) -> Workers | None:
        """Return the workers named now; None if they have not changed. Raises OSError or ConfigError on failure."""


class DnsSource:
    """The addresses of one host name, each of which is a worker."""

    def __init__(self, url: str, resolve: Resolve) -> None:
        parts = urlsplit(url)
        self.name = url
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._resolve = resolve

    async def read(self) -> Workers:
        return tuple(self._worker(address) for address in sorted(set(await self._resolve(self._host, self._port))))

    def _worker(self, address: str) -> WorkerAddress:
        at = f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"
        # A scope as in fe80::1%eth0 is meaningful on this machine only and does not belong in an id.
        id_ = f"{address.partition('%')[0]}:{self._port}"
        return WorkerAddress(url=f"http://{at}", id=id_)


class FileSource:
    """A YAML file with a list of workers, read again when it has changed (see `file_version`)."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._version: FileVersion = None
        self._was_read = False

    async def read(self) -> Workers | None:
        """Read the file if it has changed. A file with a mistake raises ConfigError once per version of the file."""
        version = await asyncio.to_thread(file_version, self._path)
        if self._was_read and version == self._version:
            return None
        self._was_read, self._version = True, version
        return await asyncio.to_thread(read_workers, self._path)


def read_workers(path: Path) -> Workers:
    """Return the workers that a file lists. Raises ConfigError, in one line that does not repeat any key."""
    document = read_yaml(str(path))
    if document is None:  # a file may be empty for a moment while it is being written
        raise ConfigError(f"{path}: empty; [] is a list of no workers")
    try:
        return _WORKERS.validate_python(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {refusal(error)}") from None


class Discovery(PeriodicTask):
    """Reads every source periodically while the context is entered, and reports the workers that each names."""

    def __init__(
        self, sources: Iterable[WorkerSource], on_workers: Callable[[str, Workers], None], interval: float
    ) -> None:
        """`interval`: seconds between two readings; `on_workers` takes a source's name and its workers."""
        super().__init__(interval)
        self._sources = list(sources)
        self._on_workers = on_workers
        self._warned_at: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Read all sources once, so that the first call finds the workers; then repeat periodically."""
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
            message = str(error) if isinstance(error, ConfigError) else f"{name}: {error}"
            log.warning("%s; the workers stay as they were", message)
