"""Which session a call belongs to, by the labels that agents send."""

from collections.abc import Sequence
from typing import Any

import pytest

from router.api.body.call import Head
from router.api.body.fields import SessionMembers
from router.api.endpoints.chat import parse_chat
from router.config.settings import Settings
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import SessionId
from router.front.exchange import Exchange
from router.front.session_labels import UNLABELLED, SessionLabel, SessionLabels

HEAD = Head("/v1/chat/completions")

NAMES = Settings().session_labels
BODY = b'{"model": "m", "messages": []}'


async def nothing(*_: object) -> Any:
    raise AssertionError("labels need no more than what has arrived")


def exchange(*headers: tuple[bytes, bytes]) -> Exchange:
    scope = {"path": "/v1/chat/completions", "method": "POST", "headers": list(headers), "client": None}
    return Exchange(scope, nothing, nothing)


def labelled(session: str, parent: str | None = None, *, last: bool = False) -> SessionLabel:
    return SessionLabel(SessionId(session), None if parent is None else SessionId(parent), last)


def read(headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = BODY, labels: SessionLabels | None = None) -> Any:
    labels = labels or SessionLabels(NAMES)
    return labels.read(exchange(*headers), parse_chat(HEAD, body, PromptHasher(b"")))


@pytest.mark.parametrize(
    "header",
    ["session-id", "session_id", "x-session-affinity", "x-opencode-session", "x-smg-routing-key", "x-session-id"],
)
def test_a_header_names_the_session(header: str) -> None:
    """Each of the headers that agents send names the session."""
    assert read([(header.encode(), b"s1")]) == labelled("s1")


def test_the_first_label_counts() -> None:
    """Of several labels the first one in the order of the setting counts, headers before the body."""
    both = [(b"x-session-id", b"late"), (b"session-id", b"early")]
    assert read(both, b'{"model": "m", "messages": [], "prompt_cache_key": "body"}').session == "early"
    assert read(both, labels=SessionLabels(["x-session-id"])).session == "late"


def test_each_agent_of_claude_code_has_its_own_context() -> None:
    """An agent within a session is a session, whose parent is the agent that began it, or the session's own."""
    session = (b"x-claude-code-session-id", b"s")
    agent, parent = (b"x-claude-code-agent-id", b"a"), (b"x-claude-code-parent-agent-id", b"p")
    assert read([session]) == labelled("s")
    assert read([session, agent]) == labelled("s/a", "s")
    assert read([session, agent, parent]) == labelled("s/a", "s/p")


def test_dynamo_says_who_began_a_session_and_when_it_ends() -> None:
    """Dynamo's headers name the session, its parent, and its last call."""
    headers = [
        (b"x-dynamo-session-id", b"s"),
        (b"x-dynamo-parent-session-id", b"p"),
        (b"x-dynamo-session-final", b"true"),
    ]
    assert read(headers) == labelled("s", "p", last=True)


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (b'{"messages": [], "prompt_cache_key": "k"}', "k"),
        (b'{"messages": [], "metadata": {"user_id": "user_1_account_2_session_3"}}', "3"),
        (b'{"messages": [], "metadata": {"user_id": "user_1"}}', None),
        (b'{"messages": [], "metadata": [], "prompt_cache_key": 7}', None),
        (b'{"messages": [], "user": "u_session_1", "safety_identifier": "x"}', None),
    ],
)
def test_members_of_the_body_name_the_session(body: bytes, session: str | None) -> None:
    """`prompt_cache_key` and the end of `metadata.user_id` name the session; who the user is does not."""
    assert read(body=body).session == session


@pytest.mark.parametrize("label", [b"", b"  ", b"x" * 257, "ä".encode(), b"a\tb"])
def test_a_label_that_cannot_be_used_is_ignored_and_counted(label: bytes) -> None:
    """Empty, long and non-ASCII labels are ignored and counted; the next label counts."""
    labels = SessionLabels(NAMES)
    assert read([(b"session-id", label)], labels=labels) == UNLABELLED
    assert read([(b"session-id", label), (b"x-session-id", b"good")], labels=labels).session == "good"
    assert labels.ignored == 2


def test_a_repeated_label_is_ignored() -> None:
    """A header that is sent twice names no session."""
    labels = SessionLabels(NAMES)
    assert read([(b"session-id", b"one"), (b"session-id", b"two")], labels=labels) == UNLABELLED
    assert labels.ignored == 1


def test_most_calls_have_no_label() -> None:
    """A call without any label has none, and nothing is counted."""
    labels = SessionLabels(NAMES)
    assert read([(b"authorization", b"x")], labels=labels) == UNLABELLED
    assert not labels.ignored
    assert parse_chat(HEAD, BODY, PromptHasher(b"")).session == SessionMembers()
