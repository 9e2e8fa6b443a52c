"""Explanations: why a request was sent to its worker, and when."""

import json
from dataclasses import replace
from typing import Any

import pytest

from router.core.model.commands import Decision, Deficit, Dispatch, PassedOver, Refusal, Reject
from router.core.model.events import Arrived, Cancelled, Event, Failed, Fault, Finished, Prefilled, Returned, Started
from router.core.model.load import Limits, Load
from router.core.model.request import ClientId, Leg, Request, RequestId, Usage, WorkerId
from router.errors import UnknownRequest
from router.telemetry.explain import DECISION_LIMIT, OVERTAKERS_LIMIT, Explanation, Explanations, RequestOutcome
from tests.support.running import RunningRouter, chat, running_router
from tests.support.scripted_engine import scripted_engine

WORKER = WorkerId("w1")


def request(name: str) -> Request:
    return Request(RequestId(name), ClientId("ann"), "m", ())


def dispatch(name: str, match: dict[str, int] | None = None, passed: tuple[PassedOver, ...] = ()) -> Dispatch:
    matched = {WorkerId(worker): tokens for worker, tokens in (match or {}).items()}
    decision = Decision(ClientId("ann"), matched, Deficit(3.5, None), Load(2, 1, 700), Limits(256, 16384), passed)
    return Dispatch(RequestId(name), WORKER, 64, "match", decision)


def observed(*events: tuple[float, Event, list[Dispatch | Reject]]) -> Explanations:
    """Return explanations that observed these events."""
    explanations = Explanations("d2lpm")
    for at, event, commands in events:
        explanations.observe(at, event, commands)
    return explanations


def explained(explanations: Explanations, name: str, now: float = 100.0) -> Explanation:
    return explanations.explain(name, now, 1_700_000_000.0)


# Content


def test_a_dispatch_is_explained_with_all_that_was_known() -> None:
    """The explanation has worker, reason, prediction, matches, home, deficits, window and the requests passed over."""
    passed = (PassedOver(RequestId("big"), "did not fit"),)
    explanations = observed(
        (1.0, Arrived(request("big")), []),
        (1.5, Arrived(request("r")), [dispatch("r", {"w1": 64, "w2": 96, "w3": 96}, passed)]),
    )
    choice = explained(explanations, "r").dispatch
    assert choice is not None
    assert (choice.worker, choice.why, choice.predicted_cached_tokens) == ("w1", "match", 64)
    assert choice.match == {"w1": 64, "w2": 96, "w3": 96}
    assert choice.home == ["w2", "w3"]
    assert choice.deficit == Deficit(3.5, None)
    assert (choice.load.requests, choice.load.unstarted, choice.load.unstarted_tokens) == (2, 1, 700)
    assert choice.limits == Limits(256, 16384)
    assert [(p.request, p.reason) for p in choice.passed_over] == [("big", "did not fit")]


def test_a_prompt_without_a_match_has_no_home() -> None:
    """No worker is named where none holds anything of the prompt."""
    choice = explained(observed((0.0, Arrived(request("r")), [dispatch("r")])), "r").dispatch
    assert choice is not None
    assert (choice.match, choice.home) == ({}, [])


def test_passes_over_a_request_are_counted_by_reason_and_client() -> None:
    """The explanation of a request that was passed over says why, and whose requests went ahead of it."""
    passed = (PassedOver(RequestId("big"), "did not fit"),)
    explanations = observed(
        (1.0, Arrived(request("big")), []),
        (2.0, Arrived(request("1")), [dispatch("1", passed=passed)]),
        (3.0, Arrived(request("2")), [dispatch("2", passed=passed)]),
    )
    assert explained(explanations, "big").held_back == {"did not fit": 2}
    assert explained(explanations, "big").sent_ahead == {"ann": 2}


