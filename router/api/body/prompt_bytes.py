"""Renders a prompt to canonical bytes, from which its key is hashed.

The bytes follow the order in which a chat template renders a request, so that two requests share a prefix of these
bytes wherever an engine would share a prefix of its cache. Everything that changes the head of the prompt or isolates
its cache comes before the first message. Each piece begins with a byte that cannot occur in UTF-8 text, so no text can
imitate another structure. An image or another file counts as a short digest, as its bytes are not tokens of the prompt.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

from router.api.body.fields import Fields, dump, objects

PROMPT: Final = b"\xff"
MESSAGE: Final = b"\xfe"
TEXT: Final = b"\xfd"
MEDIA: Final = b"\xfc"
TOOL_CALL: Final = b"\xfb"
REASONING: Final = b"\xfa"
FIELD: Final = b"\xf9"
SEPARATOR: Final = b"\xf8"
"""Separates the parts of one piece."""

CACHE_FIELDS: Final = ("cache_salt", "extra_key", "lora_path")
"""Body members that select a separate cache. The last two are SGLang's."""

HEAD_FIELDS: Final = (
    "add_special_tokens",
    "truncate_prompt_tokens",
    "suffix",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "documents",
    "tools",
    "functions",
)
"""Body members that change what precedes the first message. Not tool_choice, as templates ignore it."""
_IN_HEAD: Final = frozenset({*CACHE_FIELDS, *HEAD_FIELDS})
KEPT_NAME: Final = 256
"""Characters of a model's name at most for which the head of its prompts is kept."""


def head(kind: str, model: str, fields: Fields) -> bytes:
    """Render everything before the first message or text.

    The head begins with a digest of kind, model and cache fields, so that two models, endpoints or salts differ in
    their first bytes, however long their names are.
    """
    if len(model) <= KEPT_NAME and _IN_HEAD.isdisjoint(fields):
        return _head_without_fields(kind, model)
    return b"".join([_beginning(kind, model, _named(fields, CACHE_FIELDS)), *_named(fields, HEAD_FIELDS)])


@lru_cache(maxsize=1024)
def _head_without_fields(kind: str, model: str) -> bytes:
    return _beginning(kind, model, ())


def _beginning(kind: str, model: str, cache_fields: Iterable[bytes]) -> bytes:
    return PROMPT + digest(b"".join([kind.encode(), SEPARATOR, model.encode(), *cache_fields]))


def _named(fields: Fields, names: Iterable[str]) -> Iterator[bytes]:
    for name in names:
        if name in fields and (value := fields[name]) is not None and value not in ("", [], {}):
            yield FIELD + name.encode() + SEPARATOR + dump(value, name)


def messages(sequence: Iterable[Mapping[str, Any]]) -> bytes:
    """Render messages in order. Appending a message to the sequence appends its bytes to the result."""
    pieces: list[bytes] = []
    for message in sequence:
        _message(pieces, message)
    return b"".join(pieces)


def _message(pieces: list[bytes], message: Mapping[str, Any]) -> None:
    pieces += (MESSAGE, _bytes(message.get("role")))
    if len(message) == 2 and "role" in message and "content" in message:
        _content(pieces, message["content"])
        return
    for name in ("name", "tool_call_id"):
        if value := message.get(name):
            pieces += (FIELD, name.encode(), SEPARATOR, _bytes(value))
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        pieces += (REASONING, _bytes(reasoning))
    _content(pieces, message.get("content"))
    for call in objects(message.get("tool_calls")):
        _tool_call(pieces, call.get("id"), call.get("function") or call.get("custom"))
    if function := message.get("function_call"):
        _tool_call(pieces, None, function)


def _content(pieces: list[bytes], content: object) -> None:
    """Render content. A list of one text part equals that text, and an empty text equals none."""
    if isinstance(content, str):
        if content:
            pieces += (TEXT, content.encode())
        return
    for part in content if isinstance(content, list) else [content]:
        text = part
        if isinstance(part, dict) and "text" in part and part.get("type", "text") == "text":
            text = part["text"]
        if isinstance(text, str):
            if text:
                pieces += (TEXT, text.encode())
        elif text is not None:
            pieces += (MEDIA, digest(dump(text, "messages")))


def _tool_call(pieces: list[bytes], call_id: object, function: object) -> None:
    called = function if isinstance(function, dict) else {}
    arguments = called.get("arguments", called.get("input"))
    pieces += (TOOL_CALL, _bytes(call_id), SEPARATOR, _bytes(called.get("name")), SEPARATOR, _bytes(arguments))


def _bytes(value: object) -> bytes:
    """Render a member that should be text; null as nothing. Anything else as JSON: the engine will reject it."""
    if isinstance(value, str):
        return value.encode()
    return b"" if value is None else dump(value, "messages")


def digest(content: bytes) -> bytes:
    """A digest that replaces bytes which are not text of the prompt, or are too long."""
    return blake2b(content, digest_size=16).hexdigest().encode()
