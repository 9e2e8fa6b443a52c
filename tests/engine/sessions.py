"""Agent sessions before two real engines with too small a KV cache: `python -m tests.engine.sessions TRACE`.

Recorded sessions (`claude_code_sessions.jsonl`, public: kv-cache-tester), every third of the file, on which nothing
was tuned, run in a closed loop against a router with `--sessions both` and one without. These take turns in front of
the same two engines, whose KV caches hold half of the tokens of all open contexts. To fit the engines' 8,192
positions, all lengths are divided by LENGTHS, the KV cache of 400,000 tokens of `experiment sessions` among them, and
all pauses by PAUSES, about as many times shorter as an engine for
CPU takes for these prompts beside a GPU for the recorded ones; the gate's own settings are divided alike. The text of
an answer is unknown to the client, so a later prompt has other tokens in its place, as many.

Printed are the calls that ended per second, the share of prompt tokens that the engines reported as cached, and the
mean time to first token, with the gate, without it, and their ratio in each turn. Needs the engine environment
(`make test-engine`).
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
from bench.workloads.recorded.sessions import Recorded, SessionPlay, Sessions, Turn, read_sessions

from .environment import is_complete
from .fleet import BLOCK_TOKENS, ENGINES, Engine, Load, Router, make_model, running, running_routers
from .processes import wait_until
from .wire import WORKER_KEY

LENGTHS: Final = 16
PAUSES: Final = 12
KV_BLOCKS: Final = 400_000 // LENGTHS // BLOCK_TOKENS
"""Of each engine, in blocks of vLLM."""
LONGEST: Final = 120_000
"""Most tokens of a recorded prompt."""
VOCABULARY: Final = 4000
USUAL: Final = {"idle": 40.0, "idle-after-turn": 5.0}
"""Defaults of the gate in seconds, and the next ones in tokens."""
USUAL_TOKENS: Final = {"growth": 2000, "grace": 4000}
GATED: Final = (
    "--sessions=both",
    *(f"--session-{name}={seconds / PAUSES:g}" for name, seconds in USUAL.items()),
    *(f"--session-{name}={tokens // LENGTHS}" for name, tokens in USUAL_TOKENS.items()),
)
DRAIN_SECONDS: Final = 120.0


class Shown(NamedTuple):
    """The figures of one turn."""

    calls: float
    """Per second."""
    hit_rate: float
    ttft: float
    """Seconds, the mean."""

    def over(self, other: "Shown") -> "Shown":
        """Return each figure as a multiple of the other's."""
        return Shown(*(one / another for one, another in zip(self, other, strict=True)))


def engine_flags(dialect: str, kv_blocks: int) -> Sequence[str]:
    """Return what gives an engine a KV cache of this size."""
    if dialect == "sglang":
        return "--max-running-requests=8", f"--max-total-tokens={kv_blocks * BLOCK_TOKENS}"
    return "--max-num-seqs=8", f"--num-gpu-blocks-override={kv_blocks + 1}"


def shortened(session: Recorded) -> Recorded:
    """Return a session with shorter prompts, answers and pauses."""
    turns = [
        Turn(
            max(1, turn.input // LENGTHS),
            max(1, turn.output // LENGTHS),
            turn.shared // LENGTHS,
            turn.pause / PAUSES,
            turn.ends_turn,
        )
        for turn in session.turns
    ]
    return Recorded(session.tools // LENGTHS, session.system // LENGTHS, tuple(turns))


def workload(trace: Path, working_set: int) -> Sessions:
    """Return the sessions. `working_set`: tokens of all open contexts."""
    play = SessionPlay(
        client_count=4,
        longest=LONGEST // LENGTHS,
        patience=30.0 / PAUSES,
        working_set=working_set,
        light=2,
        part="aside",
    )
    return Sessions(tuple(map(shortened, read_sessions(trace))), play)


def turn(router: Router, pair: Sequence[Engine], load: LiveLoad) -> Shown:
    """Run the load; it ends when both engines are idle again."""
    ended = asyncio.run(run_load(load))
    wait_until(lambda: all(each.load() == Load(0, 0) for each in pair), DRAIN_SECONDS, "the engines are idle")
    router.wait_settled()
    assert not ended.failures, ended.failures
    done = [each for each in ended.result.records if each.outcome is Outcome.DONE and each.finished is not None]
    counted = [each for each in done if each.finished is not None and each.finished >= load.warmup]
    waits = [each.started - each.arrived for each in counted if each.started is not None]
    totals = ended.totals
    return Shown(
        len(counted) / (load.seconds - load.warmup), totals.cached_tokens / max(1, totals.queried_tokens), mean(waits)
    )


def row(name: str, shown: Sequence[Shown]) -> str:
    """Format medians."""
    return f"{name:24}" + "".join(f"{median(values):>12.3f}" for values in zip(*shown, strict=True))


def measure(pair: Sequence[Engine], folder: Path, given: argparse.Namespace) -> None:
    """Measure and print the table."""
    routers = (Router("without gate", pair, (), folder / "without"), Router("gate", pair, GATED, folder / "gate"))
    shown: list[list[Shown]] = [[], []]
    working_set = round(given.load * len(pair) * given.kv_blocks * BLOCK_TOKENS)
    print(f"{'':24}{'calls/s':>12}{'hit rate':>12}{'TTFT, s':>12}")
    with running_routers(routers):
        for seed in range(given.turns):
            for router, each in zip(routers, shown, strict=True):
                load = LiveLoad(
                    router.url,
                    workload(given.trace, working_set),
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
    parser.add_argument("--turns", type=int, default=3, help="of each router, a seed each (default: 3)")
    parser.add_argument("--seconds", type=float, default=80.0, help="of a turn (default: 80)")
    parser.add_argument("--warmup", type=float, default=20.0, help="of these, not measured (default: 20)")
    parser.add_argument("--load", type=float, default=2.0, help="open contexts over all KV cache (default: 2)")
    parser.add_argument("--kv-blocks", type=int, default=KV_BLOCKS, help=f"of each engine (default: {KV_BLOCKS})")
    given = parser.parse_args()
    assert is_complete(), "there is no engine environment; `make test-engine` makes it"
    model, flags = make_model(), engine_flags(given.engine, given.kv_blocks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pair = [ENGINES[given.engine](name, model, folder / name, flags) for name in ("first", "second")]
        with running(pair):
            measure(pair, folder, given)


if __name__ == "__main__":
    main()