def test_so_many_clients_sent_ahead_are_counted() -> None:
    """The record of a request that waits for long stays small."""
    passed = (PassedOver(RequestId("big"), "did not fit"),)
    explanations = observed((1.0, Arrived(request("big")), []))
    for number in range(3 * OVERTAKERS_LIMIT):
        command = dispatch("1", passed=passed)
        decision = command.decision._replace(client=ClientId(f"c{number % (OVERTAKERS_LIMIT + 5)}"))
        explanations.observe(2.0, Arrived(request("1")), [replace(command, decision=decision)])
    explanation = explained(explanations, "big")
    assert len(explanation.sent_ahead) == OVERTAKERS_LIMIT
    assert explanation.held_back == {"did not fit": 3 * OVERTAKERS_LIMIT}


def test_the_latest_decisions_are_kept_in_order() -> None:
    """Each dispatch and each refusal counts, a second dispatch of a request, too; only the last ones are kept."""
    explanations = observed(
        (1.0, Arrived(request("r")), [dispatch("r", {"w1": 64}, (PassedOver(RequestId("big"), "did not fit"),))]),
        (4.0, Returned(RequestId("r"), accepted=False, fault=Fault.BROKEN), [dispatch("r")]),
        (5.0, Arrived(request("late")), [Reject(RequestId("late"), Refusal.QUEUE_FULL, 2.0)]),
    )
    sent, again, refused = explanations.latest_decisions(105.0, 1000.0)
    assert (sent.number, sent.time, sent.request, sent.client, sent.worker) == (1, 896.0, "r", "ann", "w1")
    assert (sent.why, sent.waited_s, sent.cached_tokens, sent.passed_over) == ("match", 0.0, 64, 1)
    assert (again.number, again.waited_s, again.passed_over) == (2, 3.0, 0)
    assert (refused.number, refused.worker, refused.why) == (3, None, "rejected-saturated")
    for number in range(2 * DECISION_LIMIT):
        explanations.observe(6.0, Arrived(request(f"{number}")), [dispatch(f"{number}")])
    latest = explanations.latest_decisions(105.0, 1000.0)
    assert [each.number for each in latest] == [*range(3 + DECISION_LIMIT + 1, 3 + 2 * DECISION_LIMIT + 1)]


def test_both_of_two_attempts_at_once_are_explained() -> None:
    """The request goes on while its prompt is computed, and the worker that failed it is named, whichever it was."""
    prefill = replace(dispatch("r"), worker=WorkerId("p"), leg=Leg.PREFILL, partner=WORKER)
    decode = replace(dispatch("r"), leg=Leg.DECODE, partner=WorkerId("p"))
    failed = Returned(RequestId("r"), accepted=True, fault=Fault.BROKEN, leg=Leg.PREFILL)
    explanations = observed(
        (1.0, Arrived(request("r")), [prefill, decode]),
        (2.0, failed, [prefill, decode]),
        (4.0, Prefilled(RequestId("r"), decoding=True), []),
    )
    explanation = explained(explanations, "r")
    assert explanation.dispatch is not None
    assert explanation.prefill is not None
    assert (explanation.prefill.worker, explanation.dispatch.worker) == ("p", "w1")
    assert explanation.tried == ["p"]
    assert (explanation.state, explanation.times.prefilled_s) == (RequestOutcome.IN_FLIGHT, 3.0)


def test_times_are_seconds_after_the_arrival() -> None:
    """Times are relative to the arrival, which is a time of the wall clock."""
    explanations = observed(
        (40.0, Arrived(request("r")), []),
        (42.0, Started(RequestId("other")), [dispatch("r")]),
        (42.5, Started(RequestId("r")), []),
        (45.0, Finished(RequestId("r"), Usage(100, 7, 64)), []),
    )
    explanation = explained(explanations, "r", now=100.0)
    times = explanation.times
    assert times.arrived.timestamp() == 1_700_000_000.0 - 60.0
    assert (times.dispatched_s, times.started_s, times.ended_s, times.waited_s) == (2.0, 2.5, 5.0, 2.0)
    assert (explanation.state, explanation.usage) == (RequestOutcome.FINISHED, Usage(100, 7, 64))


