"""Readers of a request body's members, whose errors name the member at fault, and checks of what harms an engine.

Engines take more than their schema says: `stream: 1`, or `"5"` and 5.0 for an integer. So do these readers, or the
router would refuse a call that an engine serves.

Harmful are bodies with token ids that crash an SGLang server, or too large in memory once parsed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import orjson

from router.errors import BadRequest, TooManyMembers

Fields = dict[str, Any]
"""A parsed body. Of a repeated member the last counts, as in the engines."""
ADAPTER: Final = "lora_path"
LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Members that limit the output tokens."""
TOO_LARGE: Final = 2.0**64
"""orjson parses integers from here on as floats."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_WHOLE: Final = re.compile(r"\s*+([+-]?\d{1,19})(?:\.0*+)?\s*+", re.ASCII)
TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})


class SessionMembers(NamedTuple):
    """What a body says of the agent session that a call belongs to."""

    cache_key: str | None = None
    """Its `prompt_cache_key`."""
    user_id: str | None = None
    """The `user_id` of its `metadata`, which may end with the session."""


NO_SESSION: Final = SessionMembers()


def load_fields(body: bytes) -> Fields:
    fields = load_json(body)
    if not isinstance(fields, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    return fields


def load_json(body: bytes) -> object:
    """Parse JSON of RFC 8259. Raises BadRequest for what only some parsers accept, such as NaN or UTF-16."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(_json_error(body, error), code="invalid_json") from None


