"""Readers of a request body's members, whose errors name the member at fault.

Engines take more than their schema says: `stream: 1`, or `"5"` and 5.0 for an integer. So do these readers, or the
router would refuse a call that an engine serves.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from router.errors import BadRequest

Fields = dict[str, Any]
"""A parsed body. Of a repeated member the last counts, as in the engines."""
ADAPTER: Final = "lora_path"
TOO_LARGE: Final = 2.0**64
"""orjson parses integers from here on as floats."""
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_WHOLE: Final = re.compile(r"\s*+([+-]?\d{1,19})(?:\.0*+)?\s*+", re.ASCII)
TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})


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
    """The model that a body names; empty if it names none, so that any may serve it. Raises BadRequest."""
    return text(fields, "model") or ""


def adapters(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The adapters that a body names beside its model: one, or one per prompt (SGLang's `lora_path`)."""
    if ADAPTER not in fields:
        return ()
    value = fields[ADAPTER]
    each = value if isinstance(value, list) else [value]
    if not all(one is None or isinstance(one, str) for one in each):
        raise wrong_type(ADAPTER, "a string or a list of strings")
    return tuple(dict.fromkeys(one for one in each if one))


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
    """The whole number that engines read in a value: an integer, 5.0 or "5"; None if there is none."""
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
    """The objects in a list; empty if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def dump(value: object, param: str) -> bytes:
    """Serialise a parsed value compactly, in the client's order of members. Raises BadRequest if nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # orjson parses more levels than it serialises
        raise BadRequest(f"`{param}` is nested too deeply.", param=param, code="invalid_value") from None


def wrong_type(param: str, expected: str) -> BadRequest:
    return BadRequest(f"`{param}` must be {expected}.", param=param, code="invalid_type")
