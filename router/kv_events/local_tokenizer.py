"""A model's own tokenizer and chat template, from its folder: the token ids of what they alone decide.

What an engine does to a prompt before its template differs between engines and versions: tools, tool calls, parts that
are no text. Such prompts are declined here. For the rest, the template is rendered as `transformers` does, and special
tokens are added by the template to a chat, and by the tokenizer to a plain text.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from router.errors import ConfigError

PLAIN_MESSAGE: Final = frozenset({"role", "content"})


class LocalTokenizer:
    """Thread-safe: nothing of it changes."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json and, where there is one, the chat template. Raises ConfigError."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _config(folder)
            source = _template(folder, config)
            self._template = None if source is None else _compile(source)
        except Exception as error:  # the library raises plain Exception for a file that it cannot read
            raise ConfigError(f"tokenizer {folder}: {error}") from None
        self._special = {name: token for name in ("bos_token", "eos_token") if (token := _token(config.get(name)))}

    def text(self, prompt: str, special: bool) -> list[int]:
        """Token ids of a plain text, with the special tokens around it or without."""
        return list(self._tokenizer.encode(prompt, add_special_tokens=special).ids)

    def chat(self, messages: object, more: Mapping[str, Any]) -> list[int] | None:
        """Token ids of a chat, `more` being what the template is told beside it; None where it is declined."""
        if self._template is None or not isinstance(messages, list) or not all(map(_is_plain, messages)):
            return None
        try:
            told = {"add_generation_prompt": True, **self._special, **more}
            return self.text(self._template.render(messages=messages, tools=None, documents=None, **told), False)
        except Exception:  # whatever a template does; the engine refuses it too, in its own words
            return None


def _is_plain(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == PLAIN_MESSAGE
        and all(isinstance(text, str) for text in message.values())
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json is not an object")
    return config


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The source of the chat template: a file of its own, or in the configuration, where it may be one of several."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        given = next((each["template"] for each in given if each.get("name") == "default"), None)
    return None if given is None else str(given)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment.from_string(source)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _token(given: object) -> str | None:
    """A special token's text, which may stand in an object with its properties."""
    text = given.get("content") if isinstance(given, dict) else given
    return text if isinstance(text, str) else None
