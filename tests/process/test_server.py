"""The HTTP server of each process, as a process: what a signal does at which moment."""

import asyncio
import signal
import subprocess
import sys

import aiohttp
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from router.front.drain import Drain
from router.process.server import DrainingServer, EndSignals
from tests.support.running import listening

PROGRAM = """
import os, signal
import uvicorn
from router.front.drain import Drain
from router.process.server import DrainingServer, defer_termination

async def app(scope, receive, send):
    pass

defer_termination()
os.kill(os.getpid(), signal.SIGTERM)
drain = Drain(60.0)
config = uvicorn.Config(app, port=0, lifespan="off", log_config=None)
server = DrainingServer(config, drain, lambda: print("started"), drains_early={early})
server.run()
print("drained" if drain.begun else "not drained")
"""


@pytest.mark.parametrize(("early", "printed"), [(True, "started drained"), (False, "started not drained")])
def test_a_signal_that_comes_before_the_server_ends_it(*, early: bool, printed: str) -> None:
    """It is not lost, or the process would run until it is killed. Where something may run already, it drains."""
    program = PROGRAM.format(early=early)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == printed.split()


async def test_a_front_that_has_drained_refuses_calls_until_the_others_have() -> None:
    """It says once that it has drained, answers new connections, and ends when it is told to."""
    said = asyncio.Event()

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's signature
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    drain = Drain(60.0)
    config = uvicorn.Config(refuse, port=0, lifespan="off", log_config=None)
    server = DrainingServer(config, drain, drain.begin, on_drained=said.set)
    with listening() as listener:
        serving = asyncio.create_task(server.serve([listener]))
        await said.wait()
        for _ in range(3):
            said.clear()
            async with aiohttp.request("GET", "http://{}:{}".format(*listener.getsockname())) as answer:
                assert answer.status == 503
        assert not said.is_set()
        assert not serving.done()
        server.let_end()
        await serving


def test_a_signal_that_is_sent_twice_counts_once() -> None:
    """Another kind of signal is a second one at once, the same kind after a moment."""
    now = 0.0
    signals = EndSignals(lambda: now)
    assert signals.is_new(signal.SIGTERM)
    assert not signals.is_new(signal.SIGTERM)
    assert signals.is_new(signal.SIGINT)
    now = 0.11
    assert signals.is_new(signal.SIGINT)


@pytest.mark.parametrize(("signals", "cut"), [("TERM TERM", False), ("TERM INT", True)])
def test_only_a_second_signal_cuts_calls(*, signals: str, cut: bool) -> None:
    """One that is sent twice begins the drain, no more."""
    drain = Drain(60.0)
    server = DrainingServer(uvicorn.Config("app", log_config=None), drain, lambda: None)
    server.started = True
    for name in signals.split():
        server.handle_exit(signal.Signals[f"SIG{name}"], None)
    assert drain.begun
    assert server.should_exit == cut
