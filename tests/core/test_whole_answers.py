"""Unstreamed answers are charged while they run, although none of their output is seen before all of it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.attempts import ESTIMATE_SECONDS
from router.core.fleet.service_rate import FIRST_SECONDS_PER_OUTPUT_TOKEN
from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import Failed, Fault, Finished, Returned, WorkerReported, WorkReport
from router.core.model.request import ClientId, RequestId, Usage, WorkerId
from router.core.policies.dlpm.dlpm_parameters import DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

W1 = WorkerId("w1")
RATE = 30.0
"""Tokens that an answer gains in a second."""
PROMPT = "ten chunks"
SIZE = len(PROMPT) * CHUNK_TOKENS
PREFILL = SIZE * 1e-4
"""In seconds, as it is taken to be before any was seen."""


def new_scene(*, streams: bool = True, settings: SchedulerSettings | None = None) -> Scene:
    """Return a scene with one worker. If `streams`, a stream has shown its decode rate for ten seconds and goes on."""
    scene = Scene("rr+dlpm", DlpmParameters(), settings=settings)
    if streams:
        stream = scene.arrive("bob", "a stream", limit=10_000)
        scene.start(stream)
        run(scene, 10.0)
    return scene


def run(scene: Scene, seconds: float, other: RequestId | None = None) -> None:
    """Let time pass in which the first stream, if there is one, and the `other` one gain their tokens."""
    for _ in range(round(seconds * 10)):
        scene.wait(0.1)
        if other is not None:
            scene.progress(other, scene.scheduler.attempts[other].bill.tokens.output + round(RATE / 10))
        if "bob1" in scene.requests:
            scene.progress(RequestId("bob1"), 1 + round(scene.now * RATE))


def output(scene: Scene, client: str = "ada") -> int:
    return scene.scheduler.ledger.accounts[ClientId(client)].charged.output


def ask(scene: Scene, limit: int = 10_000, answers: int = 1) -> RequestId:
    return scene.arrive("ada", PROMPT, limit=limit, streamed=False, answers=answers)


def test_an_unstreamed_answer_is_charged_like_the_stream_beside_it() -> None:
    """At any time its charge is within half a second and a few tokens of the stream's, and its client's deficit falls
    accordingly.
    """
    scene = new_scene()
    ask(scene)
    for second in range(1, 8):
        run(scene, 1.0)
        assert output(scene) == pytest.approx(RATE * second, abs=RATE * ESTIMATE_SECONDS + 4)
        credit = scene.deficit("ada").order
        assert credit is not None
        assert credit <= DlpmParameters().quantum - SIZE - 2 * output(scene)


@pytest.mark.parametrize("produced", [3, 100, 170])
def test_the_engines_usage_replaces_the_estimate(produced: int) -> None:
    """The engine's usage counts at the end, whether it is more or less than the estimate."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.0)
    scene.finish(asked, produced)
    assert scene.charged("ada") == SIZE + 2 * produced


def test_an_answer_without_usage_costs_no_output() -> None:
    """A complete answer without usage costs no output tokens, because it may not be text at all."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.0)
    scene.feed(Finished(asked))
    assert scene.charged("ada") == SIZE


def test_a_client_that_disconnects_pays_for_the_output_until_then() -> None:
    """The charge covers the time up to that moment, not only up to the last estimate before it."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.2)
    scene.now += 0.3
    scene.cancel(asked)
    assert output(scene) == pytest.approx(RATE * 5.5, abs=3)


def test_no_estimate_exceeds_the_limit_that_the_client_set() -> None:
    """However long an answer takes, its estimate stays within the client's limit."""
    scene = new_scene()
    asked = ask(scene, limit=30)
    run(scene, 60.0)
    assert output(scene) == 30
    scene.cancel(asked)
    assert scene.charged("ada") == SIZE + 2 * 30


def test_several_answers_gain_several_tokens_at_a_time() -> None:
    """A call's estimate grows by one token per choice or prompt at a time."""
    scene = new_scene()
    asked = ask(scene, answers=4)
    run(scene, 5.0)
    scene.cancel(asked)
    assert output(scene) == pytest.approx(4 * RATE * 5, rel=0.05)


@pytest.mark.parametrize("again", [False, True])
def test_no_output_is_charged_if_the_worker_broke_off(again: bool) -> None:
    """Only the input is charged, because the worker may have hung for all that time."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.0)
    assert output(scene) > 0
    event = Returned(asked, True, Fault.BROKEN) if again else Failed(asked, True, None, Fault.BROKEN)
    scene.feed(event)
    assert scene.charged("ada") == SIZE


def test_an_answer_that_another_worker_begins_anew_is_charged_once() -> None:
    """The output of the first attempt is not charged again, and is no input of the second."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.0)
    scene.join("w2")
    scene.feed(Returned(asked, True, Fault.ERROR))
    first = output(scene)
    assert (first > 100, scene.worker_of(asked)) == (True, "w2")
    assert scene.scheduler.fleet[WorkerId("w2")].load.unstarted_tokens == SIZE
    run(scene, 1.0)
    assert output(scene) == first
    scene.finish(asked, 200)
    assert scene.charged("ada") == SIZE + 2 * 200


