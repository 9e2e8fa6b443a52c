"""Clients that try to have more computed than they are charged for gain nothing at their neighbours' cost.

Four honest clients chat, beside one that evades its charge in some way and beside one that has the same computed
honestly. They are served the same within 5 %. False `max_tokens` are in `test_lying_limits`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.parts.pace import varied
from bench.workloads.parts.prompts import EMPTY, Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, closed_loop

ADAPTER = "adapter"
WORKERS = (WorkerSpec(max_running=16, adapters=(ADAPTER,)), WorkerSpec(max_running=16))
"""Only the first worker serves the adapter."""
SECONDS, WARMUP = 30.0, 10.0
TOLERANCE = 0.05
HONEST = 4
KNOWN = Text(random_tokens(Random("known"), 6000))
"""A prompt that the caches hold."""

Ask = Callable[[Random, float], Sequence[Call]]
"""Draws the calls that a client makes at once; the next ones follow when all of these have ended."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Honest clients that chat, and another one that asks as told."""

    ask: Ask
    sessions: int
    """How many times over the other client asks at any time."""
    chats: int = 12
    """The open calls of each honest client."""

    def clients(self, seed: int) -> Sequence[Client]:
        honest = [client(f"honest-{number}", seed, chat, self.chats) for number in range(1, HONEST + 1)]
        return [*honest, client("other", seed, self.ask, self.sessions)]


def client(name: str, seed: int, ask: Ask, sessions: int) -> Client:
    random = Random(f"{seed} {name}")
    return Client(name, closed_loop(lambda at: ask(random, at), sessions))


def new_prompt(random: Random, tokens: int) -> Prompt:
    return Prompt(EMPTY, random_tokens(random, tokens))


def chat(random: Random, at: float) -> Sequence[Call]:
    """Ask one question."""
    output = varied(random, 150, 0.5)
    return [Call(at, new_prompt(random, varied(random, 500, 0.5)), output, output)]


@cache
def honest_service(ask: Ask, sessions: int, workers: tuple[WorkerSpec, ...] = WORKERS, chats: int = 12) -> float:
    """Return what each honest client was served in a second, in input + 2 · output tokens."""
    workload = Beside(ask, sessions, chats)
    result = simulate(Scenario("dlpm_home", workload, workers, SECONDS, WARMUP, seed=1))
    first, last = next(each for each in result.timeline if each.time >= WARMUP), result.timeline[-1]
    served = {name: got - first.client_service.get(name, 0.0) for name, got in last.client_service.items()}
    assert served.pop("other") > 0
    return sum(served.values()) / len(served) / (last.time - first.time)


def read(random: Random, at: float) -> Sequence[Call]:
    """Have a long prompt computed for one token."""
    return [Call(at, new_prompt(random, 6000), 1, 1)]


def read_anew(random: Random, at: float) -> Sequence[Call]:
    """Have a cached prompt computed as if it were not cached, as with `prompt_logprobs`, and leave at the first token,
    before the engine reports that.
    """
    prompt = Prompt(KNOWN, random_tokens(random, 5))
    return [Call(at, prompt, 400, 400, computed_anew=True, leaves_after=1)]


def tell(random: Random, at: float) -> Sequence[Call]:
    """Have an answer streamed to its end."""
    return [Call(at, new_prompt(random, 500), 380, 380)]


def give_up(random: Random, at: float) -> Sequence[Call]:
    """Wait for a whole answer, and leave when 95 % of it are computed, before the engine reports any usage."""
    return [Call(at, new_prompt(random, 500), 400, 400, streamed=False, leaves_after=380)]


def post(random: Random, at: float) -> Sequence[Call]:
    """Have an answer computed of which nothing is seen before its end, as in the background."""
    return [Call(at, new_prompt(random, 500), 380, 380, streamed=False)]


def ask_singly(random: Random, at: float) -> Sequence[Call]:
    """Ask the same four times at once."""
    prompt = new_prompt(random, 1000)
    return [Call(at, prompt, 100, 100, sample=number) for number in range(4)]


def ask_for_four(random: Random, at: float) -> Sequence[Call]:
    """Ask once, for four answers (`n`)."""
    return [Call(at, new_prompt(random, 1000), 100, 400, answers=4)]


def flood(random: Random, at: float) -> Sequence[Call]:
    """Ask about a long text that no cache holds."""
    return [Call(at, new_prompt(random, 20_000), 16, 16)]


def flood_adapter(random: Random, at: float) -> Sequence[Call]:
    """Ask the same of an adapter."""
    return [Call(at, new_prompt(random, 20_000), 16, 16, model=ADAPTER)]


@pytest.mark.parametrize(
    ("evasive", "honest", "sessions"),
    [
        pytest.param(read_anew, read, 8, id="a prompt computed anew and left at the first token"),
        pytest.param(give_up, tell, 20, id="whole answers given up"),
        pytest.param(post, tell, 20, id="answers in the background"),
        pytest.param(ask_for_four, ask_singly, 8, id="several answers of one call"),
        pytest.param(flood_adapter, flood, 12, id="a model that one worker serves"),
    ],
)
def test_an_evasion_costs_others_nothing(evasive: Ask, honest: Ask, sessions: int) -> None:
    """Others are served as beside a client that has the same computed and seen."""
    assert honest_service(evasive, sessions) == pytest.approx(honest_service(honest, sessions), rel=TOLERANCE)


def test_a_cold_flood_leaves_others_most_of_what_an_honest_client_would() -> None:
    """Beside many long cold prompts others get at least 0.7 of what they get beside one more client like themselves.

    No engine lacks places, so few of their calls wait in the router: without isolation they would get a seventh.
    """
    large = (WorkerSpec(),) * 2
    assert honest_service(flood, 32, large, 32) >= 0.7 * honest_service(chat, 32, large, 32)
