"""The servers that vLLM's tests ask for, started with the tests' own flags, and a router before them."""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.engine.fleet import ENGINE_START_SECONDS, Router
from tests.engine.processes import Server

from .fork_server import ForkedVllm, ForkServer
from .hub import ANSWER_TOKENS, GREEDY
from .results import NOT_STARTED

ROUTER_START_SECONDS = 120.0
OUR_FLAGS = (
    "--host=127.0.0.1",
    "--port={port}",
    "--dtype=float32",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--num-gpu-blocks-override=1024",  # 131,072 tokens; a GiB of cache each would be too much for several servers
)
"""What a CPU and a tiny model need, and nothing that an answer shows."""
TOOLS = "--tool-call-parser"
TOOL_DEFAULTS = {"max_new_tokens": ANSWER_TOKENS, **GREEDY, "repetition_penalty": 1.3}
"""Of servers with tools, whose tests set no limit. The penalty lets a greedy random model come to a schema's end."""
XGRAMMAR = "xgrammar"
NO_WHITESPACE = "--structured-outputs-config.disable_any_whitespace=true"
"""A random model would write it without end."""
ROUTER_FLAGS = ("--background-responses",)
"""Some tests compute a response in the background, which the router refuses unless asked."""


@dataclass(frozen=True, slots=True)
class Question:
    """The server that a test asks for."""

    model: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]

    def server(self, name: str, forks: ForkServer, log: Path) -> Server:
        flags = [*self.flags]
        if TOOLS in flags:
            flags.append(f"--override-generation-config={json.dumps(TOOL_DEFAULTS)}")
        if XGRAMMAR in flags:
            flags.append(NO_WHITESPACE)
        escaped = [flag.replace("{", "{{").replace("}", "}}") for flag in flags]
        return ForkedVllm(name, ["serve", self.model, *escaped, *OUR_FLAGS], self.environment, log, forks)


class Desk:
    """Answers each question of a test, by HTTP, with a URL.

    What a file's tests ask for stays while the same tests run direct and before a router, and after that until another
    fleet is needed: idle, a server and the router that polls it take a tenth of a core. One thread answers all
    questions, one by one: a server ends with the thread that started it.
    """

    def __init__(self, forks: ForkServer, logs: Path) -> None:
        """`forks`: starts vLLM; `logs`: the folder for the output of servers."""
        self.workers = 0
        """How many workers stand behind the router at the URL; 0 for a vLLM server alone."""
        self._forks, self._logs = forks, logs
        self._fleets: dict[str, Fleet] = {}
        self._asked: set[str] = set()
        """The questions of the current file."""
        desk = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = self.rfile.read(int(self.headers["content-length"])).decode()
                try:
                    status, answer = 200, json.dumps({"url": desk.url_of(question)})
                except RuntimeError as error:
                    status, answer = 500, str(error)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="desk")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        for fleet in self._fleets.values():
            fleet.stop()

    def begin_file(self) -> None:
        """Take all that was asked so far as that of earlier files."""
        self._asked.clear()

    def url_of(self, text: str) -> str:
        """Return the URL of the server that a question asks for. Raises RuntimeError if it does not start."""
        asked = json.loads(text)
        question = Question(asked["model"], tuple(asked["args"]), asked["environment"])
        self._asked.add(text)
        fleet = self._fleets.get(text) or self._started(question)
        self._fleets[text] = fleet
        if not fleet.engines:
            raise RuntimeError(NOT_STARTED)
        fleet.stop_routers(except_before=self.workers)
        if not self.workers:
            return fleet.engines[0].url
        if self.workers not in fleet.routers:
            key = question.environment.get("VLLM_API_KEY")
            fleet.routers[self.workers] = self._started_router(fleet.engines[: self.workers], key)
        return fleet.routers[self.workers].url

    def _started(self, question: Question) -> "Fleet":
        """Return a new fleet, which has no engines if they do not start; the log of the first says why."""
        for earlier in self._fleets.keys() - self._asked:
            self._fleets.pop(earlier).stop()
        number = len(list(self._logs.iterdir()))
        names = [f"vLLM {number} {side}" for side in ("first", "second")]
        fleet = Fleet([question.server(name, self._forks, self._logs / name) for name in names])
        try:
            for engine in fleet.engines:
                engine.start()
            for engine in fleet.engines:
                engine.wait_ready("/health", ENGINE_START_SECONDS)
        except RuntimeError:
            fleet.stop()
        return fleet

    def _started_router(self, engines: Iterable[Server], key: str | None) -> Server:
        """Start a router that has and accepts this key alone, if one is given."""
        name = f"router {len(list(self._logs.iterdir()))}"
        flags = ROUTER_FLAGS if key is None else (*ROUTER_FLAGS, *self._key_flags(key))
        router = Router(name, engines, flags, self._logs / name)
        router.start()
        router.wait_ready("/ready", ROUTER_START_SECONDS)
        return router

    def _key_flags(self, key: str) -> tuple[str, ...]:
        clients = self._logs / "clients.yaml"
        digest = sha256(key.encode()).hexdigest()
        clients.write_text(json.dumps({"clients": {"tests": {"key": f"sha256:{digest}"}}}))
        return (f"--clients={clients}", f"--worker-api-key={key}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two vLLM servers with the same flags, and the routers before them by the number of their workers."""

    engines: list[Server]
    routers: dict[int, Server] = field(default_factory=dict)

    def stop(self) -> None:
        """Kill all of its servers: asked to end, they take seconds."""
        self.stop_routers()
        for server in self.engines:
            server.kill()
        self.engines.clear()

    def stop_routers(self, except_before: int = 0) -> None:
        """Kill its routers but for the one before this number of workers."""
        for workers in self.routers.keys() - {except_before}:
            self.routers.pop(workers).kill()
