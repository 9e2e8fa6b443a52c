"""Changes to the file of clients that leave the rest of its text, with its comments, as it is.

Each change replaces the bytes of one value, or puts in lines, where the parser says that these stand. What comes of it
is parsed again, and must be what was there with that one change; else nothing is written. The file is replaced as a
whole, in one step and with mode 0600, while nobody else changes it. ruamel.yaml is not used, since it writes the whole
document anew: tried on a file with comments, a client more changed the indents and spaces of three other lines, and
stood behind the comment that heads the next section.
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

INDENT: Final = "  "
PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_key() -> str:
    """A key of 256 random bits."""
    return KEY_PREFIX.decode() + secrets.token_urlsafe(32)


def add(path: Path, name: str, fields: Mapping[str, str], models: Sequence[str]) -> str:
    """A new client with these fields; returns its key. `fields`: as they stand in the file, nested ones by dots."""
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
    """The client's keys open nothing any more; the rest of its entry stays."""
    _edit(path, name, lambda text, _: _with_key(text, name, REVOKED))


def rotate(path: Path, name: str, grace: float, now: float) -> str:
    """A new key for a client, which is returned; the old ones stay good for so many seconds."""
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
    with _alone(path.resolve()) as real:
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
    """Raise ConfigError unless the change is one of this client and of nothing else."""
    others = {each: entry for each, entry in before.clients.items() if each != name}
    now = {each: entry for each, entry in after.clients.items() if each != name}
    if name not in after.clients or (others, before.groups, before.anonymous) != (now, after.groups, after.anonymous):
        raise ConfigError("it is written in a way that cannot be changed here; change it by hand")


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Nobody else who uses this changes a file of the same directory meanwhile."""
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
    """The text with a new client behind the others."""
    text = text if not text or text.endswith("\n") else text + "\n"
    clients = _value(_root(text), "clients")
    if clients is None:
        return text + "clients:\n" + _block(name, entry, INDENT)
    if not isinstance(clients, yaml.MappingNode):  # nothing is behind it
        at = _end_of_line(text, clients.start_mark.index)
        return text[:at] + _block(name, entry, INDENT) + text[at:]
    if clients.flow_style:
        if clients.value:
            raise ConfigError("`clients` is written in braces; put each on lines of its own")
        end = clients.end_mark.index
        rest = _end_of_line(text, end)
        return text[: clients.start_mark.index] + text[end:rest] + _block(name, entry, INDENT) + text[rest:]
    at = _end_of_line(text, _last_index(clients))
    return text[:at] + _block(name, entry, " " * clients.start_mark.column) + text[at:]


def _with_key(text: str, name: str, value: str) -> str:
    """The text with another value for the key of a client."""
    client = _value(_value(_root(text), "clients"), name)
    if client is None:
        raise ConfigError(f"there is no client {name}")
    if (old := _value(client, "key")) is not None:
        return text[: old.start_mark.index] + value + text[_last_index(old) :]
    if not isinstance(client, yaml.MappingNode) or not client.value:
        raise ConfigError(f"the client {name} is written in a way that cannot be changed here; change it by hand")
    at = client.value[0][0].start_mark
    between = ", " if client.flow_style else "\n" + " " * at.column
    return text[: at.index] + f"key: {value}{between}" + text[at.index :]


def _root(text: str) -> yaml.Node | None:
    # As another parser would put it together, with the places of everything.
    return yaml.compose(text, yaml.BaseLoader)


def _value(node: yaml.Node | None, name: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _last_index(node: yaml.Node) -> int:
    """Where the last of what a node holds ends; a block's own end is only where the next thing begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_index(last[1] if isinstance(node, yaml.MappingNode) else last)
    return node.end_mark.index


def _end_of_line(text: str, index: int) -> int:
    """Where the next line begins."""
    return text.index("\n", index) + 1


def _block(name: str, entry: list[str], indent: str) -> str:
    return "".join([f"{indent}{name}:\n", *(f"{indent}{INDENT}{line}\n" for line in entry)])


def _lines_of(fields: Mapping[str, str], models: Sequence[str]) -> list[str]:
    """A client's entry, line by line."""
    plain = [f"{field}: {_scalar(value)}" for field, value in fields.items() if "." not in field]
    limits = [f"{field.partition('.')[2]}: {_scalar(value)}" for field, value in fields.items() if "." in field]
    listed = [f"models: [{', '.join(map(_scalar, models))}]"] if models else []
    return plain + listed + ([f"limits: {{{', '.join(limits)}}}"] if limits else [])


def _scalar(text: str) -> str:
    """A text as YAML, in quotes unless it is a plain word or number."""
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