def test_the_wait_of_a_waiting_request_lasts_until_now() -> None:
    """The wait of a request that ended in the queue lasts until its end."""
    explanations = observed(
        (40.0, Arrived(request("r")), []),
        (41.0, Arrived(request("left")), []),
        (43.0, Cancelled(RequestId("left")), []),
    )
    assert explained(explanations, "r", now=100.0).times.waited_s == 60.0
    assert explained(explanations, "left", now=100.0).times.waited_s == 2.0


@pytest.mark.parametrize(
    ("ending", "state", "reason"),
    [
        (Finished(RequestId("r")), RequestOutcome.FINISHED, None),
        (Cancelled(RequestId("r")), RequestOutcome.CANCELLED, None),
        (Failed(RequestId("r"), accepted=True), RequestOutcome.FAILED, "when the worker may have begun"),
        (Failed(RequestId("r"), accepted=False), RequestOutcome.FAILED, "before the worker had begun"),
    ],
)
def test_each_outcome_is_explained(
    ending: Finished | Cancelled | Failed, state: RequestOutcome, reason: str | None
) -> None:
    """The explanation has the state, the reason and the point of failure."""
    explanations = observed((1.0, Arrived(request("r")), [dispatch("r")]), (2.0, ending, []))
    explanation = explained(explanations, "r")
    assert (explanation.state, explanation.reason) == (state, reason)


def test_a_refused_request_stays_refused() -> None:
    """The later settlement by its front does not make it a cancelled one."""
    reject = Reject(RequestId("r"), Refusal.QUEUE_FULL, 2.5)
    explanations = observed((1.0, Arrived(request("r")), [reject]), (1.5, Cancelled(RequestId("r")), []))
    explanation = explained(explanations, "r")
    assert (explanation.state, explanation.reason) == (RequestOutcome.REJECTED, "rejected-saturated")
    assert (explanation.retry_after_s, explanation.times.ended_s) == (2.5, 0.0)


def test_workers_that_failed_a_request_are_listed() -> None:
    """The list does not include workers that failed an earlier request with the same id."""
    explanations = Explanations("d2lpm")
    explanations.observe(1.0, Arrived(request("r")), [dispatch("r")])
    for _ in range(2):
        explanations.observe(1.0, Returned(RequestId("r"), accepted=False, fault=Fault.BROKEN), [dispatch("r")])
    assert explained(explanations, "r").tried == ["w1", "w1"]
    explanations.observe(2.0, Failed(RequestId("r"), accepted=True), [])
    explanations.observe(3.0, Arrived(request("r")), [])
    assert explained(explanations, "r").tried == []


# What is remembered


def test_only_the_last_arrivals_are_remembered() -> None:
    """A reused id counts as the newest; late events of a forgotten request change nothing."""
    explanations = Explanations("d2lpm", limit=3)
    for name in ("a", "b", "c", "a", "d", "e"):
        explanations.observe(1.0, Arrived(request(name)), [])
    explanations.observe(2.0, Started(RequestId("b")), [dispatch("b", passed=(PassedOver(RequestId("c"), "x"),))])
    explanations.observe(3.0, Finished(RequestId("b")), [])
    assert list(explanations._records) == ["a", "d", "e"]
    for name in ("b", "c", "never"):
        with pytest.raises(UnknownRequest):
            explained(explanations, name)


# Over HTTP


async def explanation_of(router: RunningRouter, name: str) -> Any:
    return await router.get_json(f"/explain/{name}")


