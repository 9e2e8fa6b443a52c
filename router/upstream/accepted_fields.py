"""Which fields that the router adds to a call a worker accepts: by its engine's version, and by what it has refused.

The table holds what engines were seen to accept and what their sources say; it is never assumed that an engine ignores
a field that it does not know. Of an engine whose version is not known the newest is assumed, until it refuses a field.
"""

import re
from collections.abc import Mapping
from typing import Final

from router.api.body.call import COMPLETIONS
from router.api.body.edits import ALL_FIELDS, NO_FIELDS, AddedFields, Addition
from router.api.endpoints.chat import PATH as CHAT
from router.api.endpoints.messages import PATH as MESSAGES
from router.api.endpoints.responses import PATH as RESPONSES

BAD_REQUEST: Final = frozenset({400, 422})
"""By these an engine refuses what stands in a body."""
Version = tuple[int, ...]

_NUMBERS: Final = re.compile(r"\d+(?:\.\d+)*")
ACCEPTED_SINCE: Final[Mapping[str, Mapping[str, Mapping[Addition, Version]]]] = {
    "vllm": {
        # Before 0.6.4 the usage in the chunks of a chat was not cumulative.
        CHAT: {Addition.USAGE: (0, 5, 1), Addition.CHUNK_USAGE: (0, 6, 4), Addition.TOKEN_IDS: (0, 10, 2)},
        COMPLETIONS: {Addition.USAGE: (0, 5, 1), Addition.CHUNK_USAGE: (0, 5, 2), Addition.TOKEN_IDS: (0, 10, 2)},
    },
    "sglang": {
        # No token ids: a streamed chat that asks for them is refused.
        CHAT: {Addition.USAGE: (0, 3, 0), Addition.CHUNK_USAGE: (0, 5, 5)},
        COMPLETIONS: {Addition.USAGE: (0, 3, 0), Addition.CHUNK_USAGE: (0, 5, 5), Addition.TOKEN_IDS: (0, 5, 17)},
    },
    # OpenAI's own API, and nothing beyond it.
    "generic": {CHAT: {Addition.USAGE: ()}, COMPLETIONS: {Addition.USAGE: ()}},
}
"""By engine and path: the first version that accepts a field."""


SALTED_SINCE: Final[Mapping[str, Mapping[str, Version | None]]] = {
    "vllm": {CHAT: (0, 9, 0), COMPLETIONS: (0, 10, 0), RESPONSES: (0, 10, 0), MESSAGES: (0, 32, 0)},
    "sglang": {CHAT: (0, 5, 3), COMPLETIONS: (0, 5, 3), RESPONSES: (0, 5, 3), MESSAGES: None},
}
"""By engine and path: the first version that keeps prefixes apart by `cache_salt`; None where no version does."""


def unsalted_paths(engine: str, version: str | None) -> list[str]:
    """The paths on which an engine passes over `cache_salt`, so that clients find each other's prefixes there."""
    known = parse_version(version)
    since = SALTED_SINCE.get(engine, dict.fromkeys((CHAT, COMPLETIONS, RESPONSES, MESSAGES)))
    return [path for path, first in since.items() if first is None or (known is not None and known < first)]


def parse_version(told: str | None) -> Version | None:
    """The numbers of a release; None for a build between releases, whose numbers may mean nothing."""
    if told is None or "dev" in told or (found := _NUMBERS.match(told.removeprefix("v"))) is None:
        return None
    version = tuple(int(number) for number in found[0].split("."))
    return version if any(version) else None


class AcceptedFields:
    """What one worker accepts: by the table, less what it has refused since its version was last another."""

    __slots__ = ("_accepted", "_refused", "engine", "version")

    def __init__(self, engine: str = "", version: str | None = None) -> None:
        self.engine = engine
        self.version = version
        self._accepted = accepted_by(engine, version)
        self._refused: dict[str, AddedFields] = {}

    def __getitem__(self, path: str) -> AddedFields:
        """What may be added to a call to this path."""
        return self._accepted.get(path, NO_FIELDS)

    @property
    def refused(self) -> Mapping[str, AddedFields]:
        """What it has refused against the table, by path."""
        return self._refused

    @property
    def missing(self) -> Mapping[str, AddedFields]:
        """What the router would add and this worker does not accept, by path; nothing before it is known what it is."""
        if not self.engine:
            return {}
        lacking = {path: ALL_FIELDS - self[path] for path in (CHAT, COMPLETIONS)}
        return {path: fields for path, fields in lacking.items() if fields}

    def set_engine(self, engine: str, version: str | None) -> None:
        """The worker has told what it is. Another version, or an unknown one, may accept what was refused before."""
        if (engine, version) != (self.engine, self.version) or version is None:
            self.engine, self.version = engine, version
            self._accepted = accepted_by(engine, version)
            self._refused = {}

    def refuse(self, path: str, fields: AddedFields) -> None:
        """The worker has refused these: they are not added any more."""
        self._refused[path] = self._refused.get(path, NO_FIELDS) | fields
        self._accepted[path] = self[path] - fields


def accepted_by(engine: str, version: str | None) -> dict[str, AddedFields]:
    """What an engine accepts by the table, by path."""
    known = parse_version(version)
    return {
        path: frozenset(field for field, since in fields.items() if known is None or known >= since)
        for path, fields in ACCEPTED_SINCE.get(engine, {}).items()
    }
