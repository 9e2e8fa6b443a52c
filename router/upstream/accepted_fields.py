"""Which of the fields that the router adds to calls a worker accepts, by its engine's version and its past refusals.

The table holds what engines were observed to accept and what their sources say; an engine is never assumed to ignore a
field that it does not know. An engine of unknown version is taken for the newest until it refuses a field.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from router.api.body.call import COMPLETIONS
from router.api.body.edits import ALL_FIELDS, NO_FIELDS, AddedFields, Addition
from router.api.endpoints.chat import PATH as CHAT
from router.api.endpoints.messages import PATH as MESSAGES
from router.api.endpoints.responses import PATH as RESPONSES

BAD_REQUEST: Final = frozenset({400, 422})
"""Statuses with which an engine refuses the content of a body."""
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
"""The first version that accepts each field, by engine and path."""

SALTED_SINCE: Final[Mapping[str, Mapping[str, Version | None]]] = {
    "vllm": {CHAT: (0, 9, 0), COMPLETIONS: (0, 10, 0), RESPONSES: (0, 10, 0), MESSAGES: (0, 32, 0)},
    "sglang": {CHAT: (0, 5, 3), COMPLETIONS: (0, 5, 3), RESPONSES: (0, 5, 3), MESSAGES: None},
}
"""The first version that isolates prefixes by `cache_salt`, by engine and path; None if no version does."""


def unsalted_paths(engine: str, version: str | None) -> list[str]:
    """Return the paths on which an engine ignores `cache_salt`, so that clients share each other's prefixes there."""
    known = parse_version(version)
    since = SALTED_SINCE.get(engine, dict.fromkeys((CHAT, COMPLETIONS, RESPONSES, MESSAGES)))
    return [path for path, first in since.items() if first is None or (known is not None and known < first)]


def parse_version(text: str | None) -> Version | None:
    """Return the numbers of a release; None for a build between releases, whose numbers may mean nothing."""
    if text is None or "dev" in text or (found := _NUMBERS.match(text.removeprefix("v"))) is None:
        return None
    version = tuple(int(number) for number in found[0].split("."))
    return version if any(version) else None


class AcceptedFields:
    """The added fields that one worker accepts: those of the table, less those it has refused since it last changed
    its version.
    """

    __slots__ = ("_accepted", "_refused", "engine", "version")

    def __init__(
        self, engine: str = "", version: str | None = None, refused: Mapping[str, AddedFields] = MappingProxyType({})
    ) -> None:
        """`refused`: the fields that the worker has refused so far, by path."""
        self.engine = engine
        self.version = version
        self._accepted = accepted_by(engine, version)
        self._refused: dict[str, AddedFields] = {}
        for path, fields in refused.items():
            self.refuse(path, fields)

    def __getitem__(self, path: str) -> AddedFields:
        """Return the fields that may be added to a call to this path."""
        return self._accepted.get(path, NO_FIELDS)

    @property
    def by_path(self) -> Mapping[str, AddedFields]:
        """The fields that may be added, by the path of the call; none at a path that is not there."""
        return self._accepted

    @property
    def refused(self) -> Mapping[str, AddedFields]:
        """The fields that the table lists but the worker has refused, by path."""
        return self._refused

    @property
    def missing(self) -> Mapping[str, AddedFields]:
        """The fields that the router would add but the worker does not accept, by path; empty while the engine is
        unknown.
        """
        if not self.engine:
            return {}
        lacking = {path: ALL_FIELDS - self[path] for path in (CHAT, COMPLETIONS)}
        return {path: fields for path, fields in lacking.items() if fields}

    def set_engine(self, engine: str, version: str | None) -> None:
        """Set the worker's engine and version. A new or unknown version clears the refusals: it may accept more."""
        if (engine, version) != (self.engine, self.version) or version is None:
            self.engine, self.version = engine, version
            self._accepted = accepted_by(engine, version)
            self._refused = {}

    def refuse(self, path: str, fields: AddedFields) -> None:
        """Record that the worker has refused these fields, so that they are no longer added."""
        self._refused[path] = self._refused.get(path, NO_FIELDS) | fields
        self._accepted[path] = self[path] - fields


def accepted_by(engine: str, version: str | None) -> dict[str, AddedFields]:
    """Return the fields that an engine accepts according to the table, by path."""
    known = parse_version(version)
    return {
        path: frozenset(field for field, since in fields.items() if known is None or known >= since)
        for path, fields in ACCEPTED_SINCE.get(engine, {}).items()
    }