def test_an_answer_that_its_engine_ended_with_an_error_is_charged() -> None:
    """The answer is charged because the engine worked for it, and a client might have caused the error."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.0)
    scene.feed(Failed(asked, True, None, Fault.ERROR))
    assert output(scene) == pytest.approx(RATE * 5, abs=4)


def test_without_streams_the_rate_is_that_of_earlier_answers() -> None:
    """Without a stream, the usage of earlier answers shows the decode rate."""
    scene = new_scene(streams=False)
    for _ in range(4):
        asked = ask(scene)
        run(scene, 10.0)
        scene.finish(asked, round(10 * RATE))
    before = output(scene)
    asked = ask(scene)
    run(scene, 5.0)
    scene.cancel(asked)
    assert output(scene) - before == pytest.approx(RATE * 5, rel=0.05)


def test_without_any_answer_the_rate_is_that_of_the_engines_counter() -> None:
    """The rate is the engine's counted output divided by all requests that it reports as running, including those of
    others.
    """
    scene = new_scene(streams=False)
    asked = ask(scene)
    for second in range(10):
        scene.feed(WorkerReported(W1, 5, 0, work=WorkReport(0.0, 1000.0 + 5 * RATE * second)))
        run(scene, 1.0)
    scene.cancel(asked)
    assert output(scene) == pytest.approx(RATE * 10, rel=0.1)


def counted(scene: Scene, per_second: float, *, running: int, seconds: int = 10) -> None:
    """Let time pass in which the engine counts these output tokens per second beside those of the first stream."""
    for second in range(seconds):
        of_stream = RATE * scene.now if "bob1" in scene.requests else 0
        work = WorkReport(0.0, 1000.0 + per_second * second + of_stream)
        scene.feed(WorkerReported(W1, running, 0, work=work))
        run(scene, 1.0)


@pytest.mark.parametrize(("faster", "paid"), [(0.0, 0.5), (0.7, 0.7), (1.0, 1.0), (1.5, 1.5), (4.0, 2.0)])
def test_a_client_that_disconnects_pays_for_what_the_engine_counted(faster: float, paid: float) -> None:
    """The engine's counter corrects the estimate if unstreamed answers grow faster or slower than streams show, from
    half to twice as fast.
    """
    scene = new_scene()
    asked = ask(scene)
    counted(scene, faster * RATE, running=2)
    scene.cancel(asked)
    assert output(scene) == pytest.approx(paid * RATE * 10, rel=0.15)


def test_no_client_pays_for_other_calls_at_the_engine() -> None:
    """If another router's calls run there, its counter shows nothing and the estimate is charged; this router's own
    calls share what was counted.
    """
    scene = new_scene()
    asked = ask(scene)
    counted(scene, 3 * RATE, running=5)
    scene.cancel(asked)
    assert output(scene) == pytest.approx(RATE * 10, rel=0.05)
    scene = new_scene()
    asked, other = ask(scene), scene.arrive("eve", PROMPT, limit=10_000, streamed=False)
    counted(scene, 3 * RATE, running=3)
    scene.cancel(asked)
    scene.cancel(other)
    assert output(scene) == pytest.approx(1.5 * RATE * 10, rel=0.15)
    assert output(scene, "eve") == pytest.approx(1.5 * RATE * 10, rel=0.15)


def test_no_more_is_charged_than_the_limit_that_the_client_set() -> None:
    """The client's limit bounds the charge, whatever the engine counted."""
    scene = new_scene()
    asked = ask(scene, limit=round(12 * RATE))
    counted(scene, 2 * RATE, running=2)
    scene.cancel(asked)
    assert output(scene) == round(12 * RATE)


def test_before_anything_is_known_a_slow_engine_is_assumed() -> None:
    """A slow decode rate is assumed at first, since otherwise the first answers would be free."""
    scene = new_scene(streams=False)
    asked = ask(scene)
    run(scene, 5.0)
    assert output(scene) == pytest.approx((5.0 - PREFILL) / FIRST_SECONDS_PER_OUTPUT_TOKEN, abs=12)
    scene.cancel(asked)
    assert output(scene) == pytest.approx((5.0 - PREFILL) / FIRST_SECONDS_PER_OUTPUT_TOKEN, abs=2)


