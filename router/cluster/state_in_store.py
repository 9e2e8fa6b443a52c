"""The scheduler's state in the store of the cluster, instead of in a file.

The state is a list of pieces. Each is stored under a digest of what it says, and a manifest lists the digests in order;
so a save sends only the pieces that are new since the one before. A save counts only while the leader's epoch is the
highest that is stored: what another leader has restored is changed by nobody else.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from router.cluster.store import ClusterStore, SavedElsewhere, SaveRefused, StoreUnreachable
from router.persistence.state_file import (
    FORMAT,
    SavedState,
    StateHeader,
    StateLine,
    decode_lines,
    encode,
    encode_header,
    format_of,
)
from router.runtime.periodic import PeriodicTask

log = logging.getLogger(__name__)

SAVE_SECONDS: Final = 1.0
"""Seconds between two saves."""
DIGEST_BYTES: Final = 16


class StateManifest(msgspec.Struct, frozen=True):
    """What a stored state consists of."""

    header: bytes
    """As in a state file."""
    pieces: tuple[str, ...]
    """The digests of its pieces, in order."""


def stored_state(found: Mapping[str, bytes]) -> SavedState | None:
    """Return the state of what `ClusterStore.load` returns; None if it is empty. Raises ValueError if it is damaged."""
    if "manifest" not in found:
        return None
    manifest = msgspec.msgpack.decode(found["manifest"], type=StateManifest)
    missing = [name for name in manifest.pieces if name not in found]
    if missing:
        raise ValueError(f"{len(missing)} of its pieces are missing")
    return decode_lines(manifest.header, [found[name] for name in manifest.pieces])


def is_newer(manifest: bytes | None) -> bool:
    """Return whether a stored state is one of a newer router, which this one cannot go on with."""
    if manifest is None:
        return False
    try:
        return format_of(msgspec.msgpack.decode(manifest, type=StateManifest).header) > FORMAT
    except ValueError:  # it is damaged, which `stored_state` reports
        return False


class StateInStore(PeriodicTask):
    """Saves the state once a second while its context is entered, and once more at the end.

    What clients were charged is saved each time. What workers have cached is only predicted from, and is saved more
    rarely.
    """

    def __init__(
        self,
        store: ClusterStore,
        epoch: int,
        accounts: Callable[[], Iterable[StateLine]],
        caches: Callable[[], Iterator[StateLine]],
        header: Callable[[], StateHeader],
        cache_seconds: float,
        on_saved: Callable[[], None],
    ) -> None:
        """`epoch`: of this leader; `accounts` and `caches` return the pieces, those of the accounts as of one moment.

        `cache_seconds`: between two saves of the caches; `on_saved` is called after each save.
        """
        super().__init__(SAVE_SECONDS)
        self._store = store
        self._epoch = epoch
        self._accounts = accounts
        self._caches = caches
        self._header = header
        self._cache_seconds = cache_seconds
        self._on_saved = on_saved
        self._cached_at: float | None = None
        self._cache_pieces: dict[str, bytes] = {}
        self._lines: dict[tuple[type, int], tuple[StateLine, str, bytes]] = {}
        """The lines of the accounts in the last save, each with its piece, by the type of that and its place among
        those of the type. It takes less to see that a piece is the same than to encode it again."""
        self._version = ""
        """The version that is stored; empty if that is not known."""
        self._stored: frozenset[str] = frozenset()
        """The pieces of this version."""
        self._saves = 0
        self._saving = asyncio.Lock()
        """Held during a save: with two at once, the older state could be stored last, and fronts told of the newer."""
        self.failing = False
        """Whether the last save failed."""
        self.failures = 0
        self.saved_at: float | None = None
        """When the last save began that did not fail, as `time.monotonic` counts; None before the first."""
        self.retired = False
        """Whether another leads, so that this leader saves no more."""

    async def __aexit__(self, *leaving: object) -> None:
        """Stop, then save the state once more."""
        await super().__aexit__(*leaving)
        await self.save()

    async def save(self) -> None:
        """Save the state now, unless another leads."""
        async with self._saving:
            if not self.retired:
                await self._save()

    async def _run_once(self) -> None:
        await self.save()

    async def _save(self) -> None:
        began = time.monotonic()
        pieces: dict[str, bytes] = {}
        lines: dict[tuple[type, int], tuple[StateLine, str, bytes]] = {}
        places = Counter[type]()
        for piece in self._accounts():
            place = type(piece), places[type(piece)]
            places[type(piece)] += 1
            known = self._lines.get(place)
            line = lines[place] = known if known is not None and known[0] == piece else (piece, *_named(piece))
            pieces[line[1]] = line[2]
            await asyncio.sleep(0)
        self._lines = lines
        pieces |= await self._cached(began)
        try:
            await self._store_pieces(pieces)
        except SaveRefused:
            self._fail("a higher epoch is stored, or the store has lost its data")
        except StoreUnreachable as error:
            self._version = ""  # nobody knows whether the store has taken it
            self._fail(str(error))
        else:
            self.failing, self.saved_at = False, began
            self._on_saved()

    async def _cached(self, now: float) -> Mapping[str, bytes]:
        if self._cached_at is None or now - self._cached_at >= self._cache_seconds:
            self._cached_at, found = now, dict[str, bytes]()
            for piece in self._caches():
                name, line = _named(piece)
                found[name] = line
                await asyncio.sleep(0)
            self._cache_pieces = found
        return self._cache_pieces

    async def _store_pieces(self, pieces: Mapping[str, bytes]) -> None:
        manifest = msgspec.msgpack.encode(StateManifest(encode_header(self._header()), tuple(pieces)))
        self._saves += 1
        version, names = f"{self._epoch}.{self._saves}", frozenset(pieces)
        gone = sorted(self._stored - names)
        new = {name: pieces[name] for name in pieces if name not in self._stored}
        try:
            if not self._version:
                raise SavedElsewhere
            await self._store.save(self._epoch, self._version, version, manifest, gone, new)
        except SavedElsewhere:
            await self._store.save(self._epoch, "", version, manifest, (), pieces)
        self._version, self._stored = version, names

    def _fail(self, reason: str) -> None:
        if not self.failing:
            log.error("the state cannot be saved in the cluster's store: %s", reason)
        self.failing = True
        self.failures += 1


def _named(piece: StateLine) -> tuple[str, bytes]:
    """Return what a piece says with its digest. One that says the same as another is needed once."""
    line = encode(piece)
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).hexdigest(), line
