from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.body.call import Head
from router.api.body.prompt_bytes import HEAD_FIELDS, TEXT, head, messages
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.core.model.prompt_key import CHUNK_BYTES, PromptHasher, PromptKey

HASHER = PromptHasher(b"secret")
HEAD = Head("/v1/chat/completions")
LONG = "long text " * 100
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}


def key(**fields: Any) -> PromptKey:
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}], **fields}
    return parse_chat(HEAD, orjson.dumps(body), HASHER).prompts[0].key


def text_key(**fields: Any) -> PromptKey:
    return parse_completion(HEAD, orjson.dumps({"model": "m", "prompt": LONG, **fields}), HASHER).prompts[0].key


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_no_content_is_empty_content(content: Any) -> None:
    """Clients write an absent text in several ways, and templates render all of them as nothing."""
    assert messages([user(content)]) == messages([{"role": "user"}])


@pytest.mark.parametrize("part", [{"type": "text", "text": "Hi"}, {"text": "Hi"}, "Hi"])
def test_single_text_part_is_its_text(part: Any) -> None:
    """A client that sends its text as a list of one part shares the prefix of one that sends a string."""
    assert messages([user([part])]) == messages([user("Hi")])


def test_members_that_templates_do_not_render_do_not_count() -> None:
    """Nulls that a client library sends back with an answer, and sampling parameters, leave the key as it is."""
    answer = {"role": "assistant", "content": "Hi"}
    sent_back: dict[str, Any] = {
        **answer,
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
        "audio": None,
        "annotations": [],
    }
    assert messages([sent_back]) == messages([answer])
    assert key(temperature=0.5, tool_choice="none", user="alice", tools=[]) == key()


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"extra_key": "s"},
        {"lora_path": "adapter"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "t", "text": "x"}]},
        {"add_special_tokens": False},
    ],
)
def test_what_changes_the_head_or_the_cache_shares_nothing(fields: dict[str, Any]) -> None:
    """A request with another model, salt, adapter or head has no chunk in common with the plain one."""
    for make in (key, text_key):
        one, other = make().hashes, make(**fields).hashes
        assert not {one[at : at + 8] for at in range(0, len(one), 8)} & {
            other[at : at + 8] for at in range(0, len(other), 8)
        }


def test_long_names_do_not_share_their_start() -> None:
    """Models and salts that differ only long after the first chunk have different keys from the first chunk on."""
    stem = "n" * (2 * CHUNK_BYTES)
    for name in ("model", "cache_salt"):
        assert key(**{name: stem + "a"}).hashes[:8] != key(**{name: stem + "b"}).hashes[:8]


def test_kinds_of_prompts_are_apart() -> None:
    """Chat, text and token ids never share a prefix: they are different tokens to the engine."""
    token_key = text_key(prompt=[7] * 500)
    assert len({key().hashes[:8], text_key().hashes[:8], token_key.hashes[:8]}) == 3


def test_media_counts_by_content_and_not_by_size() -> None:
    """Megabytes of an image are a few bytes of the key, and another image is another key."""
    other = {"type": "image_url", "image_url": {"url": IMAGE["image_url"]["url"][:-1] + "B"}}  # type: ignore[index]
    one = messages([user([IMAGE, {"type": "text", "text": "What is it?"}])])
    assert len(one) < 100
    assert one != messages([user([other, {"type": "text", "text": "What is it?"}])])


def test_tokens_are_exact_and_little_endian() -> None:
    """Lists of ids share their prefix as ids do, four bytes each."""
    short, long = text_key(prompt=list(range(500))), text_key(prompt=list(range(600)))
    assert long.hashes.startswith(short.hashes)
    assert long.size - short.size == 400
    assert (short.tokens, long.tokens) == (500, 600)
    rendered = head("tokens", "m", {}) + TEXT + b"\x02\x01\x00\x00" * 64
    assert text_key(prompt=[258] * 64) == HASHER.prompt(rendered, tokens=64).key


def test_tools_share_their_common_start() -> None:
    """Two requests with the same first tools share them, as their prompts do."""
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": LONG}} for i in range(3)]
    one, other = key(tools=tools[:2]), key(tools=tools)
    assert one.hashes[: 8 * (2000 // CHUNK_BYTES)] == other.hashes[: 8 * (2000 // CHUNK_BYTES)]
    assert one.hashes != other.hashes


PIECES = st.text(st.sampled_from("ab\u00fc\x00"), max_size=2)
CALLS = st.builds(lambda i, n, a: {"id": i, "function": {"name": n, "arguments": a}}, PIECES, PIECES, PIECES)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": PIECES, "content": PIECES},
        optional={
            "name": PIECES,
            "tool_call_id": PIECES,
            "reasoning": PIECES,
            "tool_calls": st.lists(CALLS, max_size=2),
        },
    ),
    max_size=3,
)


def without_empty(sequence: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if value or name == "role"} for message in sequence]


@given(MESSAGES, MESSAGES)
def test_different_conversations_never_render_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """The bytes are the same only where roles, names, texts and calls are the same, empty ones aside."""
    assert (messages(one) == messages(other)) == (without_empty(one) == without_empty(other))


@given(MESSAGES, MESSAGES)
def test_a_longer_conversation_extends_the_shorter(start: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    """New messages only add bytes at the end, which is what makes a conversation a prefix of its next turn."""
    assert messages(start + more) == messages(start) + messages(more)


@given(st.dictionaries(st.sampled_from(HEAD_FIELDS), st.text(max_size=3)))
def test_fields_of_the_head_are_distinct(fields: dict[str, str]) -> None:
    """No value of one field can look like another field."""
    merged = {"suffix": "".join(f"{name}{value}" for name, value in fields.items())}
    present = {name: value for name, value in fields.items() if value}
    assert (head("chat", "m", fields) == head("chat", "m", merged)) == (
        present == {k: v for k, v in merged.items() if v}
    )
