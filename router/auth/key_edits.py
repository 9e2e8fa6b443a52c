"""Edits the clients file and leaves the rest of its text, comments included, unchanged.

Each edit replaces the text of one value, or inserts lines, at positions that the parser reports. The result is parsed
again and must differ from the old content by exactly that edit; otherwise nothing is written. The file is replaced
atomically, with mode 0600, under a lock. ruamel.yaml is not used because it rewrites the whole document: tried on a
file with comments, adding a client changed the indents and spaces of three other lines, and put the client behind the
comment that heads the next section.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import yaml

from router.auth.identity import KEY_PREFIX
from router.auth.keys_file import REVOKED, ClientsFile, hash_of, parse, valid_name
from router.errors import ConfigError
from router.runtime.atomic_file import replace_file
from router.runtime.mistakes import did_you_mean

INDENT: Final = "  "
PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return KEY_PREFIX.decode() + secrets.token_urlsafe(32)


def add(path: Path, name: str, fields: Mapping[str, str], models: Sequence[str]) -> str:
    """Add a client and return its key. `fields` are named as in the file, nested ones with dots."""
    _check_name(name)
    key = new_key()
    entry = _lines_of({"key": hash_of(key), **fields}, models)

    def change(text: str, before: ClientsFile) -> str:
        if name in before.clients:
            raise ConfigError(f"there is a client {name} already; `rotate` gives it a new key")
        return _with_entry(text, name, entry)

    _edit(path, name, change)
    return key


def revoke(path: Path, name: str) -> None:
    """Revoke the client's keys; the rest of its entry stays."""
    _edit(path, name, lambda text, _: _with_key(text, name, REVOKED))


def rotate(path: Path, name: str, grace: float, now: float) -> str:
    """Give a client a new key and return it; the old keys stay valid for `grace` seconds."""
    key = new_key()

    def change(text: str, before: ClientsFile) -> str:
        old = before.clients[name].key if name in before.clients and grace else ()
        until = now + grace
        ends = [(each.digest, until if each.until is None else min(until, each.until)) for each in old]
        kept = [f"sha256:{digest.hex()} until {_time(end)}" for digest, end in ends if end > now]
        hashes = [_scalar(each) for each in (hash_of(key), *kept)]
        return _with_key(text, name, f"[{', '.join(hashes)}]" if kept else hashes[0])

    _edit(path, name, change)
    return key


def _edit(path: Path, name: str, change: Callable[[str, ClientsFile], str]) -> None:
    with _locked(path.resolve()) as real:
        try:
            text = real.read_text("utf-8") if real.exists() else ""
            before = parse(text)
            after = change(text, before)
            _check(before, parse(after), name)
            replace_file(real, [after.encode()])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {getattr(error, 'strerror', 'not UTF-8')}") from None


def _check(before: ClientsFile, after: ClientsFile, name: str) -> None:
    """Raise ConfigError unless the edit changed this client and nothing else."""
    if name not in after.clients or _without(before, name) != _without(after, name):
        raise ConfigError("the file's layout is not supported by this command; edit the file by hand")


def _without(file: ClientsFile, name: str) -> ClientsFile:
    """Return the content of a file without one client."""
    return file.model_copy(update={"clients": {each: entry for each, entry in file.clients.items() if each != name}})


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Lock the file's directory, so that no other process edits a clients file in it meanwhile."""
    try:
        directory = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(directory)


def _with_entry(text: str, name: str, entry: list[str]) -> str:
    """Return the text with a new client after the others."""
    text = text if not text or text.endswith("\n") else text + "\n"
    clients = _value(_root(text), "clients")
    if clients is None:
        return text + "clients:\n" + _block(name, entry, INDENT)
    if not isinstance(clients, yaml.MappingNode):  # `clients:` without a value
        at = _end_of_line(text, clients.start_mark.index)
        return text[:at] + _block(name, entry, INDENT) + text[at:]
    if clients.flow_style:
        if clients.value:
            raise ConfigError("`clients` is written in braces; put each client on lines of its own")
        end = clients.end_mark.index
        rest = _end_of_line(text, end)
        return text[: clients.start_mark.index] + text[end:rest] + _block(name, entry, INDENT) + text[rest:]
    at = _end_of_line(text, _last_index(clients))
    return text[:at] + _block(name, entry, " " * clients.start_mark.column) + text[at:]


def _with_key(text: str, name: str, value: str) -> str:
    """Return the text with another value for the key of a client."""
    clients = _value(_root(text), "clients")
    client = _value(clients, name)
    if client is None:
        names = [key.value for key, _ in clients.value] if isinstance(clients, yaml.MappingNode) else []
        raise ConfigError(f"there is no client {name}{did_you_mean(name, names)}")
    if (old := _value(client, "key")) is not None:
        return text[: old.start_mark.index] + value + text[_last_index(old) :]
    if not isinstance(client, yaml.MappingNode) or not client.value:
        raise ConfigError(f"the layout of client {name} is not supported by this command; edit the file by hand")
    at = client.value[0][0].start_mark
    between = ", " if client.flow_style else "\n" + " " * at.column
    return text[: at.index] + f"key: {value}{between}" + text[at.index :]


def _root(text: str) -> yaml.Node | None:
    # BaseLoader keeps every scalar as text; the nodes carry their positions.
    return yaml.compose(text, yaml.BaseLoader)


def _value(node: yaml.Node | None, name: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _last_index(node: yaml.Node) -> int:
    """Return where the node's last scalar ends; a block node itself ends only where the next token begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_index(last[1] if isinstance(node, yaml.MappingNode) else last)
    return node.end_mark.index


def _end_of_line(text: str, index: int) -> int:
    """Return where the next line begins."""
    return text.index("\n", index) + 1


def _block(name: str, entry: list[str], indent: str) -> str:
    return "".join([f"{indent}{name}:\n", *(f"{indent}{INDENT}{line}\n" for line in entry)])


def _lines_of(fields: Mapping[str, str], models: Sequence[str]) -> list[str]:
    """Return a client's entry, line by line."""
    plain = [f"{field}: {_scalar(value)}" for field, value in fields.items() if "." not in field]
    limits = [f"{field.partition('.')[2]}: {_scalar(value)}" for field, value in fields.items() if "." in field]
    listed = [f"models: [{', '.join(map(_scalar, models))}]"] if models else []
    return plain + listed + ([f"limits: {{{', '.join(limits)}}}"] if limits else [])


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar, in quotes unless it is a plain word or number."""
    if PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_name(name: str) -> None:
    try:
        valid_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
