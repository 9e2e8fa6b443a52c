"""Which session a call belongs to: by its label, or because its prompt continues what the client was answered before.

A key of a prompt has chained hashes, so one hash stands for all that is before it (`PromptKey`). A session keeps the
last hash of its latest prompt and of its answer. A call whose prompt has one of these hashes continues the session. Its
prompt is searched from the end: what is new in a call is short.

Agents also change the end of what they resend, such as a reminder in the last message. So a session without a call goes
on with a prompt that shares more with its latest one than its first prompt, which other sessions may share: the hash of
the first chunk after that is kept, too.

A label may cover several contexts, as of a helper that works for the same agent. So calls under one label that do not
continue one another are separate sessions. But where a session under the label has no call, and the prompt begins as
that one's do, the client has shortened its context (compaction), and the session goes on.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from router.core.clients.sessions.session import Session, SessionClient
from router.core.model.prompt_key import HASH_BYTES, PromptKey
from router.core.model.request import ClientId, Request, SessionId

HEAD_CHUNKS: Final = 32
"""Chunks, about 1,000 tokens, by which a prompt counts as beginning like another one."""
CHECKS_PER_CALL: Final = 8
"""Sessions checked at each new one while too many are remembered."""

Owner = tuple[ClientId, str, SessionId | None]
"""Among whose sessions a call's is searched: client, model, and label if it has one."""


class SessionTable:
    """All remembered sessions."""

    def __init__(self, limit: int, *, by_label: bool, by_prefix: bool) -> None:
        """`limit`: how many sessions are remembered. `by_label`, `by_prefix`: how sessions are recognized."""
        self._limit = limit
        self._by_label = by_label
        self._by_prefix = by_prefix
        self._numbers = 0
        self._by_head: dict[tuple[Owner, bytes], dict[Session, None]] = {}
        """The sessions with a label whose prompts begin alike: a client may have thousands under one label."""
        self._by_anchor: dict[Owner, dict[bytes, Session]] = {}
        # Not plain dicts, which find their first key by walking past all keys removed before it.
        self._without_place: OrderedDict[Session, None] = OrderedDict()
        self._with_place: OrderedDict[Session, None] = OrderedDict()
        self.clients: dict[ClientId, SessionClient] = {}
        """Every client with a remembered session, and some without."""

    def __len__(self) -> int:
        return len(self._without_place) + len(self._with_place)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over all sessions, those without a place first."""
        yield from self._without_place
        yield from self._with_place

    def recognize(self, request: Request, now: float) -> Session | None:
        """Return the session that a call belongs to, as the most recent one; None if it belongs to none."""
        label = request.session if self._by_label else None
        if len(request.prompts) != 1 or (label is None and not self._by_prefix):
            return None
        owner, prompt = (request.client, request.model, label), request.prompts[0]
        session = self._continued(owner, prompt)
        if session is None:
            session = self._begin(owner, request, prompt, now)
        elif request.id != session.first_call:
            session.came_back = True
        if session.worker is None:
            self._without_place.move_to_end(session)
        else:
            self._with_place.move_to_end(session)
        session.first_chunks = min(session.first_chunks, _chunks(prompt))
        answered = session.anchors[1:] if session.anchors else ()
        self._anchor(session, (_last_hash(prompt), *answered), _hash_of(prompt, session.first_chunks))
        return session

    def answered(self, session: Session, answers: tuple[PromptKey, ...]) -> None:
        """Note how the next prompts of a session may begin."""
        if answers and session.anchors:
            ends = (session.anchors[0], *[_last_hash(answer) for answer in answers])
            self._anchor(session, ends, session.own_anchor)

    def place_changed(self, session: Session) -> None:
        """A session got a place, or lost it."""
        old, new = self._with_place, self._without_place
        if session.worker is not None:
            old, new = new, old
        old.pop(session, None)
        new[session] = None

    @property
    def has_surplus(self) -> bool:
        """Whether more sessions are remembered than the limit allows."""
        return len(self._without_place) + len(self._with_place) > self._limit

    def to_forget(self) -> list[Session]:
        """Return sessions without a call beyond the limit, the least recently used first, those with places last. Each
        must be dropped.
        """
        found: list[Session] = []
        for sessions in (self._without_place, self._with_place):
            for _ in range(min(CHECKS_PER_CALL, len(sessions))):
                if len(self) - len(found) <= self._limit:
                    return found
                oldest = next(iter(sessions))
                sessions.move_to_end(oldest)
                if not oldest.calls and oldest not in found:
                    found.append(oldest)
        return found

    def drop(self, session: Session) -> None:
        """Forget a session that has no call and no place."""
        self._anchor(session, (), b"")
        if session.label is not None:
            begin = _owner(session), session.head
            del self._by_head[begin][session]
            if not self._by_head[begin]:
                del self._by_head[begin]
        del self._without_place[session]
        del session.client.sessions[session]

    def _continued(self, owner: Owner, prompt: PromptKey) -> Session | None:
        anchored, hashes = self._by_anchor.get(owner), prompt.hashes
        if anchored:
            for end in range(len(hashes), 0, -HASH_BYTES):
                session = anchored.get(anchor := hashes[end - HASH_BYTES : end])
                if session is not None and (anchor in session.anchors or not session.calls):
                    return session
        alike = [session for session in self._by_head.get((owner, _head(prompt)), ()) if not session.calls]
        return max(alike, key=_idle_since) if alike else None

    def _begin(self, owner: Owner, request: Request, prompt: PromptKey, now: float) -> Session:
        client = self.clients.get(request.client)
        if client is None:
            client = self.clients[request.client] = SessionClient(request.client, self._numbers)
        self._numbers += 1
        session = Session(
            client, request.model, owner[2], request.parent, self._numbers, now, _head(prompt), request.id
        )
        session.first_chunks = _chunks(prompt)
        if session.label is not None:
            self._by_head.setdefault((owner, session.head), {})[session] = None
        self._without_place[session] = client.sessions[session] = None
        return session

    def _anchor(self, session: Session, anchors: tuple[bytes, ...], own: bytes) -> None:
        """Let a session be found by these hashes; by its own anchor only if no other session is."""
        owner = _owner(session)
        anchored = self._by_anchor.setdefault(owner, {})
        for anchor in (*session.anchors, session.own_anchor):
            if anchored.get(anchor) is session:
                del anchored[anchor]
        session.anchors, session.own_anchor = anchors, own
        if own:
            anchored.setdefault(own, session)
        for anchor in anchors:
            if anchor:
                anchored[anchor] = session
        if not anchored:
            del self._by_anchor[owner]


def _owner(session: Session) -> Owner:
    return session.client.name, session.model, session.label


def _idle_since(session: Session) -> float:
    return session.idle_since


def _last_hash(prompt: PromptKey) -> bytes:
    return prompt.hashes[-HASH_BYTES:]


def _chunks(prompt: PromptKey) -> int:
    """Return how many whole chunks a prompt has."""
    return len(prompt.hashes) // HASH_BYTES


def _hash_of(prompt: PromptKey, number: int) -> bytes:
    """Return the hash of a whole chunk, counted from 0; empty if the prompt has fewer."""
    return prompt.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]


def _head(prompt: PromptKey) -> bytes:
    return prompt.hashes[: HEAD_CHUNKS * HASH_BYTES][-HASH_BYTES:]
