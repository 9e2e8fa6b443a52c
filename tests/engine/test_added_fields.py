"""The router adds fields to a streamed call only if the real engine accepts them."""

import json

import pytest

from router.api.body.edits import Addition, Additions
from router.upstream.accepted_fields import AcceptedFields

from . import prompts
from .fleet import Engine, Router
from .wire import CHAT, COMPLETIONS, Json, call

pytestmark = pytest.mark.engine

COMMON: Json = {"model": "tiny", "stream": True, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
EFFECTS = {Addition.USAGE: b'"usage":{', Addition.CHUNK_USAGE: b'"usage":{', Addition.TOKEN_IDS: b'"token_ids":['}
"""What an answer contains more often if a field was requested."""


def asked(path: str, name: str = "added") -> Json:
    """Return a body without additions."""
    text = prompts.text(name, 20)
    return {
        **COMMON,
        **({"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}),
    }


def sent(path: str, *fields: Addition) -> bytes:
    """Return the same body with these fields, as the router adds them."""
    return Additions().put(json.dumps(asked(path)).encode(), frozenset(fields))


@pytest.mark.parametrize("field", Addition, ids=lambda field: field.value)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_table_says_what_an_engine_accepts(
    router: Router, engines: tuple[Engine, Engine], path: str, field: Addition
) -> None:
    """A field that the router adds has its effect, and the engine rejects by name each field that it leaves out."""
    card = router.worker(engines[0])
    assert card["engine"] == engines[0].dialect
    accepted = AcceptedFields(str(card["engine"]), str(card["version"]))[path]
    needed = [Addition.USAGE] if field is Addition.CHUNK_USAGE else []
    answer = call(engines[0].url, path, sent(path, field, *needed))
    if field in accepted:
        without = call(engines[0].url, path, sent(path, *needed))
        assert (answer.status, without.status) == (200, 200)
        assert answer.body.count(EFFECTS[field]) > without.body.count(EFFECTS[field])
    else:
        assert answer.status == 400
        assert field.member.encode() in answer.body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_call_is_refused_for_what_the_router_adds(router: Router, engines: tuple[Engine, Engine], path: str) -> None:
    """Streamed calls succeed at both engines, without a rejected attempt before."""
    answers = [call(router.url, path, asked(path, f"added {number}"), f"client {number}") for number in range(8)]
    assert [answer.status for answer in answers] == [200] * 8, answers[0].body
    assert not [answer.body for answer in answers if b'"error"' in answer.body]
    assert {answer.headers["x-d2lpm-worker"] for answer in answers} == {router.worker(each)["id"] for each in engines}
    assert [router.worker(engine)["refused_fields"] for engine in engines] == [{}, {}]
