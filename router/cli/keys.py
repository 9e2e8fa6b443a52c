"""The command `d2lpm keys`: who may call, and with how much of a share."""

import argparse
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from router.auth import key_edits
from router.auth.keys_file import ClientEntry, LimitsEntry, read_clients

FIELDS: Final = ("weight", "group", "expires")
LIMITS: Final = ("in_flight", "requests_per_minute", "tokens_per_minute")
Options = Mapping[str, Any]


def add_commands(keys: argparse.ArgumentParser) -> None:
    """Give a parser the subcommands; each sets `run`, which takes the namespace and returns the exit code."""
    commands = keys.add_subparsers(metavar="COMMAND", required=True)
    add = _command(commands, "add", "make a client with a key, which is printed this once", _add)
    add.add_argument("name", metavar="NAME", help="of the client, in metrics and reports")
    add.add_argument("--weight", metavar="X", help="its share relative to others, or within its group (default: 1)")
    add.add_argument("--group", metavar="G", help="one of the file's groups, whose weight its members share")
    add.add_argument("--expires", metavar="TIME", help="like 2027-01-31 or 2027-01-31T12:00:00Z")
    add.add_argument("--in-flight", metavar="N", help="calls that may wait or run at a time")
    add.add_argument("--requests-per-minute", metavar="N")
    add.add_argument("--tokens-per-minute", metavar="N", help="of input and output")
    add.add_argument("--model", metavar="M", action="append", default=[], help="that it may call; once for each")
    _command(commands, "list", "show the clients, without their keys", _list)
    revoke = _command(commands, "revoke", "let a client's keys open nothing any more", _revoke)
    revoke.add_argument("name", metavar="NAME")
    rotate = _command(commands, "rotate", "give a client a new key, which is printed this once", _rotate)
    rotate.add_argument("name", metavar="NAME")
    rotate.add_argument(
        "--grace", type=float, default=0.0, metavar="SECONDS", help="for which the old key stays good (default: 0)"
    )


def _command(commands: Any, name: str, about: str, run: Callable[[Options], int]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    command.add_argument("--file", type=Path, required=True, help="the file of clients that `serve --clients` reads")
    command.set_defaults(run=run)
    return command


def _add(options: Options) -> int:
    given = {field: options[field] for field in FIELDS} | {f"limits.{limit}": options[limit] for limit in LIMITS}
    fields = {field: value for field, value in given.items() if value is not None}
    print(key_edits.add(options["file"], options["name"], fields, options["model"]))
    return 0


def _revoke(options: Options) -> int:
    key_edits.revoke(options["file"], options["name"])
    return 0


def _rotate(options: Options) -> int:
    print(key_edits.rotate(options["file"], options["name"], options["grace"], time.time()))
    return 0


def _list(options: Options) -> int:
    file = read_clients(options["file"])
    rows: list[tuple[str, ...]] = [("NAME", "KEY", "WEIGHT", "GROUP", "EXPIRES", "LIMITS", "MODELS")]
    rows += [_row(name, client) for name, client in file.clients.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(name: str, client: ClientEntry) -> tuple[str, ...]:
    return (
        name,
        ",".join(key.digest.hex()[:12] for key in client.key) or "-",
        f"{client.weight:g}",
        client.group or "-",
        "-" if client.expires is None else datetime.fromtimestamp(client.expires, UTC).strftime("%Y-%m-%dT%H:%MZ"),
        _told(client.limits) or "-",
        "all" if client.models is None else ",".join(client.models),
    )


def _told(limits: LimitsEntry) -> str:
    return ",".join(f"{name}={value:g}" for name, value in limits if value is not None)
