"""Lets a client leave before its answer is complete."""

import json

import httpx

from ..processes import Server
from ..wire import COMPLETIONS, WORKER_KEY


def leave_amid_a_stream(server: Server) -> None:
    """Read the first event of a long answer, and close the connection."""
    body = {"model": "tiny", "prompt": "so it goes", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {WORKER_KEY}"}
    with (
        httpx.Client(timeout=30.0, trust_env=False) as client,
        client.stream("POST", server.url + COMPLETIONS, content=json.dumps(body), headers=headers) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        while not next(lines).startswith("data: "):
            pass
