"""Checks of single values in the settings. Their errors say what a value must be."""

import re
from typing import Final

from pydantic import AfterValidator, BeforeValidator


def number_or(*words: str) -> BeforeValidator:
    """Return a validator that refuses all but these words and numbers from 1 on: the error of a union names types."""

    def check(given: object) -> object:
        if given in words or re.fullmatch("[1-9][0-9]*", str(given)):
            return given
        raise ValueError(f"must be {', '.join(words)} or a whole number from 1 on")

    return BeforeValidator(check)


def matching(pattern: str, wanted: str) -> AfterValidator:
    """Return a validator that refuses texts which do not match a pattern as a whole: they must be what is `wanted`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {wanted}")
        return text

    return AfterValidator(check)


ORIGIN: Final = matching(r"\*|https?://[^\s/*]+", "an origin such as https://chat.example, or *")
HEADER_NAME: Final = matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "the name of a header")
SESSION_LABEL: Final = matching(
    r"body\.prompt_cache_key|body\.metadata\.user_id|[a-z0-9_-]{1,64}",
    "the name of a header in lower case, body.prompt_cache_key or body.metadata.user_id",
)
NAMESPACE: Final = matching("[a-z0-9-]{1,63}", "a name of lower-case letters, digits and dashes")


def alias_pair(text: str) -> str:
    """Return the text. Raises ValueError unless it is NAME=MODEL."""
    name, _, model = text.partition("=")
    if not name or not model:
        raise ValueError(f"{text!r} is not NAME=MODEL")
    return text


def one_model_each(aliases: tuple[str, ...]) -> tuple[str, ...]:
    """Return the aliases. Raises ValueError if two have the same name."""
    names = [text.partition("=")[0] for text in aliases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed twice")
    return aliases