def test_no_output_is_charged_while_a_call_waits_in_the_engine() -> None:
    """As many calls as the engine reports waiting are assumed to wait there: the latest of those of which nothing was
    seen.
    """
    scene = new_scene()
    running, waiting = ask(scene), scene.arrive("eve", PROMPT, limit=10_000, streamed=False)
    for _ in range(50):
        scene.feed(WorkerReported(W1, 2, 1))
        run(scene, 0.1)
    assert output(scene) == pytest.approx(RATE * 5, abs=RATE * ESTIMATE_SECONDS + 4)
    assert output(scene, "eve") <= 4
    scene.finish(running, 150)
    scene.feed(WorkerReported(W1, 2, 0))
    run(scene, 5.0)
    scene.cancel(waiting)
    assert output(scene, "eve") == pytest.approx(RATE * 5, abs=4)


@pytest.mark.parametrize("told", [False, True])
def test_a_call_at_a_full_engine_gains_nothing_until_there_is_a_slot(told: bool) -> None:
    """A slot is free when another call ends, or when the engine reports that nothing waits."""
    scene = new_scene()
    scene.feed(WorkerReported(W1, 1, 0, places=2))
    other = scene.arrive("bob", "another", limit=10_000)
    scene.start(other)
    asked = ask(scene)
    assert asked in scene.dispatched
    run(scene, 5.0, other=other)
    assert output(scene) == 0
    if told:
        scene.feed(WorkerReported(W1, 3, 0, places=2))
    else:
        scene.finish(other, 151)
    run(scene, 5.0, other=other if told else None)
    scene.cancel(asked)
    assert output(scene) == pytest.approx(RATE * 5, abs=4)


def test_an_answer_that_turns_out_to_stream_is_counted_from_then_on() -> None:
    """Some calls show only by their answer that they are streamed; their output is counted from then on."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 1.0)
    estimated = output(scene)
    scene.start(asked)
    run(scene, 5.0)
    assert output(scene) == estimated
    scene.progress(asked, 300)
    assert output(scene) == 300


def test_a_refused_call_owes_nothing_although_it_was_estimated() -> None:
    """The engine did not compute a refused call, so its estimated output is refunded."""
    scene = new_scene()
    asked = ask(scene)
    run(scene, 5.0)
    scene.refuse(asked)
    assert scene.charged("ada") == 0


ENDS = ("told", "untold", "left", "broken", "error", "refused", "returned")


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["ada", "eve"]),
            st.booleans(),
            st.sampled_from(ENDS),
            st.floats(0.0, 3.0),
            st.integers(0, 80),
            st.integers(1, 3),
        ),
        max_size=12,
    ),
    one_at_a_time=st.booleans(),
)
def test_every_token_is_charged_once(calls: list[tuple[str, bool, str, float, int, int]], one_at_a_time: bool) -> None:
    """Each token is charged to one client at one worker: in the end as the engine reports, or no more than was
    possible.
    """
    scene = new_scene(settings=ONE_AT_A_TIME if one_at_a_time else None, streams=not one_at_a_time)
    told: dict[str, int] = {"ada": 0, "eve": 0}
    most: dict[str, int] = {"ada": 0, "eve": 0}
    for client, streamed, end, seconds, produced, answers in calls:
        asked = scene.arrive(client, PROMPT, limit=80, streamed=streamed, answers=answers)
        run(scene, seconds)
        if streamed and asked in scene.dispatched:
            scene.start(asked)
        match end:
            case "told":
                scene.finish(asked, produced)
                told[client] += produced
            case "untold":
                scene.feed(Failed(asked, True, Usage(SIZE, produced), Fault.CALL))
                told[client] += produced
            case "left" | "error":
                scene.cancel(asked) if end == "left" else scene.feed(Failed(asked, True, None, Fault.ERROR))
                most[client] += 0 if streamed else 80
            case "broken":
                scene.feed(Failed(asked, True, None, Fault.BROKEN))
            case "refused":
                scene.refuse(asked)
            case "returned":
                scene.feed(Returned(asked, True, Fault.BROKEN))
                scene.cancel(asked)
        accounts = scene.scheduler.ledger
        by_worker = [state.charged for state in scene.scheduler.fleet]
        by_client = [account.served for account in accounts.accounts.values()]
        assert total(by_worker) == total(by_client)
    for client, charged in told.items():
        if client in {name for name, *_ in calls}:
            assert charged <= output(scene, client) <= charged + most[client]
    assert set(scene.scheduler.attempts) <= {RequestId("bob1")}


def total(tokens: list[Tokens]) -> Tokens:
    added = NOTHING
    for each in tokens:
        added = added.plus(each)
    return added


def test_output_beyond_the_limit_is_not_taken_back() -> None:
    """If an engine counted more output than the client allowed, a second try that nobody sees end adds nothing."""
    scene = Scene("d2lpm", workers=("w1", "w2"))
    request = scene.arrive("ann", "xx", limit=5, streamed=False)
    scene.feed(Returned(request, accepted=True, fault=Fault.ERROR, usage=Usage(64, 9, 0)))
    scene.cancel(request)
    assert scene.scheduler.ledger.accounts[ClientId("ann")].served.output == 9
