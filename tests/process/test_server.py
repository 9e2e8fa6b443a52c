"""The HTTP server of each process, as a process: what a signal does at which moment."""

import subprocess
import sys

import pytest

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
