"""Which paths are served at which port, and which of them need the operator's key."""

import logging
from typing import Any

import pytest

from router.config.settings import Settings
from router.control.operator_access import OperatorAccess, admin_api_is_open
from router.errors import HostNotAllowed, RouterError, Unauthorized, UnknownPath

KEY = "operator-key-0123456789"
OPERATORS = [
    "/metrics",
    "/fairness",
    "/fairness/history",
    "/workers",
    "/workers/w",
    "/explain/x",
    "/sessions",
    "/config",
    "/usage",
    "//metrics",
]
EVERYONE = ["/health", "/ready", "/v1/models", "/v1/usage", "/openapi.json", "/metricsx", "/"]
PUBLIC = "0.0.0.0"


def refusal(
    path: str, port: int = 8000, key: str | None = None, host_header: bytes = b"", **settings: Any
) -> type[RouterError] | None:
    """Return how a call is refused; None if it is served. `port`: at which it arrives."""
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    headers += [(b"host", host_header)] if host_header else []
    access = OperatorAccess(Settings.model_validate(settings))
    try:
        access.check({"type": "http", "path": path, "server": ("127.0.0.1", port), "headers": headers})
    except RouterError as error:
        return type(error)
    return None


@pytest.mark.parametrize("path", [*OPERATORS, *EVERYONE])
def test_on_loopback_everything_is_served_without_a_key(path: str) -> None:
    """Whoever is on this machine reads everything, as the quick start does."""
    assert refusal(path) is None
    assert refusal(path, admin_key=KEY) is None


@pytest.mark.parametrize("path", OPERATORS)
def test_at_a_public_address_operators_need_the_key(path: str) -> None:
    """Only the whole key opens what says something of all clients; without any key, nothing does."""
    given: dict[str, Any] = {"host": PUBLIC, "admin_key": KEY}
    assert refusal(path, **given) is Unauthorized
    assert refusal(path, key=KEY[:-1], **given) is Unauthorized
    assert refusal(path, key=KEY, **given) is None
    assert refusal(path, key=KEY, host=PUBLIC) is Unauthorized


@pytest.mark.parametrize("path", OPERATORS)
def test_a_port_of_their_own_needs_no_key(path: str) -> None:
    """With a port for operators, their paths are served there alone, and do not exist where clients call."""
    given: dict[str, Any] = {"host": PUBLIC, "admin_port": 9000}
    assert refusal(path, 9000, **given) is None
    assert refusal(path, 8000, **given) is UnknownPath
    assert refusal(path, 8000, key=KEY, admin_key=KEY, **given) is UnknownPath


def test_a_web_page_cannot_read_a_port_on_loopback_under_its_own_name() -> None:
    """A page whose name resolves to a loopback address is refused there, also where clients call a public address."""
    given: dict[str, Any] = {"host": PUBLIC, "admin_port": 9000, "admin_host": "127.0.0.1"}
    assert refusal("/metrics", 9000, host_header=b"evil.example:9000", **given) is HostNotAllowed
    assert refusal("/metrics", 9000, host_header=b"LOCALHOST:9000", **given) is None
    assert refusal("/metrics", 9000, host_header=b"router:9000", allowed_hosts=["router"], **given) is None
    assert refusal("/metrics", 9000, host_header=b"router:9000", host=PUBLIC, admin_port=9000) is None


def test_the_page_asks_for_the_key_itself() -> None:
    """Its files come without the key, as a browser cannot send it with them; what they show does not."""
    given: dict[str, Any] = {"host": PUBLIC, "admin_key": KEY}
    for path in ("/ui", "/ui/", "/ui/main.js", "/ui/uplot/uPlot.esm.js"):
        assert refusal(path, **given) is None
    for path in ("/ui/events", "/ui/history", "/ui/clients", "/ui/clients/"):
        assert refusal(path, **given) is Unauthorized
        assert refusal(path, key=KEY, **given) is None
        assert refusal(path, host=PUBLIC) is Unauthorized, "nobody reads them without any key"
    assert refusal("/ui/", host=PUBLIC, admin_port=9000) is UnknownPath


@pytest.mark.parametrize("path", EVERYONE)
def test_what_is_for_everyone_is_at_both_ports(path: str) -> None:
    """Health and models are answered wherever they are asked for."""
    for port in (8000, 9000):
        assert refusal(path, port, host=PUBLIC, admin_port=9000) is None


def test_metrics_that_nobody_can_read_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The log says what to set if neither a key nor a port opens them."""
    with caplog.at_level(logging.WARNING):
        OperatorAccess(Settings(host=PUBLIC))
    assert "--admin-port" in caplog.text


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, False),
        ({"admin_key": KEY}, True),
        ({"admin_key": KEY, "host": PUBLIC}, False),
        ({"admin_key": KEY, "host": PUBLIC, "admin_on_public": True}, True),
        ({"admin_key": KEY, "host": PUBLIC, "admin_port": 9000}, True),
        ({"host": PUBLIC, "admin_port": 9000}, False),
    ],
)
def test_admin_calls_need_a_key_and_a_fitting_address(settings: dict[str, Any], is_open: bool) -> None:
    """What changes the router always needs the key, and on a public address a port of its own or consent."""
    assert admin_api_is_open(Settings.model_validate(settings)) == is_open
