"""A model's own tokenizer and chat template, read from its folder: the token ids that these two alone determine.

What an engine does to a prompt before its template differs between engines and versions: tools, tool calls, and parts
that are not text. Such prompts are declined here. For all others, the template is rendered as `transformers` does.
Special tokens are added by the template to a chat, and by the tokenizer to a plain text.
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
    """Tokenizes texts and chats. Thread-safe, because it is immutable."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json and the chat template, if there is one. Raises ConfigError if they cannot be read."""
        try:
            # Read here, since the library does not say which file is missing.
            self._tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
            config = _config(folder)
            source = _template(folder, config)
            self._template = None if source is None else _compile(source)
        except OSError as error:
            raise ConfigError(f"tokenizer: {error.filename}: {error.strerror}") from None
        except Exception as error:  # the library raises plain Exception for an unreadable file
            raise ConfigError(f"tokenizer {folder}: {error}") from None
        self._special = {name: token for name in ("bos_token", "eos_token") if (token := _token(config.get(name)))}

    def text(self, prompt: str, special: bool) -> list[int]:
        """Return the token ids of a plain text; `special`: with the special tokens around it."""
        return list(self._tokenizer.encode(prompt, add_special_tokens=special).ids)

    def chat(self, messages: object, variables: Mapping[str, Any]) -> list[int] | None:
        """Return the token ids of a chat, or None if it is declined. `variables`: passed on to the template."""
        if self._template is None or not isinstance(messages, list) or not all(map(_is_plain, messages)):
            return None
        try:
            context = {"add_generation_prompt": True, **self._special, **variables}
            return self.text(self._template.render(messages=messages, tools=None, documents=None, **context), False)
        except Exception:  # a template may raise anything; the engine will reject the call with its own error
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
    """Return the source of the chat template: a file, or an entry of the configuration, which may be one of several."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    configured = config.get("chat_template")
    if isinstance(configured, list):
        configured = next((each["template"] for each in configured if each.get("name") == "default"), None)
    return None if configured is None else str(configured)


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


def _token(configured: object) -> str | None:
    """Return a special token's text, which may be in an object with its properties."""
    text = configured.get("content") if isinstance(configured, dict) else configured
    return text if isinstance(text, str) else None