def _json_error(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body:
        return "The body is empty; it must be a JSON object."
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"The body is not UTF-8: {wrong.reason} at byte {wrong.start}."
    return f"The body is not valid JSON: {error}."


def model_name(fields: Fields) -> str:
    """Return the model that a body names; empty if it names none, so that any may serve it. Raises BadRequest."""
    return text(fields, "model") or ""


def adapters(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the adapters that a body names beside its model: one, or one per prompt (SGLang's `lora_path`)."""
    if ADAPTER not in fields:
        return ()
    value = fields[ADAPTER]
    each = value if isinstance(value, list) else [value]
    if not all(one is None or isinstance(one, str) for one in each):
        raise wrong_type(ADAPTER, "a string or a list of strings")
    return tuple(dict.fromkeys(one for one in each if one))


def session_members(fields: Mapping[str, Any]) -> SessionMembers:
    """Return what a body says of the session that the call belongs to. What is not a string says nothing."""
    cache_key, metadata = fields.get("prompt_cache_key"), fields.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if cache_key is None and user_id is None:
        return NO_SESSION
    return SessionMembers(
        cache_key if isinstance(cache_key, str) else None, user_id if isinstance(user_id, str) else None
    )


def text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, "a string")
    return value


def flag(fields: Fields, name: str, param: str | None = None) -> bool:
    """Read a boolean as engines do; False if absent or null. `param`: the full name of a nested member, for errors."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    word = value.lower() if isinstance(value, str) else str(int(value)) if value in (0, 1) else ""
    if word not in TRUE | FALSE:
        raise wrong_type(param or name, "a boolean")
    return word in TRUE


def count(fields: Fields, name: str, minimum: int = 0) -> int | None:
    """Read a whole number as engines do; None if absent or null. Raises BadRequest."""
    value = fields.get(name)
    if value is None:
        return None
    number = whole_number(value)
    if number is None:
        if isinstance(value, float) and value >= TOO_LARGE:
            raise BadRequest(f"`{name}` is too large.", param=name, code="invalid_value")
        raise wrong_type(name, "an integer")
    if number < minimum:
        raise BadRequest(f"`{name}` must be at least {minimum}.", param=name, code="invalid_value")
    return number


def whole_number(value: object) -> int | None:
    """Return the whole number that engines read in a value: an integer, 5.0 or "5"; None if there is none."""
    if type(value) is int:  # excludes booleans
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < TOO_LARGE else None
    found = _WHOLE.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else int(found[1])


def mapping(fields: Fields, name: str) -> Fields | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong_type(name, "an object")
    return value


def objects(value: object) -> list[Fields]:
    """Return the objects in a list; empty if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def messages(fields: Fields) -> list[Fields]:
    """Return the messages of a chat; empty if there are none, which an engine refuses in its own words. Raises
    BadRequest.
    """
    given = fields.get("messages")
    if given is None:
        return []
    if not isinstance(given, list):
        raise wrong_type("messages", "a list")
    for index, message in enumerate(given):
        if not isinstance(message, dict):
            raise wrong_type(f"messages[{index}]", "an object")
    return given


def output_limit(fields: Fields) -> int | None:
    """Return the larger of the two limits of a chat, as engines differ in which of the two names takes precedence."""
    max_completion_tokens, max_tokens = count(fields, "max_completion_tokens"), count(fields, "max_tokens")
    if max_completion_tokens is None or max_tokens is None:
        return max_tokens if max_completion_tokens is None else max_completion_tokens
    return max(max_completion_tokens, max_tokens)


def dump(value: object, param: str) -> bytes:
    """Serialise a parsed value compactly, in the client's order of members. Raises BadRequest if nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # orjson parses more levels than it serialises
        raise BadRequest(f"`{param}` is nested too deeply.", param=param, code="invalid_value") from None


def wrong_type(param: str, expected: str) -> BadRequest:
    return BadRequest(f"`{param}` must be {expected}.", param=param, code="invalid_type")


TOKEN_ID_MEMBERS: Final = ("prompt", "input", "input_ids", "query", "items", "documents", "text_1", "text_2")
"""Body members in which engines accept token ids in place of text: one list, or a list of lists."""
BIAS: Final = "logit_bias"
"""A body member whose keys are token ids."""
_WITH_IDS: Final = frozenset({*TOKEN_ID_MEMBERS, BIAS})


def largest_id(fields: Mapping[str, Any]) -> int:
    """Return the largest token id in a body; -1 if it has none. Raises BadRequest if one is negative."""
    largest = -1
    if _WITH_IDS.isdisjoint(fields):
        return largest
    for name in TOKEN_ID_MEMBERS:
        for ids in _lists(fields.get(name)):
            if min(ids) < 0:
                raise _outside(name)
            largest = max(largest, max(ids))  # noqa: PLW3301 - avoids copying a long list
    bias = fields.get(BIAS)
    for key in bias if isinstance(bias, dict) else ():
        if (digits := key.strip().removeprefix("-").removeprefix("+")).isdecimal():
            if key.strip().startswith("-"):
                raise _outside(BIAS)
            largest = max(largest, int(digits[:20]))
    return largest


def check_vocabulary(largest: int, size: int | None) -> None:
    """Raise BadRequest if the largest id is outside a vocabulary of `size` tokens. None: the size is not known."""
    if size is not None and largest >= size:
        raise BadRequest(f"Token ids must be below {size}, the size of the vocabulary.", code="invalid_value")


def _lists(value: object) -> Iterator[list[int]]:
    """Return the lists of integers in a member: the member itself, or its items."""
    if not isinstance(value, list) or not value:
        return
    if all(type(item) is int for item in value):
        yield value
    for item in value:
        if isinstance(item, list) and item and all(type(each) is int for each in item):
            yield item


def _outside(name: str) -> BadRequest:
    return BadRequest(f"`{name}` has a negative token id.", param=name, code="invalid_value")


OBJECT_BYTES: Final = 240
LIST_BYTES: Final = 72
ITEM_BYTES: Final = 48
"""Bytes of a Python object without its contents. An item is a number or a short text."""
OBJECT_BYTES_LIMIT: Final = 96 * 2**20
"""Bytes of parsed objects at most, not counting their texts."""
STEP_BYTES: Final = 2**20
"""Bytes counted in one step, during which the GIL is held for some tenths of a millisecond."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_weight(body: bytes) -> None:
    """Raise TooManyMembers if the objects of this JSON would take more than `OBJECT_BYTES_LIMIT` once parsed."""
    if _weight(body, 0, len(body)) <= OBJECT_BYTES_LIMIT or body.lstrip(b" \t\r\n")[:1] not in (b"{", b"["):
        return
    # Brackets and commas inside strings, such as code, are not structure and must not count. Each step holds the GIL,
    # so steps are small.
    weight = before = 0
    for string in _STRING.finditer(body):
        weight += ITEM_BYTES + _weight(body, before, string.start())
        before = string.end()
        if weight > OBJECT_BYTES_LIMIT:
            raise TooManyMembers
    if weight + _weight(body, before, len(body)) > OBJECT_BYTES_LIMIT:
        raise TooManyMembers


def _weight(body: bytes, start: int, end: int) -> int:
    if end - start > STEP_BYTES:
        return sum([_weight(body, at, min(at + STEP_BYTES, end)) for at in range(start, end, STEP_BYTES)])
    return (
        OBJECT_BYTES * body.count(b"{", start, end)
        + LIST_BYTES * body.count(b"[", start, end)
        + ITEM_BYTES * body.count(b",", start, end)
    )