async def test_a_request_is_explained_while_it_waits_runs_and_after() -> None:
    """The explanation is found by the id that the client chose and got back."""
    async with scripted_engine() as engine, running_router(engine.url, max_inflight=1) as router:
        async with router.post(chat(user="ann", stream=True), x_request_id="first") as first:
            call = await engine.call()
            async with router.post(chat("Hello " * 100, user="bob"), x_request_id="a/b c") as second:
                await router.until_waiting(1)
                assert (await explanation_of(router, "first"))["state"] == "in flight"
                waiting = await explanation_of(router, "a%2Fb%20c")
                assert (waiting["state"], waiting["dispatch"], waiting["client"]) == ("waiting", None, "user-bob")
                await call.answer(prompt=10, completion=3)
                assert (await first.response()).headers["x-request-id"] == "first"
                await first.read()
                await (await engine.call()).answer()
                await second.read()
        await router.until_all_ended()
        done = await explanation_of(router, "first")
        assert done.keys() == {
            *("request", "client", "model", "policy", "state", "reason", "retry_after_s", "times"),
            *("tried", "held_back", "sent_ahead", "dispatch", "prefill", "handoffs_lost", "usage", "session"),
        }
        assert (done["dispatch"]["leg"], done["prefill"], done["handoffs_lost"]) == ("whole", None, 0)
        assert (done["request"], done["client"], done["model"]) == ("first", "user-ann", "m")
        assert (done["policy"], done["state"], done["reason"]) == ("dlpm_home", "finished", None)
        assert done["usage"] == {"input_tokens": 10, "output_tokens": 3, "cached_tokens": 0}
        assert done["times"]["waited_s"] <= done["times"]["started_s"] <= done["times"]["ended_s"]
        assert done["dispatch"]["worker"] == engine.url.removeprefix("http://")
        assert done["dispatch"]["limits"] == {"requests": 1, "unstarted_tokens": 4096}
        assert done["dispatch"]["load"] == {"requests": 0, "unstarted": 0, "unstarted_tokens": 0}
        assert done["dispatch"]["deficit"].keys() == {"placement", "order"}


async def test_a_generated_id_is_explained() -> None:
    """The id in the response header finds the explanation."""
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(chat()) as post:
        await (await engine.call()).answer()
        name = (await post.response()).headers["x-request-id"]
        await post.read()
        await router.until_all_ended()
        assert (await explanation_of(router, name))["state"] == "finished"


async def test_a_refused_a_lost_and_a_failed_request_are_explained() -> None:
    """Each has its own reason; a request without another worker names the one that failed it."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, max_queued=0, poll_interval=3600) as router,
    ):
        async with router.post(chat(), x_request_id="failed"):
            call = await engine.call()
            async with router.post(chat(), x_request_id="refused") as post:
                await post.read()
            await call.respond(500, b"{}")
        await router.until_all_ended()
        await engine.stop()
        async with router.post(chat(), x_request_id="lost") as post:
            await post.read()
        refused = await explanation_of(router, "refused")
        assert (refused["state"], refused["reason"]) == ("rejected", "rejected-saturated")
        failed = await explanation_of(router, "failed")
        assert (failed["state"], failed["reason"]) == ("failed", "when the worker may have begun")
        lost = await explanation_of(router, "lost")
        assert (lost["state"], lost["reason"]) == ("rejected", "rejected-no-endpoints")
        assert lost["tried"] == [engine.url.removeprefix("http://")]


async def test_an_unknown_id_is_an_openai_error() -> None:
    """An unknown id gives a 404 in the shape that client libraries parse."""
    async with running_router("http://127.0.0.1:9") as router:
        async with router.http.get("/explain/nope") as response:
            assert response.status == 404
            error = json.loads(await response.read())["error"]
        assert (error["type"], error["code"]) == ("not_found_error", "unknown_request")
        assert "`nope`" in error["message"]


async def test_the_answer_is_documented() -> None:
    """The OpenAPI document has every field, with a description."""
    async with running_router("http://127.0.0.1:9") as router:
        document = await router.get_json("/openapi.json")
        responses = document["paths"]["/explain/{request_id}"]["get"]["responses"]
        assert responses.keys() >= {"200", "404"}
        schemas = document["components"]["schemas"]
        assert responses["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Explanation")
        assert schemas["Explanation"]["properties"].keys() == set(Explanation.__dataclass_fields__)
        assert schemas["Explanation"]["properties"]["held_back"]["description"]
        assert schemas["DispatchRecord"]["properties"]["home"]["description"]
