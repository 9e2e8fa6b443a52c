"""The command `d2lpm cluster`: shows who leads a cluster, and hands its lead over."""

import argparse
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from router.errors import ConfigError

TIMEOUT_SECONDS: Final = 10.0
KEY_VARIABLE: Final = "D2LPM_ADMIN_KEY"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cluster`."""
    parser.epilog = f"Sends the operator's key if {KEY_VARIABLE} is set."
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, about, run in (
        ("status", "show who leads, and which replicas wait", _status),
        ("handover", "have another replica lead", _hand_over),
    ):
        action = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        action.add_argument("url", metavar="URL", help="address of any replica, for example http://127.0.0.1:8000")
        action.set_defaults(run=run)


def _status(options: Mapping[str, object]) -> int:
    print(shown(_call("GET", str(options["url"]), "/cluster")))
    return 0


def _hand_over(options: Mapping[str, object]) -> int:
    print(f"{_call('POST', str(options['url']), '/cluster/handover')['left']} hands over")
    return 0


def shown(report: Mapping[str, Any]) -> str:
    """Return the report of /cluster as lines."""
    since = datetime.fromtimestamp(report["since"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    age = report["save_age"]
    fronts = ", ".join(f"{count} of {name}" for name, count in report["fronts"].items())
    rows = {
        "leader": f"{report['leader']} at {report['address']}, since {since}",
        "epoch": report["epoch"],
        "fronts": fronts or "none",
        "waiting": ", ".join(report["waiting"]) or "no replica",
        "store": f"{report['store']}, saved {'never' if age is None else f'{age:.1f} s ago'}",
    }
    return "\n".join(f"{name:8} {value}" for name, value in rows.items())


def _call(method: str, url: str, path: str) -> dict[str, Any]:
    """Raises ConfigError if there is no answer, or none of a cluster."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.request(method, url.rstrip("/") + path, headers=headers, timeout=TIMEOUT_SECONDS)
        body: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} does not answer: {error or type(error).__name__}") from None
    except ValueError:
        raise ConfigError(f"{url} does not answer as a router") from None
    if not answer.is_success:
        raise ConfigError(f"{url}: {body['error']['message']}")
    return body
