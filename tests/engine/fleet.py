"""The servers under test, and what they report about themselves."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from tests.support.processes import process_flags

from .environment import ROOT, SGLANG, VLLM
from .processes import Server, free_ports, wait_until
from .wire import COMPLETIONS, WORKER_KEY, Json, call, get, listed, mapped

SEQUENCES = 4
"""Most requests in one batch of an engine; more wait inside it."""
NARROW = 2
"""Requests that the narrow router keeps in flight at an engine.

With one, no client would have a request in flight at the time of a choice, so clients could not be distinguished.
"""
BLOCK_TOKENS = 32
"""Size of vLLM's blocks; SGLang's pages have `SglangEngine.block_tokens`."""
BLOCKS = 1100
"""Room for `SEQUENCES` requests of full length, so that none is ever preempted."""
CONTEXT = 8192
SETTLED_SECONDS = 20.0
"""Timeout for the router to count nothing more after the last answer."""
ENGINE_START_SECONDS = 600.0
"""A bound: half a minute is usual on two idle cores, alone or two at a time; three minutes were seen on busy ones."""
ROUTER_START_SECONDS = 60.0
WIDE_SEQUENCES = 40
"""Batch of an engine in a wide fleet: all streams of a test, including those of a killed engine."""
SMALL_TOKENS = 299 * BLOCK_TOKENS
"""The cache of an engine in a small fleet."""
SMALL_CONTEXT = 4096
LAUNCH = ROOT / "workers" / "launch"

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
VLLM_ENVIRONMENT = {
    **OFFLINE,
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # With the flag below: the model runs inside the engine's process. Else the two wait for each other in loops of
    # sched_yield, which on two cores can keep every other process from running for seconds.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
COMMON_FLAGS = ("--served-model-name=tiny", "--host=127.0.0.1", "--port={port}", f"--api-key={WORKER_KEY}")
VLLM_FLAGS = (
    *COMMON_FLAGS,
    "--dtype=float32",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--enable-prompt-tokens-details",
    "--disable-access-log-for-endpoints=/health,/metrics",
    f"--max-model-len={CONTEXT}",
    f"--max-num-seqs={SEQUENCES}",
    f"--block-size={BLOCK_TOKENS}",
    f"--num-gpu-blocks-override={BLOCKS}",
)
SGLANG_ENVIRONMENT = {
    **OFFLINE,
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_OFFLINE": "1",
}
SGLANG_FLAGS = (
    *COMMON_FLAGS,
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--mem-fraction-static=0.3",
    "--skip-server-warmup",
    "--sleep-on-idle",  # otherwise its scheduler spins and uses a whole core while idle
    "--enable-metrics",
    "--enable-cache-report",
    f"--context-length={CONTEXT}",
    f"--max-running-requests={SEQUENCES}",
    "--page-size={page}",
    f"--max-total-tokens={(BLOCKS - 1) * BLOCK_TOKENS}",
)


def make_model(python: Path = VLLM.python) -> Path:
    """Return the model's folder, rebuilt if its source has changed. `python`: that of vLLM's environment."""
    source = Path(__file__).with_name("tiny_model.py")
    folder = ROOT / ".engine" / f"model-{sha256(source.read_bytes()).hexdigest()[:12]}"
    subprocess.run([python, source, folder], check=True)
    return folder


@dataclass(frozen=True, slots=True)
class Load:
    """Requests inside an engine, as counted by the engine."""

    running: int
    waiting: int


class Engine(Server):
    """A real engine; `VllmEngine` or `SglangEngine`."""

    dialect: ClassVar[str]
    """The router's name for this kind of engine."""
    block_tokens: ClassVar[int]
    """Cache granularity in tokens: a block is cached as a whole or not at all."""
    ready_path: ClassVar[str]
    drop_seconds: ClassVar[float]
    """How long it may take to stop a request whose client has left, in any state, with five seconds to spare."""

    events_port = 0
    """The port of its KV events; 0 if there is none. The next port replays past ones."""

    def start_and_wait(self) -> None:
        self.start()
        self.wait_ready(self.ready_path, ENGINE_START_SECONDS)

    def load(self) -> Load:
        """Read the requests in the engine now."""
        raise NotImplementedError

    def flush(self) -> None:
        """Empty its cache; the engine must be idle."""
        raise NotImplementedError


@contextmanager
def running(engines: Iterable[Engine]) -> Iterator[None]:
    """Start engines side by side, and stop them at the end."""
    each = tuple(engines)
    try:
        for engine in each:
            engine.start()
        for engine in each:
            engine.wait_ready(engine.ready_path, ENGINE_START_SECONDS)
        yield
    finally:
        for engine in each:
            engine.kill()  # an SGLang asked to end takes longer than the timeout for it


