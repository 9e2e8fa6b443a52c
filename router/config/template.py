"""Writes settings as a YAML file with a comment for every key, for `d2lpm config`.

The file is written line by line: ruamel.yaml keeps comments, but cannot comment out a key that has its default.
"""

import textwrap
from collections.abc import Iterator, Mapping
from inspect import getdoc
from typing import Final

import yaml
from pydantic import BaseModel, SecretStr

from router.config.policy_names import parameter_groups
from router.config.sections import SECTIONS
from router.config.settings import Settings
from router.config.sources import Key, groups, keys

WIDTH: Final = 110
"""Width of a comment, in columns."""
HEAD: Final = """\
# The settings of d2lpm-router, printed by `d2lpm config`. A key behind `#` has its default; remove the `#` to change
# it. Each key is also a flag and an environment variable, which override this file. `d2lpm check FILE` checks this
# file and the flags of its workers.
"""


def commented(settings: Settings) -> str:
    """Return a file that yields these settings; keys with their default are commented out.

    Secrets, the workers' own keys included, are left out: a comment stands for each.
    """
    values = settings.model_dump(mode="json")
    lines = [HEAD.rstrip("\n")]
    by_name = {key.path[0]: key for key in keys() if len(key.path) == 1}
    for section in SECTIONS:
        lines += ["", f"# ---- {section.title} ----"]
        for name in (*section.basic, *section.advanced):
            if name != "config":
                lines += ["", *_prose(by_name[name].about, "")]
                lines += _setting(by_name[name], getattr(settings, name), values[name])
    for name, kind in groups().items():
        lines += ["", f"# ---- Parameters of {name} ----"]
        lines += ["", *_group(name, getdoc(kind) or "", getattr(settings, name), values[name])]
    return "\n".join(lines) + "\n"


def given(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield each setting that differs from its default: its name in the file, its value, and its help text."""
    values = settings.model_dump(mode="json")
    for key in keys():
        owner, written = (
            (settings, values) if len(key.path) == 1 else (getattr(settings, key.path[0]), values[key.path[0]])
        )
        value = getattr(owner, key.path[-1])
        if value != key.default and key.path != ("config",):
            hidden = isinstance(value, SecretStr)
            yield (
                ".".join(key.path),
                "(a secret)" if hidden else _written(written[key.path[-1]]),
                " ".join(key.about.split()),
            )


def unread(settings: Settings, *policies: str) -> list[str]:
    """Return the parameters that differ from their defaults and that none of these policies reads."""
    read = frozenset[str]().union(*map(parameter_groups, policies))
    return [name for name, _, _ in given(settings) if "." in name and name.partition(".")[0] not in read]


def _group(name: str, about: str, value: object, values: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of one group of policy parameters."""
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
        return [f"# (It is set, but not shown here: set it as {key.variable}, or in this file.)", f"#{name}:"]
    if value == key.default:
        return [f"#{name}: {'' if written is None else _written(written)}".rstrip()]
    if isinstance(value, tuple) and isinstance(written, list):
        return [f"{name}:", *(f"  - {_entry(one, text)}" for one, text in zip(value, written, strict=True))]
    return [f"{name}: {_written(written)}"]


def _entry(value: object, written: object) -> str:
    """Write one entry of a list; a worker with nothing but a URL is written as the URL."""
    if not isinstance(value, BaseModel) or not isinstance(written, dict):
        return _written(written)
    if type(value).model_validate({"url": written["url"]}) == value:
        return _written(written["url"])
    public = {name for name in written if not isinstance(getattr(value, name), SecretStr)}
    given = {name: text for name, text in written.items() if text not in (None, "") and name in public}
    return _written(given) + ("" if public == written.keys() else " # its api_key is not shown here")


def _written(value: object) -> str:
    """Write a value as one line of YAML, for a loader that reads every scalar as text."""
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _prose(text: str, indent: str) -> Iterator[str]:
    """Yield the lines of a comment, each paragraph rewrapped."""
    for paragraph in text.split("\n\n"):
        yield from textwrap.wrap(
            " ".join(paragraph.split()),
            WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_long_words=False,
            break_on_hyphens=False,
        )
