"""Reads which agent session a call belongs to, from the labels that agents send.

Each kind of agent has its own header, or member of the body. The names to read are a setting; the first one that is
present and valid counts. Some have companions: Claude Code names the agent within its session, as each has a context of
its own, and Dynamo's clients say when a session is over.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from router.api.body.call import Call
from router.api.body.fields import SessionMembers
from router.core.model.request import SessionId
from router.front.exchange import Exchange

LABEL_BYTES: Final = 256
IN_BODY: Final = "body."
"""What the names of labels in the body begin with."""
CACHE_KEY: Final = "body.prompt_cache_key"
USER_ID: Final = "body.metadata.user_id"
SESSION_PART: Final = "_session_"
CLAUDE_CODE: Final = "x-claude-code-session-id"
AGENT: Final = b"x-claude-code-agent-id"
PARENT_AGENT: Final = b"x-claude-code-parent-agent-id"
DYNAMO: Final = "x-dynamo-session-id"
DYNAMO_PARENT: Final = b"x-dynamo-parent-session-id"
DYNAMO_FINAL: Final = b"x-dynamo-session-final"
TRUE: Final = (b"true", b"1", b"yes")


class SessionLabel(NamedTuple):
    """What a call says of its session."""

    session: SessionId | None = None
    parent: SessionId | None = None
    last: bool = False
    """Whether the session ends with this call."""


UNLABELLED: Final = SessionLabel()


class SessionLabels:
    """Reads the labels of calls, and counts those that cannot be used."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of headers, in lower case, and of members of the body (`CACHE_KEY`, `USER_ID`), in the order in
        which they are read.
        """
        self._names = [(name, name.encode()) for name in names]
        self.ignored = 0
        """Labels that were empty, repeated, not ASCII or too long. Their calls are served as if they had none."""

    def read(self, exchange: Exchange, call: Call) -> SessionLabel:
        """Return the label of a call."""
        for name, header in self._names:
            if name.startswith(IN_BODY):
                if (label := self._usable(_member(name, call.session))) is not None:
                    return SessionLabel(SessionId(label))
            elif header in exchange.headers and (label := self._header(exchange, header)) is not None:
                return self._with_companions(exchange, name, label)
        return UNLABELLED

    def _with_companions(self, exchange: Exchange, name: str, label: str) -> SessionLabel:
        """Return a label with what other headers say of the session."""
        if name == CLAUDE_CODE and (agent := self._companion(exchange, AGENT)) is not None:
            parent = self._companion(exchange, PARENT_AGENT)
            above = label if parent is None else f"{label}/{parent}"
            return SessionLabel(SessionId(f"{label}/{agent}"), SessionId(above))
        if name == DYNAMO:
            parent = self._companion(exchange, DYNAMO_PARENT)
            last = exchange.headers.get(DYNAMO_FINAL, b"").strip().lower() in TRUE
            return SessionLabel(SessionId(label), None if parent is None else SessionId(parent), last)
        return SessionLabel(SessionId(label))

    def _companion(self, exchange: Exchange, header: bytes) -> str | None:
        return self._header(exchange, header) if header in exchange.headers else None

    def _header(self, exchange: Exchange, header: bytes) -> str | None:
        """Return the value of a header that is present; None if it is ignored."""
        if exchange.is_repeated(header):
            self.ignored += 1
            return None
        return self._usable(exchange.headers[header].decode("latin-1").strip(" \t"))

    def _usable(self, label: str | None) -> str | None:
        """Return a label, or None if it is ignored."""
        if label is None:
            return None
        if label and len(label) <= LABEL_BYTES and label.isascii() and label.isprintable():
            return label
        self.ignored += 1
        return None


def _member(name: str, members: SessionMembers) -> str | None:
    """Return the label in a member of the body; None if it is not there."""
    if name == CACHE_KEY:
        return members.cache_key
    _, marker, session = (members.user_id or "").rpartition(SESSION_PART)
    return session if marker else None