class VllmEngine(Engine):
    """A vLLM server."""

    dialect = "vllm"
    block_tokens = BLOCK_TOKENS
    ready_path = "/health"
    drop_seconds = 5.0

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        flags: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        launch: Iterable[str | Path] = (VLLM.python.with_name("vllm"), "serve"),
    ) -> None:
        """`flags` and `environment` override the usual ones; `launch` is the command line before the model."""
        command = [*map(str, launch), str(model), *VLLM_FLAGS, *flags]
        super().__init__(name, command, {**VLLM_ENVIRONMENT, **(environment or {})}, log)

    def load(self) -> Load:
        return Load(self._metric("num_requests_running"), self._metric("num_requests_waiting"))

    def flush(self) -> None:
        """Needs VLLM_SERVER_DEV_MODE=1."""
        # vLLM reports an emptied cache only with its next step, so there has to be one.
        step: Json = {"model": "tiny", "prompt": [7], "max_tokens": 1}
        answers = call(self.url, "/reset_prefix_cache", {}), call(self.url, COMPLETIONS, step)
        assert [answer.status for answer in answers] == [200, 200], answers

    def _metric(self, name: str) -> int:
        text = get(f"{self.url}/metrics").body.decode()
        found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"no metric vllm:{name}"
        return int(float(found[1]))


class SglangEngine(Engine):
    """An SGLang server."""

    dialect = "sglang"
    block_tokens = 16
    ready_path = "/ready"
    drop_seconds = 4.0 + 5.0  # it checks every 4 s for the client of a request without output

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        flags: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        launch: Iterable[str | Path] = (SGLANG.python, "-m", "sglang.launch_server", "--model-path"),
    ) -> None:
        """`flags` and `environment` override the usual ones; `launch` is the command line before the model."""
        usual = [flag.replace("{page}", str(self.block_tokens)) for flag in SGLANG_FLAGS]
        command = [*map(str, launch), str(model), *usual, *flags]
        super().__init__(name, command, {**SGLANG_ENVIRONMENT, **(environment or {})}, log)

    def load(self) -> Load:
        ranks = listed(get(f"{self.url}/v1/loads", WORKER_KEY).json["loads"])
        running, waiting = (
            sum(int(str(rank[count])) for rank in ranks) for count in ("num_running_reqs", "num_waiting_reqs")
        )
        return Load(running, waiting)

    def flush(self) -> None:
        answer = call(self.url, "/flush_cache", {})
        assert answer.status == 200, answer


ENGINES: Mapping[str, type[VllmEngine | SglangEngine]] = {kind.dialect: kind for kind in (VllmEngine, SglangEngine)}


