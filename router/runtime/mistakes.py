"""What is wrong with what an operator has written, in plain words: unknown names, and values that do not fit.

The messages of pydantic name Python's types, so these replace them.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MUST_BE: Final = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "yes or no",
    "bool_type": "yes or no",
    "string_type": "one value, not a list or a mapping",
    "path_type": "one value, not a list or a mapping",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "tuple_type": "a list: [A, B], or a line for each entry that begins with a dash",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of names to values",
}
"""What a value must be, by pydantic's type of the error."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is nearest to this one, in any case of its letters; None if none is near."""
    spellings = {each.lower(): each for each in known}
    close = get_close_matches(word.lower(), spellings, n=1)
    return spellings[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known word nearest to this one, or an empty text if none is near."""
    meant = nearest(word, known)
    return f"; did you mean {meant}?" if meant else ""


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return an error about the unknown name of a `kind` of thing, with the nearest known name and then all of them."""
    return f"unknown {kind} {name!r}{did_you_mean(name, known)} (known: {', '.join(known) or 'none'})"


def refuse_unknown_keys(given: object, known: Iterable[str]) -> None:
    """Raise ValueError for the first key of a mapping that is not known; anything but a mapping passes."""
    names = set(known)
    for key in given if isinstance(given, dict) else ():
        if key not in names:
            raise ValueError(f"unknown key {key}{did_you_mean(str(key), names)}")


def place_in(location: Sequence[str | int]) -> Sequence[str]:
    """Return the names that lead to a value; the entries of a list are numbered from 1."""
    return [f"entry {part + 1}" if isinstance(part, int) else part for part in location]


def _has_unit(given: object) -> bool:
    return re.fullmatch(r"[0-9.]+ *[A-Za-z%]+", str(given)) is not None


def what_is_wrong(error: "ErrorDetails") -> str:
    """Return what a value must be, without the value, which could be a secret.

    If it must be one of a few words, the nearest of them is named.
    """
    kind, context = error["type"], error.get("ctx", {})
    if kind in MUST_BE:
        unit = ", without a unit" if kind in ("int_parsing", "float_parsing") and _has_unit(error["input"]) else ""
        return f"must be {MUST_BE[kind].format_map(context)}{unit}"
    if kind in ("literal_error", "enum"):
        words = re.findall("'([^']*)'", context["expected"])
        listed = f"{', '.join(words[:-1])} or {words[-1]}"
        return f"must be {listed}{did_you_mean(str(error['input']), words)}"
    if kind == "too_short" and context["field_type"] == "Value":  # pydantic calls the characters of a secret "items"
        return "must have at least {min_length} characters, not {actual_length}".format_map(context)
    if kind == "too_short":
        return "must have at least 1 entry" if context["min_length"] == 1 else error["msg"]
    if kind == "missing":
        return "is missing"
    return error["msg"].removeprefix("Value error, ")
