"""Agent sessions before two real engines with too small a KV cache: `python -m tests.engine.sessions TRACE`.

Recorded sessions (`claude_code_sessions.jsonl`, public: kv-cache-tester), every third of the file, on which nothing
was tuned, run in a closed loop against a router with `--sessions both` and one without. These take turns in front of
the same two engines, whose KV caches hold half of the tokens of all open contexts. To fit the engines' 8,192
positions, all lengths are divided by LENGTHS, the KV cache of 400,000 tokens and the steps of 2,048 new tokens of
`experiment sessions` among them. Pauses are divided so that computing a context again takes the same part of them as
there (`session_scale`), and so are the gate's own settings; the engines' speed is measured first, and last. The text of
an answer is unknown to the client, so a later prompt has other tokens in its place, as many.

Printed are the calls that ended per second, the share of prompt tokens that the engines reported as cached, the mean
time to first token, and the CPU time that the engines took per second, with the gate, without it, and their ratio in
each turn. Needs the engine environment (`make test-engine`).
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Final, NamedTuple

from bench.live.clients import LiveLoad, run_load
from bench.workloads.parts.traffic import Outcome
from bench.workloads.recorded.sessions import Recorded, SessionPlay, Sessions, read_sessions

from .environment import is_complete
from .fleet import BLOCK_TOKENS, ENGINES, Engine, Load, Router, make_model, running, running_routers
from .processes import wait_until
from .session_scale import LENGTHS, LONGEST, VOCABULARY, cached_cost, pause_divisor, shortened
from .wire import WORKER_KEY

KV_BLOCKS: Final = 400_000 // LENGTHS // BLOCK_TOKENS
"""Of each engine, in blocks of vLLM."""
STEP_TOKENS: Final = 2048 // LENGTHS
"""Of an emulated A100, divided like all lengths."""
PATIENCE: Final = 30.0
"""Most seconds of a recorded pause."""
USUAL: Final = {"idle": 40.0, "idle-after-turn": 5.0}
"""Defaults of the gate in seconds, and the next ones in tokens."""
USUAL_TOKENS: Final = {"growth": 2000, "grace": 4000}
DRAIN_SECONDS: Final = 120.0


class Shown(NamedTuple):
    """The figures of one turn."""

    calls: float
    """Per second."""
    hit_rate: float
    ttft: float
    """Seconds, the mean."""
    busy: float
    """CPU seconds of both engines per second, warm-up included."""

    def over(self, other: "Shown") -> "Shown":
        """Return each figure as a multiple of the other's."""
        return Shown(*(one / another for one, another in zip(self, other, strict=True)))


def engine_flags(dialect: str, kv_blocks: int, step_tokens: int) -> Sequence[str]:
    """Return what gives an engine a KV cache of this size, and steps of so many tokens at most (0: its default)."""
    if dialect == "sglang":
        flags = ["--max-running-requests=8", f"--max-total-tokens={kv_blocks * BLOCK_TOKENS}"]
        steps = f"--chunked-prefill-size={step_tokens}"
    else:
        flags = ["--max-num-seqs=8", f"--num-gpu-blocks-override={kv_blocks + 1}"]
        steps = f"--max-num-batched-tokens={step_tokens}"
    return [*flags, steps] if step_tokens else flags


def gate_flags(pauses: float) -> Sequence[str]:
    """Return what switches the gate on, with its usual settings for pauses that are divided by this."""
    return (
        "--sessions=both",
        *(f"--session-{name}={seconds / pauses:g}" for name, seconds in USUAL.items()),
        *(f"--session-{name}={tokens // LENGTHS}" for name, tokens in USUAL_TOKENS.items()),
    )


def workload(sessions: Sequence[Recorded], working_set: int, pauses: float) -> Sessions:
    """Return the sessions. `working_set`: tokens of all open contexts. `pauses`: what pauses are divided by."""
    play = SessionPlay(
        client_count=4,
        longest=LONGEST // LENGTHS,
        patience=PATIENCE / pauses,
        working_set=working_set,
        light=2,
    )
    return Sessions(shortened(sessions, pauses), play)


def turn(router: Router, pair: Sequence[Engine], load: LiveLoad) -> Shown:
    """Run the load; it ends when both engines are idle again."""
    before = sum(engine.cpu_seconds() for engine in pair)
    ended = asyncio.run(run_load(load))
    used = sum(engine.cpu_seconds() for engine in pair) - before
    wait_idle(router, pair)
    assert not ended.failures, ended.failures
    done = [each for each in ended.result.records if each.outcome is Outcome.DONE and each.finished is not None]
    counted = [each for each in done if each.finished is not None and each.finished >= load.warmup]
    waits = [each.started - each.arrived for each in counted if each.started is not None]
    totals = ended.totals
    return Shown(
        len(counted) / (load.seconds - load.warmup),
        totals.cached_tokens / max(1, totals.queried_tokens),
        mean(waits),
        used / load.seconds,
    )


