"""Settings as a YAML file with a comment for every key, for `d2lpm config`.

It is written line by line: ruamel.yaml can keep comments, but has none that stand for keys which are not there.
"""

import textwrap
from collections.abc import Iterator, Mapping
from inspect import getdoc
from typing import Final

import yaml
from pydantic import BaseModel, SecretStr

from router.config.settings import Settings
from router.config.sources import Key, groups, keys

WIDTH: Final = 110
"""Columns of a comment."""
HEAD: Final = """\
# The settings of d2lpm-router, as `d2lpm config` prints them. A line that begins with `#` and a letter has a default:
# take the `#` away to change it. Each key is also a flag and an environment variable, which count before this file;
# `d2lpm check FILE` says whether it is right, and whether the workers are.
"""


def commented(settings: Settings) -> str:
    """The file by which these settings are had; what is as by default is a comment.

    Secrets are left out: a comment stands for each. A worker's own key is one of them.
    """
    values = settings.model_dump(mode="json")
    lines = [HEAD.rstrip("\n")]
    for key in keys():
        if len(key.path) == 1 and key.path != ("config",):
            lines += ["", *_prose(key.about, ""), *_setting(key, getattr(settings, key.path[0]), values[key.path[0]])]
    for name, kind in groups().items():
        lines += ["", *_group(name, getdoc(kind) or "", getattr(settings, name), values[name])]
    return "\n".join(lines) + "\n"


def given(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """What is not as by default: its name in the file, its value in a line, and what it is."""
    values = settings.model_dump(mode="json")
    for key in keys():
        owner, told = (
            (settings, values) if len(key.path) == 1 else (getattr(settings, key.path[0]), values[key.path[0]])
        )
        value = getattr(owner, key.path[-1])
        if value != key.default and key.path != ("config",):
            hidden = isinstance(value, SecretStr)
            yield (
                ".".join(key.path),
                "(a secret)" if hidden else _written(told[key.path[-1]]),
                " ".join(key.about.split()),
            )


def _group(name: str, about: str, value: object, values: Mapping[str, object]) -> Iterator[str]:
    """One policy's parameters."""
    members = [key for key in keys() if key.path[0] == name and len(key.path) == 2]
    own = any(getattr(value, key.path[1]) != key.default for key in members)
    yield from _prose(about, "")
    yield f"{name}:" if own else f"#{name}:"
    for key in members:
        yield from _prose(key.about, "  ")
        off = "" if getattr(value, key.path[1]) != key.default else "#"
        yield f"{off}  {key.path[1]}: {_written(values[key.path[1]])}"


def _setting(key: Key, value: object, written: object) -> list[str]:
    name = key.path[0]
    if isinstance(value, SecretStr):
        return [f"# (It is set, and not shown here: give it as {key.variable}, or in this file.)", f"#{name}:"]
    if value == key.default:
        return [f"#{name}: {'' if written is None else _written(written)}".rstrip()]
    if isinstance(value, tuple) and isinstance(written, list):
        return [f"{name}:", *(f"  - {_entry(one, told)}" for one, told in zip(value, written, strict=True))]
    return [f"{name}: {_written(written)}"]


def _entry(value: object, written: object) -> str:
    """One of a list; a worker by its URL alone, where that says all."""
    if not isinstance(value, BaseModel) or not isinstance(written, dict):
        return _written(written)
    if type(value).model_validate({"url": written["url"]}) == value:
        return _written(written["url"])
    given = {name: told for name, told in written.items() if told and not isinstance(getattr(value, name), SecretStr)}
    hidden = any(isinstance(getattr(value, name), SecretStr) for name in written)
    return _written(given) + (" # its api_key is not shown here" if hidden else "")


def _written(value: object) -> str:
    """A value in one line of YAML, as this project's loader reads it: every scalar is text."""
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _prose(text: str, indent: str) -> Iterator[str]:
    """A comment; each paragraph is filled anew."""
    for paragraph in text.split("\n\n"):
        yield from textwrap.wrap(
            " ".join(paragraph.split()),
            WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_long_words=False,
            break_on_hyphens=False,
        )
