"""By how much real engines are faster than the emulated A100 of `experiment sessions`, on shorter prompts.

What the gate for agent sessions is good for depends on one ratio: the time to compute a context again, over the time
between two calls of a session. An engine that computes v tokens of input per second stands for an A100 that computes
v0, with all lengths divided by LENGTHS, if all pauses are divided by LENGTHS * v / v0. Both speeds are measured, with
more calls open than an engine runs at once: each call is one of a random session, none shares anything with another,
and each answer is one token.

That holds for engines to which a cached token costs next to nothing. `cached_cost` measures whether it does.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Final

from bench.lab.agents.sessions import KV_TOKENS
from bench.lab.frame.conditions import A100, PATIENT
from bench.live.clients import LiveLoad, run_load
from bench.report.records import Result
from bench.sim.scenario import Scenario
from bench.sim.simulation import Simulation
from bench.workloads.parts.traffic import Outcome
from bench.workloads.recorded.sessions import Recorded, SessionPlay, Sessions, Turn

from .fleet import Engine, Router
from .wire import COMPLETIONS, WORKER_KEY, Json, call

LENGTHS: Final = 16
"""What all recorded lengths are divided by, to fit the engines' positions."""
LONGEST: Final = 120_000
"""Most tokens of a recorded prompt."""
VOCABULARY: Final = 4000
ENGINE_SECONDS: Final = 30.0
A100_SECONDS: Final = 300.0
"""Virtual seconds."""
WARMUP: Final = 0.2
"""The share of these that is not measured."""
OPEN_CALLS: Final = 12
"""For each engine; it runs 8."""
CACHED_PROMPTS: Final = 10


def shortened(sessions: Iterable[Recorded], pauses: float) -> tuple[Recorded, ...]:
    """Return sessions with lengths divided by LENGTHS and pauses by `pauses`."""
    return tuple(_shortened(session, pauses) for session in sessions)


def _shortened(session: Recorded, pauses: float) -> Recorded:
    turns = [
        Turn(
            max(1, turn.input // LENGTHS),
            max(1, turn.output // LENGTHS),
            turn.shared // LENGTHS,
            turn.pause / pauses,
            turn.ends_turn,
        )
        for turn in session.turns
    ]
    return Recorded(session.tools // LENGTHS, session.system // LENGTHS, tuple(turns))


def pause_divisor(sessions: Sequence[Recorded], router: Router, engines: int) -> tuple[float, float, float]:
    """Return v and v0, tokens per second and engine, and what pauses are to be divided by."""
    ours, emulated = engine_speed(sessions, router, engines), a100_speed(sessions)
    return ours, emulated, LENGTHS * ours / emulated


def engine_speed(sessions: Sequence[Recorded], router: Router, engines: int) -> float:
    """Return how many tokens of input per second each real engine computes of the shortened calls of these sessions."""
    workload = _cold_calls(shortened(sessions, 1.0), LONGEST // LENGTHS, engines)
    load = LiveLoad(
        router.url,
        workload,
        ENGINE_SECONDS,
        WARMUP * ENGINE_SECONDS,
        api_key=WORKER_KEY,
        vocabulary=VOCABULARY,
    )
    ended = asyncio.run(run_load(load))
    assert not ended.failures, ended.failures
    return _speed(ended.result) / engines


def a100_speed(sessions: Sequence[Recorded]) -> float:
    """Return how many tokens of input per second an emulated A100 computes of the calls of these sessions."""
    workers = (replace(A100, kv_tokens=KV_TOKENS),)
    scenario = Scenario(
        "dlpm_home",
        _cold_calls(sessions, LONGEST, len(workers)),
        workers,
        A100_SECONDS,
        WARMUP * A100_SECONDS,
        settings=PATIENT,
    )
    return _speed(Simulation(scenario).run())


def cached_cost(sessions: Sequence[Recorded], engine: Engine) -> float:
    """Return the CPU time that an idle engine takes for a prompt that it has just computed, over that for a new one, at
    the mean length of these sessions' calls.
    """
    sizes = [turn.input // LENGTHS for session in sessions for turn in session.turns if turn.input <= LONGEST]
    random, size = Random("cached prompts"), round(mean(sizes))
    new = again = 0.0
    for _ in range(CACHED_PROMPTS):
        prompt = [random.randrange(VOCABULARY) for _ in range(size)]
        new += _cpu_seconds(engine, prompt)
        again += _cpu_seconds(engine, prompt)
    return again / new


def _cpu_seconds(engine: Engine, prompt: Sequence[int]) -> float:
    """Return the CPU time that an idle engine takes for a prompt and one token."""
    before = engine.cpu_seconds()
    body: Json = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, "ignore_eos": True}
    answer = call(engine.url, COMPLETIONS, body)
    assert answer.status == 200, answer
    return engine.cpu_seconds() - before


def _cold_calls(sessions: Iterable[Recorded], longest: int, engines: int) -> Sessions:
    """Return a workload in which each session is one call of one of these, with new tokens only."""
    turns = [turn for session in sessions for turn in session.turns if turn.input <= longest]
    calls = tuple(Recorded(0, 0, (Turn(turn.input, 1, 0, 0.0),)) for turn in turns)
    return Sessions(calls, SessionPlay(client_count=1, concurrency=OPEN_CALLS * engines, longest=longest, labels=False))


def _speed(result: Result) -> float:
    """Return the input of the calls that ended, in tokens per second, less what was cached."""
    done = [each for each in result.records if each.outcome is Outcome.DONE and each.finished is not None]
    computed = [
        each.input_tokens - (each.cached_tokens or 0) for each in done if (each.finished or 0.0) >= result.warmup
    ]
    return sum(computed) / (result.seconds - result.warmup)