def wait_idle(router: Router, pair: Sequence[Engine]) -> None:
    """Wait until neither the engines nor the router have a call."""
    wait_until(lambda: all(each.load() == Load(0, 0) for each in pair), DRAIN_SECONDS, "the engines are idle")
    router.wait_settled()


def row(name: str, shown: Sequence[Shown]) -> str:
    """Format medians."""
    return f"{name:24}" + "".join(f"{median(values):>12.3f}" for values in zip(*shown, strict=True))


def measure(pair: Sequence[Engine], folder: Path, given: argparse.Namespace) -> None:
    """Measure and print the table."""
    sessions = Sessions(read_sessions(given.trace), SessionPlay(part="aside")).played()
    without = Router("without gate", pair, (), folder / "without")
    with running_routers((without,)):
        print(f"a cached prompt costs {cached_cost(sessions, pair[0]):.2f} of a new one", flush=True)
        pauses = given.pause_divisor or measured_divisor(sessions, without, pair)
        print(f"lengths are divided by {LENGTHS}, pauses by {pauses:.1f}")
        gated = Router("gate", pair, gate_flags(pauses), folder / "gate")
        if given.turns:
            with running_routers((gated,)):
                take_turns((without, gated), sessions, pauses, pair, given)
            measured_divisor(sessions, without, pair)


def measured_divisor(sessions: Sequence[Recorded], router: Router, pair: Sequence[Engine]) -> float:
    """Measure how fast the engines are, print it, and return what pauses are to be divided by."""
    ours, emulated, divisor = pause_divisor(sessions, router, len(pair))
    wait_idle(router, pair)
    print(f"tokens of input/s and engine: {ours:.0f}; A100: {emulated:.0f}; pauses / {divisor:.1f}", flush=True)
    return divisor


def take_turns(
    routers: Sequence[Router],
    sessions: Sequence[Recorded],
    pauses: float,
    pair: Sequence[Engine],
    given: argparse.Namespace,
) -> None:
    """Run the load against each router in turn, and print the table."""
    shown: list[list[Shown]] = [[] for _ in routers]
    working_set = round(given.load * len(pair) * given.kv_blocks * BLOCK_TOKENS)
    print(f"{'':24}{'calls/s':>12}{'hit rate':>12}{'TTFT, s':>12}{'engines, CPU':>14}")
    for seed in range(given.turns):
        for router, each in zip(routers, shown, strict=True):
            load = LiveLoad(
                router.url,
                workload(sessions, working_set, pauses),
                given.seconds,
                given.warmup,
                seed,
                api_key=WORKER_KEY,
                vocabulary=VOCABULARY,
            )
            each.append(turn(router, pair, load))
            print(row(f"  {router.name}, seed {seed}", each[-1:]), flush=True)
    for router, each in zip(routers, shown, strict=True):
        print(row(router.name, each))
    print(row("gate / without", [gated.over(other) for other, gated in zip(*shown, strict=True)]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.sessions", description=__doc__)
    parser.add_argument("trace", type=Path, help="claude_code_sessions.jsonl")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="vllm")
    parser.add_argument(
        "--turns", type=int, default=3, help="of each router, a seed each; 0: measure the engines only (default: 3)"
    )
    parser.add_argument("--seconds", type=float, default=80.0, help="of a turn (default: 80)")
    parser.add_argument("--warmup", type=float, default=20.0, help="of these, not measured (default: 20)")
    parser.add_argument("--load", type=float, default=2.0, help="open contexts over all KV cache (default: 2)")
    parser.add_argument(
        "--pause-divisor", type=float, help="what pauses are divided by (default: as measured before the first turn)"
    )
    parser.add_argument("--kv-blocks", type=int, default=KV_BLOCKS, help=f"of each engine (default: {KV_BLOCKS})")
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=STEP_TOKENS,
        help=f"most new tokens of a step; 0: the engine's own default (default: {STEP_TOKENS})",
    )
    given = parser.parse_args()
    assert is_complete(), "there is no engine environment; `make test-engine` makes it"
    model, flags = make_model(), engine_flags(given.engine, given.kv_blocks, given.step_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pair = [ENGINES[given.engine](name, model, folder / name, flags) for name in ("first", "second")]
        with running(pair):
            measure(pair, folder, given)


if __name__ == "__main__":
    main()
