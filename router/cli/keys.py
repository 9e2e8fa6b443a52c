"""The command `d2lpm keys`, which manages clients, their keys and their shares."""

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from router.auth import key_edits
from router.auth.keys_file import ClientEntry, LimitsEntry, read_clients

FIELDS: Final = ("weight", "group", "expires")
LIMITS: Final = ("in_flight", "requests_per_minute", "tokens_per_minute")
MOST_GRACE: Final = 10 * 365 * 86_400
"""Seconds for which old keys can stay valid at most. Their end is written as a date, so there must be one."""
Options = Mapping[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `keys`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add = _command(commands, "add", "create a client with a key, which is printed only this once", _add)
    add.add_argument("name", metavar="NAME", help="name of the client, in metrics and reports")
    add.add_argument("--weight", metavar="X", help="its share relative to others, or within its group (default: 1)")
    add.add_argument("--group", metavar="G", help="one of the file's groups, whose members share a weight")
    add.add_argument("--expires", metavar="TIME", help="expiry, such as 2027-01-31 or 2027-01-31T12:00:00Z")
    add.add_argument("--in-flight", metavar="N", help="most calls that wait or run at a time")
    add.add_argument("--requests-per-minute", metavar="N", help="most calls per minute")
    add.add_argument("--tokens-per-minute", metavar="N", help="most input and output tokens per minute")
    add.add_argument(
        "--model", metavar="M", action="append", default=[], help="a model that it may call; repeat for more"
    )
    _command(commands, "list", "show the clients, without their keys", _list)
    revoke = _command(commands, "revoke", "revoke all keys of a client", _revoke)
    revoke.add_argument("name", metavar="NAME")
    rotate = _command(commands, "rotate", "give a client a new key, which is printed only this once", _rotate)
    rotate.add_argument("name", metavar="NAME")
    rotate.add_argument(
        "--grace",
        type=_grace,
        default=0.0,
        metavar="SECONDS",
        help="seconds for which old keys stay valid (default: 0)",
    )


def _command(commands: Any, name: str, about: str, run: Callable[[Options], int]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    command.add_argument("--file", type=Path, required=True, help="the clients file that `serve --clients` reads")
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


def _grace(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= MOST_GRACE:
            return seconds
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 to {MOST_GRACE}")


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
        _limits(client.limits) or "-",
        "all" if client.models is None else ",".join(client.models),
    )


def _limits(limits: LimitsEntry) -> str:
    return ",".join(f"{name}={value:g}" for name, value in limits if value is not None)
