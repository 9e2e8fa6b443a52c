"""Make the same calls to an engine and through the router, and print each difference.

`python -m tests.engine.transparency` starts a vLLM and then an SGLang server on a tiny model, each with a router before
it, or takes running ones (`--direct URL --routed URL --engine vllm`). Exits with 1 if there is a difference that is not
in the list of `accepted`. Needs the engine environments (`make test-engine`).
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from ..environment import ROOT
from ..fleet import ENGINE_START_SECONDS, Engine, Router, SglangEngine, VllmEngine, make_model
from ..wire import WORKER_KEY, Answer
from .accepted import accepted
from .calls import Probe, probes
from .differences import Difference, differences

ROUTER_START_SECONDS = 120.0
TRIES = 3
"""How often a call is made that shows a difference: how many tokens an engine puts into an event is chance."""


def main() -> int:
    """Compare the engines that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.transparency", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="only this kind (default: both, one by one)")
    parser.add_argument("--environments", type=Path, default=ROOT, help="holds .venv-engine and .venv-sglang")
    parser.add_argument("--direct", metavar="URL", help="a running engine")
    parser.add_argument("--routed", metavar="URL", help="a running router before it alone")
    parser.add_argument("--only", default="", help="only calls whose name contains this")
    given = parser.parse_args()
    kinds = [given.engine] if given.engine else ["vllm", "sglang"]
    unexpected = 0
    for dialect in kinds:
        if given.direct and given.routed:
            unexpected += compare(dialect, given.direct, given.routed, given.only)
        else:
            with tempfile.TemporaryDirectory() as logs, pair(dialect, given.environments, Path(logs)) as urls:
                unexpected += compare(dialect, *urls, given.only)
    return 1 if unexpected else 0


@contextmanager
def pair(dialect: str, environments: Path, logs: Path) -> Iterator[tuple[str, str]]:
    """Start an engine and a router before it, yield their addresses, and stop both at the end."""
    engine = new_engine(dialect, environments, logs)
    try:
        engine.start()
        engine.wait_ready(engine.ready_path, ENGINE_START_SECONDS)
        router = Router("router", [engine], (), logs / "router")  # not earlier: another program could take its port
        try:
            router.start()
            router.wait_ready("/ready", ROUTER_START_SECONDS)
            yield engine.url, router.url
        finally:
            router.stop()
    finally:
        engine.kill()  # an SGLang asked to end takes longer than the timeout for it


def new_engine(dialect: str, environments: Path, logs: Path) -> Engine:
    """Return an engine, not started yet."""
    vllm, sglang = environments / ".venv-engine" / "bin", environments / ".venv-sglang" / "bin" / "python"
    model, log = make_model(vllm / "python"), logs / dialect
    if dialect == "vllm":
        flags = ("--enable-tokenizer-info-endpoint",)
        return VllmEngine(dialect, model, log, flags, launch=(vllm / "vllm", "serve"))
    return SglangEngine(dialect, model, log, launch=(sglang, "-m", "sglang.launch_server", "--model-path"))


def compare(dialect: str, direct: str, routed: str, only: str = "") -> int:
    """Make all calls at both addresses, print what differs, and return the number of differences without a reason."""
    calls = [probe for probe in probes(dialect) if only in probe.name]
    known, unexpected = Counter[str](), 0
    limits = httpx.Limits(max_keepalive_connections=0)  # SGLang resets a connection after some refusals
    with httpx.Client(timeout=20.0, trust_env=False, limits=limits) as client:
        for probe in calls:
            made(client, direct, probe)  # so that both calls compared find the prompt in the cache
            for _ in range(TRIES):
                reasons, unknown = compared(client, direct, routed, probe)
                if not unknown:
                    break
            known.update(reasons)
            unexpected += len(unknown)
            for each in unknown:
                print(f"{dialect}: {probe.name}: {each}", flush=True)
    for reason, count in known.items():
        print(f"{dialect}: documented, {count} times: {reason}")
    print(f"{dialect}: {len(calls)} calls, {unexpected} differences that are not documented", flush=True)
    return unexpected


def compared(client: httpx.Client, direct: str, routed: str, probe: Probe) -> tuple[list[str], list[Difference]]:
    """Make a call at both addresses; return the reasons of differences that are documented, and the other ones."""
    pair_of_answers = made(client, direct, probe), made(client, routed, probe)
    reasons, unknown = [], []
    for each in differences(*pair_of_answers):
        if (reason := accepted(probe, each, *pair_of_answers)) is not None:
            reasons.append(reason)
        else:
            unknown.append(each)
    return reasons, unknown


def made(client: httpx.Client, url: str, probe: Probe) -> Answer:
    """Make one call and return its answer."""
    headers = {"authorization": f"Bearer {WORKER_KEY}", **probe.headers}
    if probe.body is not None and "content-type" not in headers:
        headers["content-type"] = "application/json"
    try:
        response = client.request(probe.method, url + probe.path, content=probe.body, headers=headers)
    except httpx.TransportError as error:
        raise SystemExit(f"no answer to {probe.name!r} from {url}: {error!r}") from error
    return Answer(response.status_code, response.headers, response.content)


if __name__ == "__main__":
    sys.exit(main())
