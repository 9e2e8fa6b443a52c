"""Tests responses that real engines store or compute in the background, and how the router handles them."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.stored_scripts import RESPONSES, not_found

from . import prompts
from .conftest import StartRouter
from .fleet import Engine, Router
from .processes import wait_until
from .wire import WORKER_KEY, Json, mapped

pytestmark = [pytest.mark.engine, pytest.mark.fleets("storing")]

SHORT: Json = {"model": "tiny", "input": "Say it again", "max_output_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG: Json = {**SHORT, "max_output_tokens": 2000, "background": True}
FEWER = {"vllm": 0, "sglang": 2}
"""Output tokens by which a response stays below its `max_output_tokens`."""
COMPUTED_SECONDS = 60.0


def caller(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest, engines: tuple[Engine, ...]) -> Engine:
    """Return the engine of one kind."""
    return next(engine for engine in engines if engine.dialect == request.param)


@pytest.fixture(scope="session")
def storing_router_of_all(start_router: StartRouter, running_fleet: tuple[Engine, ...]) -> Iterator[Router]:
    router = start_router("storing router", running_fleet, "--background-responses", "--policy=rr+dlpm")
    yield router
    router.stop()


@pytest.fixture
def storing_router(storing_router_of_all: Router) -> Iterator[Router]:
    """Yield a router that sends calls that may go anywhere to each engine in turn.

    The test fails if it leaves a request behind.
    """
    yield storing_router_of_all
    wait_until(lambda: not storing_router_of_all.unfinished(), COMPUTED_SECONDS, "all has ended")


def json_of(answer: httpx.Response) -> Json:
    assert answer.status_code == 200, answer.text
    return mapped(answer.json())


def at(engine: Engine, ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Return the answer of this engine, out of two calls that go to the two engines in turn."""
    for _ in range(2):
        answer = ask()
        if engine.url.endswith(answer.headers["x-d2lpm-worker"]):
            return answer
    raise AssertionError("neither of two calls in turn came to this engine")


def output_of(response: Json) -> int:
    return int(str(mapped(response["usage"])["output_tokens"]))


def charged(router: Router, client: str) -> tuple[int, int]:
    """Return the input and output tokens charged to a client, once all calls have ended."""
    router.wait_settled()
    service = router.service(client)
    return int(str(service["extend"])) + int(str(service["cached"])), int(str(service["output"]))


def test_engines_answer_as_the_scripted_ones_do(engine: Engine) -> None:
    """Unknown ids, DELETE and each stage of a background response get the answers that the scripted engines give."""
    with caller(engine.url, WORKER_KEY) as http:
        made = json_of(http.post(RESPONSES, json=SHORT))
        assert made == json_of(http.get(f"{RESPONSES}/{made['id']}"))
        assert http.delete(f"{RESPONSES}/{made['id']}").status_code == 405
        for body in ({**SHORT, "previous_response_id": "resp_0"}, {**SHORT, "store": False}):
            answer = http.post(RESPONSES, json=body)
            unknown = "resp_0" if answer.status_code == 404 else str(mapped(answer.json())["id"])
            for reply in (http.get(f"{RESPONSES}/{unknown}"), http.post(f"{RESPONSES}/{unknown}/cancel")):
                assert (reply.status_code, reply.json()) == (404, not_found(unknown))
        begun = json_of(http.post(RESPONSES, json=LONG))
        assert (begun["status"], begun["usage"], begun["output"]) == ("queued", None, [])
        path = f"{RESPONSES}/{begun['id']}"
        seen = [json_of(http.get(path))]
        while seen[-1]["status"] in ("queued", "in_progress"):
            assert seen[-1]["usage"] is None
            seen.append(json_of(http.get(path)))
        assert seen[-1]["status"] == "incomplete"  # it reached its limit
        assert output_of(seen[-1]) == 2000 - FEWER[engine.dialect]
        cancelled = json_of(http.post(f"{RESPONSES}/{json_of(http.post(RESPONSES, json=LONG))['id']}/cancel"))
        assert (cancelled["status"], cancelled["usage"]) == ("cancelled", None)
        wait_until(lambda: not engine.load().running, engine.drop_seconds, "it computes nothing")


def test_only_vllm_continues_a_background_stream_that_is_left(engine: Engine) -> None:
    """A vLLM continues a background stream without its reader, and returns its response; an SGLang does neither."""
    with caller(engine.url, WORKER_KEY) as http:
        with http.stream("POST", RESPONSES, json={**LONG, "stream": True}) as stream:
            response = first_response(stream)
        known = engine.dialect == "vllm"
        assert http.get(f"{RESPONSES}/{response}").status_code == (200 if known else 404)
        if known:
            wait_until(lambda: engine.load().running == 1, engine.drop_seconds, "it computes on")
            json_of(http.post(f"{RESPONSES}/{response}/cancel"))
        wait_until(lambda: not engine.load().running, engine.drop_seconds, "it computes nothing")


