"""The tokens that clients are charged, compared with those that the engine's own counters show as computed."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from . import prompts, random_calls
from .conftest import StartRouter, assert_nothing_left
from .fleet import Engine, Router
from .processes import wait_until
from .test_disconnects import client_of, read_events
from .wire import COMPLETIONS, Json, call, listed, mapped

pytestmark = pytest.mark.engine

PROMPT_WORDS = 1500
"""A few thousand tokens, so that computed and cached tokens differ clearly."""
CALLS = 6
REST_SECONDS = 1.5
"""An engine's counters are final after this time without a change: SGLang updates them only at intervals."""
KINDS = ("charged_input", "charged_output", "computed_input", "computed_output")
STATE_SECONDS = 30.0
LEFT_AFTER = 1.5
"""Seconds after which the client of a whole answer disconnects."""
SPARE = 5.0
"""Seconds of an engine's `drop_seconds` that are a margin."""


@pytest.fixture
def router(start_router: StartRouter, engines: tuple[Engine, ...]) -> Iterator[Router]:
    """Start a router that polls the first engine's counters often, with an empty cache and no charges so far."""
    if engines[0].dialect == "sglang":
        engines[0].flush()
    router = start_router("router of charges", engines[:1], "--poll-interval=0.2")
    yield router
    assert_nothing_left(router, engines[:1])
    router.stop()


class Work:
    """What was charged for the engine's work and what the engine counted, since this object was created."""

    def __init__(self, router: Router, engine: Engine) -> None:
        self._router = router
        self._name = engine.url.removeprefix("http://")
        self._begun: dict[str, int] = {}
        self._begun = self.read()

    def read(self) -> dict[str, int]:
        """Return both in tokens, once the engine's counters are final."""
        seen: list[dict[str, int]] = [{}]
        changed = time.monotonic()

        def rested() -> bool:
            nonlocal changed
            workers = mapped(self._router.get("/fairness")["workers"])
            card = mapped(mapped(workers[self._name])["work"])
            seen.append({kind: int(str(card[kind] or 0)) for kind in KINDS})
            if seen[-1] != seen[-2]:
                changed = time.monotonic()
            return time.monotonic() - changed >= REST_SECONDS

        wait_until(rested, STATE_SECONDS, "the counters rest", seen)
        return {kind: tokens - self._begun.get(kind, 0) for kind, tokens in seen[-1].items()}


def body(name: str, *, stream: bool, limit: int, members: Json) -> Json:
    text = prompts.text(name, PROMPT_WORDS)
    fixed: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True}
    return {**fixed, "prompt": text, "stream": stream, "max_tokens": limit, **members}


def leave(router: Router, asked: Json, *, events: int = 0, seconds: float = 0.0) -> None:
    """Send a call, and disconnect after `events` events or `seconds` seconds."""
    content = json.dumps(asked).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer leaver\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", router.port), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        if events:
            client_of(read_events(connection, events))
        time.sleep(seconds)
    wait_until(lambda: router.unfinished() == 0, STATE_SECONDS, "the router has settled")


ANEW: dict[str, Json] = {"vllm": {"prompt_logprobs": 0}, "sglang": {"echo": True, "logprobs": 1}}
"""By dialect, fields with which an engine computes a cached prompt anew."""


@pytest.mark.parametrize("anew", [False, True])
def test_who_leaves_at_the_first_token_pays_for_the_input_that_was_computed(
    router: Router, engines: tuple[Engine, ...], anew: bool
) -> None:
    """A client that leaves at the first token pays for the computed input, whether or not the prompt came from the
    cache.
    """
    members = ANEW[engines[0].dialect] if anew else {}
    name = f"charges {anew}"
    assert call(router.url, COMPLETIONS, body(name, stream=False, limit=1, members={})).status == 200
    work = Work(router, engines[0])
    for _ in range(CALLS):
        leave(router, body(name, stream=True, limit=400, members=members), events=1)
    seen = work.read()
    print("left at the first token:", seen)
    assert seen["charged_input"] == pytest.approx(seen["computed_input"], rel=0.05, abs=CALLS * 32)
    size = call(router.url, COMPLETIONS, body(name, stream=False, limit=1, members={})).json["usage"]
    whole = CALLS * int(str(mapped(size)["prompt_tokens"]))
    assert seen["computed_input"] == pytest.approx(whole if anew else 0, abs=0.1 * whole)


