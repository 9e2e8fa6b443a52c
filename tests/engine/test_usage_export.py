"""The export of usage over a restart of the router, compared with what an engine says in its answers and counters."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from . import prompts
from .conftest import StartRouter, assert_nothing_left
from .fleet import Engine, Router
from .test_charges import Work
from .wire import COMPLETIONS, Json, call, get, listed, mapped

pytestmark = pytest.mark.engine

ADMIN_KEY = "operator-key-0123456789"
CLIENTS = "ann", "bob"
CALLS = 6
"""Of each client in each run of the router."""
PROMPT_WORDS = 400

Totals = defaultdict[str, Counter[str]]
"""Tokens of each client, by kind."""


def body(client: str, number: int, *, stream: bool) -> Json:
    """Return a call whose prompt begins like all of its client's, so that most of it is cached."""
    prompt = f"{prompts.text(f'usage {client}', PROMPT_WORDS)} {prompts.text(f'{client} {number}', 20 + number)}"
    fixed: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 5 + number, "prompt": prompt}
    return {**fixed, "stream": True, "stream_options": {"include_usage": True}} if stream else fixed


def run_calls(router: Router, first: int, said: Totals) -> int:
    """Make the calls of all clients, and add up the usage in their answers. Returns the number of answers."""
    for number in range(first, first + CALLS):
        for client in CLIENTS:
            answer = call(router.url, COMPLETIONS, body(client, number, stream=bool(number % 2)), key=client)
            assert answer.status == 200, answer.body
            usage = mapped((answer.events()[-1] if number % 2 else answer.json)["usage"])
            details = mapped(usage.get("prompt_tokens_details") or {})
            said[answer.headers["x-d2lpm-client"]].update(
                calls=1,
                input_tokens=int(str(usage["prompt_tokens"])),
                cached_tokens=int(str(details.get("cached_tokens") or 0)),
                output_tokens=int(str(usage["completion_tokens"])),
                estimated_input_tokens=0 if details else int(str(usage["prompt_tokens"])),
                estimated_output_tokens=0,
            )
    return CALLS * len(CLIENTS)


def exported(router: Router) -> Totals:
    answer = get(f"{router.url}/usage", ADMIN_KEY)
    assert answer.status == 200, answer.body
    totals: Totals = defaultdict(Counter)
    for row in listed(answer.json["usage"]):
        totals[str(row["client"])].update({name: value for name, value in row.items() if isinstance(value, int)})
    return totals


def test_the_export_over_a_restart_is_what_the_engine_computed(
    start_router: StartRouter, engines: tuple[Engine, ...], tmp_path: Path
) -> None:
    """Each client's calls and tokens are those of the usage in its answers, with its true cached tokens; all of them
    together are what the engine's counters say. SGLang's counters lack the first token of an answer.
    """
    engine = engines[0]
    said: Totals = defaultdict(Counter)
    computed = uncounted = 0
    for run in (1, 2):
        flags = ("--poll-interval=0.2", f"--state={tmp_path}", f"--admin-key={ADMIN_KEY}")
        router = start_router(f"router of usage {run}", engines[:1], *flags)
        assert exported(router) == said
        work = Work(router, engine)
        answers = run_calls(router, run * CALLS, said)
        assert_nothing_left(router, engines[:1])
        assert exported(router) == said
        seen = work.read()
        computed += seen["computed_input"] + seen["computed_output"]
        uncounted += answers if engine.dialect == "sglang" else 0
        router.stop()
    total = sum(said.values(), Counter[str]())
    print("usage:", dict(total), "computed:", computed, "answers without their first token:", uncounted)
    assert total["cached_tokens"] > 0.5 * total["input_tokens"]
    assert total["input_tokens"] - total["cached_tokens"] + total["output_tokens"] == computed + uncounted