def first_response(stream: httpx.Response) -> str:
    """Return the id of the response, from the first event of its stream."""
    data = next(line for line in stream.iter_lines() if line.startswith("data:"))
    return str(mapped(json.loads(data.removeprefix("data:"))["response"])["id"])


def test_a_conversation_stays_at_its_engine_and_belongs_to_its_client(storing_router: Router, engine: Engine) -> None:
    """Each turn goes to the engine of the first and is charged its usage, and another client gets a 404 for it."""
    with caller(storing_router.url, f"ann {engine.dialect}") as ann, caller(storing_router.url, "bob") as bob:
        first = at(engine, lambda: ann.post(RESPONSES, json={**SHORT, "input": prompts.text("stored", words=80)}))
        client = first.headers["x-d2lpm-client"]
        last = json_of(first)
        for _ in range(6):
            previous, before = str(last["id"]), charged(storing_router, client)
            answer = ann.post(RESPONSES, json={**SHORT, "previous_response_id": previous})
            assert engine.url.endswith(answer.headers["x-d2lpm-worker"])
            given, last = int(str(mapped(last["usage"])["input_tokens"])), json_of(answer)
            usage = mapped(last["usage"])
            assert int(str(usage["input_tokens"])) > given, "it reads the turns before"
            after = charged(storing_router, client)
            assert (after[0] - before[0], after[1] - before[1]) == (usage["input_tokens"], usage["output_tokens"])
            refused = bob.post(RESPONSES, json={**SHORT, "previous_response_id": previous})
            for reply in (bob.get(f"{RESPONSES}/{previous}"), bob.post(f"{RESPONSES}/{previous}/cancel"), refused):
                assert (reply.status_code, reply.json()) == (404, not_found(previous))
            assert json_of(ann.get(f"{RESPONSES}/{previous}"))["id"] == previous
        assert charged(storing_router, client) == after, "to look costs nothing"


def test_a_background_response_holds_its_place_and_is_charged(storing_router: Router, engine: Engine) -> None:
    """The response is in flight while the engine computes it, and is charged the engine's usage."""
    with caller(storing_router.url, f"background {engine.dialect}") as http:
        answer = at(engine, lambda: http.post(RESPONSES, json=LONG))
        client, path = answer.headers["x-d2lpm-client"], f"{RESPONSES}/{json_of(answer)['id']}"
        assert storing_router.in_flight() >= 1
        wait_until(lambda: not storing_router.unfinished(), COMPUTED_SECONDS, "it has been computed")
        done = json_of(http.get(path))
        assert done["status"] == "incomplete"
        assert not engine.load().running
        # The other engine may have computed the first of two calls.
        assert charged(storing_router, client)[1] in (output_of(done), output_of(done) + both_but(engine))


def both_but(engine: Engine) -> int:
    """Return the output tokens of `LONG` at the other kind of engine."""
    return 2000 - sum(fewer for dialect, fewer in FEWER.items() if dialect != engine.dialect)


def test_a_cancelled_background_response_frees_its_place(storing_router: Router, engine: Engine) -> None:
    """Soon after the cancellation neither the router nor the engine counts the response."""
    with caller(storing_router.url, f"canceller {engine.dialect}") as http:
        begun = [json_of(http.post(RESPONSES, json=LONG)) for _ in range(2)]
        for response in begun:
            assert json_of(http.post(f"{RESPONSES}/{response['id']}/cancel"))["status"] == "cancelled"
        wait_until(lambda: not storing_router.unfinished(), engine.drop_seconds, "their places are free")
        wait_until(lambda: not engine.load().running, engine.drop_seconds, "it computes nothing")


def test_a_background_stream_outlives_its_client(storing_router: Router, engine: Engine) -> None:
    """The router reads the stream to its end, and then the response can be fetched."""
    body = {**LONG, "stream": True}
    with caller(storing_router.url, f"streamer {engine.dialect}") as http:
        for _ in range(2):
            with http.stream("POST", RESPONSES, json=body) as stream:
                response, worker = first_response(stream), stream.headers["x-d2lpm-worker"]
            if engine.url.endswith(worker):
                break
        wait_until(lambda: not storing_router.unfinished(), COMPUTED_SECONDS, "it has been computed")
        assert output_of(json_of(http.get(f"{RESPONSES}/{response}"))) == 2000 - FEWER[engine.dialect]