def launched_engine(
    dialect: str, name: str, model: Path, log: Path, flags: Iterable[str], environment: Mapping[str, str] | None = None
) -> Engine:
    """Return a server as started by workers/launch: with all flags that the router reads, and publishing KV events."""
    port = free_ports(2)
    programs = (VLLM if dialect == VllmEngine.dialect else SGLANG).python.parent
    ours = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "KV_EVENTS_PORT": str(port),
        **(environment or {}),
    }
    engine = ENGINES[dialect](name, model, log, flags, ours, launch=("sh", LAUNCH / f"{dialect}.sh"))
    engine.events_port = port
    return engine


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines that run at the same time."""

    kinds: tuple[type[VllmEngine | SglangEngine], ...]
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Additional flags by dialect."""
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Additional environment variables by dialect."""
    launched: bool = False
    """True to start it by workers/launch: with all flags that the router reads, and publishing KV events."""

    def engines(self, name: str, model: Path, logs: Path) -> tuple[Engine, ...]:
        """Return the engines, not started yet."""
        names = [f"{name} engine {number}" for number in range(1, len(self.kinds) + 1)]
        return tuple(self._engine(kind, each, model, logs) for kind, each in zip(self.kinds, names, strict=True))

    def _engine(self, kind: type[VllmEngine | SglangEngine], name: str, model: Path, logs: Path) -> Engine:
        flags, log = self.flags.get(kind.dialect, ()), logs / name
        if self.launched:
            return launched_engine(kind.dialect, name, model, log, flags, {"VLLM_SERVER_DEV_MODE": "1"})
        return kind(name, model, log, flags, self.environment.get(kind.dialect))


WIDE: Mapping[str, tuple[str, ...]] = {
    "vllm": (f"--max-num-seqs={WIDE_SEQUENCES}",),
    "sglang": (f"--max-running-requests={WIDE_SEQUENCES}",),
}
SMALL: Mapping[str, tuple[str, ...]] = {
    "vllm": (f"--num-gpu-blocks-override={SMALL_TOKENS // BLOCK_TOKENS + 1}", f"--max-model-len={SMALL_CONTEXT}"),
    "sglang": (f"--max-total-tokens={SMALL_TOKENS}", f"--context-length={SMALL_CONTEXT}"),
}
EMBEDDING: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--runner=pooling", "--no-enable-prefix-caching"),
    "sglang": ("--is-embedding", "--schedule-policy=lpm"),
}
"""The second flag of each does not fit; `d2lpm check` must report it."""
STORING: Mapping[str, tuple[str, ...]] = {"sglang": ("--enable-response-store",)}
STORING_BY: Mapping[str, Mapping[str, str]] = {"vllm": {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}}
"""What makes each engine store responses."""
FLEETS: Mapping[str, Fleet] = {
    "vllm": Fleet((VllmEngine, VllmEngine)),
    "wide vllm": Fleet((VllmEngine, VllmEngine), WIDE),
    "small vllm": Fleet((VllmEngine,), SMALL, launched=True),
    "sglang": Fleet((SglangEngine, SglangEngine)),
    "wide sglang": Fleet((SglangEngine, SglangEngine), WIDE),
    "small sglang": Fleet((SglangEngine,), SMALL, launched=True),
    "mixed": Fleet((VllmEngine, SglangEngine), WIDE),
    "storing": Fleet((VllmEngine, SglangEngine), STORING, STORING_BY),
    "embedding": Fleet((VllmEngine, SglangEngine), EMBEDDING),
}
"""In the order in which they run: one fleet ends before the next one starts."""


class Router(Server):
    """`d2lpm serve` in front of engines, each named by host and port."""

    def __init__(self, name: str, engines: Iterable[Server], flags: Iterable[str], log: Path) -> None:
        workers = [f"--worker={engine.url}" for engine in engines]
        program = str(Path(sys.executable).with_name("d2lpm"))
        command = [program, "serve", "--port={port}", *workers, *process_flags(), *flags]
        super().__init__(name, command, {"D2LPM_WORKER_API_KEY": WORKER_KEY}, log)

    def get(self, path: str) -> Json:
        """Return its answer to a GET, which must be 200."""
        answer = get(self.url + path)
        assert answer.status == 200, answer.body
        return answer.json

    def worker(self, engine: Engine) -> Json:
        """Return the router's report on an engine."""
        return next(worker for worker in listed(self.get("/workers")["workers"]) if worker["url"] == engine.url)

    def queued(self) -> int:
        """Return the number of requests waiting in the router, not in an engine."""
        return self._total("clients", "queued")

    def in_flight(self) -> int:
        """Return the number of requests sent to an engine that have not ended."""
        return self._total("workers", "running")

    def window(self, engine: Engine) -> int:
        """Return how many requests the router's window allows in flight at an engine."""
        workers = mapped(self.get("/fairness")["workers"]).values()
        report = next(worker for worker in map(mapped, workers) if worker["url"] == engine.url)
        return int(str(mapped(report["window"])["requests"]))

    def unfinished(self) -> int:
        """Return the requests, plus tokens reserved for them, that the router still counts anywhere."""
        return self._total("clients", "queued", "running") + self._total(
            "workers", "queued", "running", "unstarted_tokens"
        )

    def wait_settled(self) -> None:
        """Wait until the router counts no request, because the end of an answer reaches its client first."""
        wait_until(lambda: self.unfinished() == 0, SETTLED_SECONDS, f"the {self.name} counts nothing")

    def _total(self, group: str, *counts: str) -> int:
        entries = mapped(self.get("/fairness")[group]).values()
        return sum(int(str(mapped(entry)[count])) for entry in entries for count in counts)

    def service(self, client: str) -> Mapping[str, object]:
        """Return what a client has been charged so far: extend, cached and output tokens, and their cost."""
        clients = mapped(self.get("/fairness")["clients"])
        return mapped(mapped(clients[client])["service"])


@contextmanager
def running_routers(routers: Iterable[Router]) -> Iterator[None]:
    """Start routers side by side, and stop them at the end."""
    each = tuple(routers)
    try:
        for router in each:
            router.start()
        for router in each:
            router.wait_ready("/ready", ROUTER_START_SECONDS)
        yield
    finally:
        for router in each:
            router.stop()