@pytest.mark.parametrize("beside", [True, False])
def test_who_lets_go_of_whole_answers_pays_for_the_output_that_was_computed(
    router: Router, engines: tuple[Engine, ...], beside: bool
) -> None:
    """A client that abandons whole answers pays for the computed output, estimated from earlier streams or whole
    answers.

    With a model this small, sending each token takes longer than computing it, so that streams look slower than whole
    answers, and the engine's counters correct the estimate. An SGLang computes until it checks whether the client is
    still connected, and no client pays for that time.
    """
    for _ in range(2):
        asked = body("learn", stream=beside, limit=600, members={})
        assert call(router.url, COMPLETIONS, asked).status == 200
    work = Work(router, engines[0])
    for number in range(CALLS):
        if number % 2:
            assert call(router.url, COMPLETIONS, body("whole", stream=False, limit=300, members={})).status == 200
        else:
            leave(router, body("whole", stream=False, limit=4000, members={}), seconds=LEFT_AFTER)
    seen = work.read()
    print("whole answers:", seen)
    assert seen["computed_output"] > 3 * 300
    rate = (seen["charged_output"] - CALLS / 2 * 300) / (CALLS / 2 * LEFT_AFTER)
    late = CALLS / 2 * (engines[0].drop_seconds - SPARE) * rate
    assert 0.9 * seen["computed_output"] - late <= seen["charged_output"] <= 1.1 * seen["computed_output"]


@pytest.mark.parametrize(("leaving", "tolerance"), [(0.0, 0.02), (0.5, 0.05)])
def test_streamed_calls_of_all_kinds_pay_for_what_was_computed(
    router: Router, engines: tuple[Engine, ...], leaving: float, tolerance: float
) -> None:
    """Charges of 200 random calls are within 2 % of the computed tokens if all clients stay, within 5 % if half leave.

    SGLang does not count the first token of an answer.
    """
    calls = random_calls.draw(f"random {leaving}", 200, {COMPLETIONS: ANEW[engines[0].dialect]}, leaving=leaving)
    work = Work(router, engines[0])
    random_calls.run(router.url, calls)
    seen = work.read()
    uncounted = sum(each.answers for each in calls) if engines[0].dialect == "sglang" else 0
    print("random calls:", leaving, seen, uncounted)
    computed = seen["computed_input"] + seen["computed_output"] + uncounted
    assert seen["charged_input"] + seen["charged_output"] == pytest.approx(computed, rel=tolerance)


@pytest.mark.fleets("vllm")
def test_a_search_for_beams_pays_for_what_was_computed(router: Router, engines: tuple[Engine, ...]) -> None:
    """Each beam is sent anew for each token, and usage does not say so; all beams have their first token in common."""
    work, searches = Work(router, engines[0]), [(1, 3), (2, 40), (4, 20)]
    for beams, limit in searches:
        asked = body(f"{beams} beams", stream=False, limit=limit, members={"n": beams, "use_beam_search": True})
        assert call(router.url, COMPLETIONS, asked).status == 200
    seen = work.read()
    print("beams:", seen)
    assert seen["charged_input"] == seen["computed_input"]
    assert seen["charged_output"] == seen["computed_output"] + sum(beams - 1 for beams, _ in searches)


@pytest.mark.fleets("vllm")
@pytest.mark.parametrize("interval", [1, 10])
def test_an_event_with_several_tokens_is_charged_as_so_many(
    router: Router, engines: tuple[Engine, ...], interval: int
) -> None:
    """The charge is what the engine counted, and the text that of a whole answer.

    vLLM takes the larger one of a call's `stream_interval` and the server's `--stream-interval`.
    """
    limit = 61
    asked = body(f"interval {interval}", stream=False, limit=limit, members={})
    (whole,) = listed(call(router.url, COMPLETIONS, asked).json["choices"])
    work = Work(router, engines[0])
    events = call(router.url, COMPLETIONS, {**asked, "stream": True, "stream_interval": interval}).events()
    texts = [mapped(listed(event["choices"])[0])["text"] for event in events]
    assert "".join(map(str, texts)) == mapped(whole)["text"]
    assert len(events) <= 2 + (limit - 1) / interval
    seen = work.read()
    assert seen["charged_output"] == seen["computed_output"] == limit
