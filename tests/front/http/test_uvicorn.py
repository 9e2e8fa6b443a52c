"""The part of uvicorn that `router/front/http` builds on, which is not its public interface.

The range of versions in pyproject.toml ends with the version that the tests run with, and begins with the oldest one
whose files are the same. A new version is to be tested before the range is widened.
"""

import ast
import asyncio
import inspect
import logging
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from router.front.http import connection, response_writer
from router.front.http.connection import ClientConnection
from router.front.http.response_writer import CorkedTransport
from router.process.server import DrainingServer

ROOT = Path(__file__).parents[3]


async def app(_scope: object, _receive: object, _send: object) -> None:
    """Serve nothing."""


def protocol() -> HttpToolsProtocol:
    """Return a protocol at the beginning of its first call."""
    made = HttpToolsProtocol(Config(app, log_config=None), ServerState(), {}, asyncio.get_running_loop())
    made.on_message_begin()
    return made


def cycle() -> RequestResponseCycle:
    """Return a call that has just begun."""
    log, transport = logging.getLogger(__name__), CorkedTransport(asyncio.Transport(), lambda _: None)
    return RequestResponseCycle(
        *({"type": "http"}, transport, FlowControl(transport), log, log, False, [], asyncio.Event(), False, True),  # type: ignore[arg-type]
        on_response=lambda: None,
    )


def attributes(of: set[str], module: ModuleType) -> set[str]:
    """Return the attributes that a module uses of the variables with these names."""
    tree = ast.parse((ROOT / f"{module.__name__.replace('.', '/')}.py").read_text("utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in of and not node.attr.startswith("__")
    }


def test_the_range_ends_with_the_version_under_test() -> None:
    """An upper bound is there, the version that is installed is below it, and no later minor version is."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (bounds,) = [each for each in dependencies if each.startswith("uvicorn")]
    found = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", bounds)
    assert found is not None, bounds
    minor = int(version("uvicorn").split(".")[1])
    assert int(found[1]) <= minor
    assert int(found[2]) == minor + 1


async def test_the_protocol_has_what_a_connection_uses() -> None:
    """Each attribute that a connection takes from its base class is there once a call begins."""
    made = protocol()
    own = set(vars(ClientConnection)) | set(ClientConnection.__annotations__)
    assigned = {
        target.attr
        for node in ast.walk(ast.parse(inspect.getsource(connection)))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }
    inherited = attributes({"self"}, connection) - own
    private = {name for name in inherited if name in assigned and not hasattr(made, name)}
    assert {name for name in inherited - private if not hasattr(made, name)} == set()
    assert {"parser", "cycle", "pipeline", "flow", "timeout_keep_alive_task"} <= inherited - private


async def test_a_call_has_what_the_writer_uses() -> None:
    """Each attribute that connections and the writer of answers use of a call is there once it has begun."""
    made = cycle()
    used = attributes({"cycle", "self.cycle", "active", "self._active"}, connection)
    used |= attributes({"cycle"}, response_writer) | attributes({"self._cycle"}, response_writer)
    assert {"disconnected", "more_body", "response_started", "chunked_encoding"} <= used
    assert {name for name in used if not hasattr(made, name)} == set()


@pytest.mark.parametrize(
    ("own", "base", "methods"),
    [
        (ClientConnection, HttpToolsProtocol, attributes({"super()"}, connection) - {"__init__"}),
        (DrainingServer, Server, {"startup", "on_tick", "handle_exit"}),
    ],
)
def test_methods_are_overridden_with_their_own_parameters(own: type, base: type, methods: set[str]) -> None:
    """The base class calls each with the arguments that the override takes."""
    assert len(methods) >= 3
    for name in methods:
        theirs = list(inspect.signature(getattr(base, name)).parameters)
        assert list(inspect.signature(getattr(own, name)).parameters) == theirs, name


def test_there_is_a_line_for_each_status() -> None:
    """An engine's status is passed on by its line."""
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    assert set(range(100, 600)) <= STATUS_LINE.keys()
