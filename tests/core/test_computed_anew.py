"""Some engines compute some prompts in full, whatever their prefix cache holds; this decides who pays for that."""

from itertools import pairwise

import pytest

from router.api.body.call import Head
from router.api.families import FAMILIES
from router.core.fleet.window import FixedWindow
from router.core.model.events import CacheReport, WorkerJoined, WorkerReported, WorkReport
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import RequestId, Worker, WorkerId
from router.core.policies.dlpm.dlpm_parameters import DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, Scene

W1 = WorkerId("w1")
PROMPT = "ten chunks"
SIZE = len(PROMPT) * CHUNK_TOKENS
BOTH = {"vllm", "sglang"}
CHAT, COMPLETIONS, POOLING = "/v1/chat/completions", "/v1/completions", "/pooling"
HASHER = PromptHasher(b"a secret")


@pytest.mark.parametrize(
    ("path", "members", "anew"),
    [
        (CHAT, b"", set()),
        (CHAT, b',"logprobs":true,"top_logprobs":3', set()),
        (CHAT, b',"prompt_logprobs":null', set()),
        (CHAT, b',"prompt_logprobs":0', {"vllm"}),
        (CHAT, b',"prompt_logprobs":5', {"vllm"}),
        (CHAT, b',"echo":true', {"vllm"}),
        (CHAT, b',"echo":false', set()),
        (COMPLETIONS, b',"logprobs":5', set()),
        (COMPLETIONS, b',"echo":true', set()),
        (COMPLETIONS, b',"echo":true,"logprobs":null', set()),
        (COMPLETIONS, b',"echo":true,"logprobs":0', {"vllm"}),
        (COMPLETIONS, b',"echo":true,"logprobs":2', BOTH),
        (COMPLETIONS, b',"echo":true,"prompt_logprobs":0', {"vllm"}),
        (COMPLETIONS, b',"prompt_logprobs":0', {"vllm"}),
        (POOLING, b"", set()),
        (POOLING, b',"task":"embed"', set()),
        (POOLING, b',"task":"token_embed"', {"vllm"}),
        (POOLING, b',"task":"token_classify"', {"vllm"}),
        ("/v1/embeddings", b',"task":"token_embed"', set()),
    ],
)
def test_a_body_says_which_engines_do_not_read_their_cache_for_it(path: str, members: bytes, anew: set[str]) -> None:
    """The value 0 differs from null, and an engine that does not know a field ignores it."""
    body = b'{"model":"m","prompt":"x","input":"x","messages":[{"role":"user","content":"x"}]%b}' % members
    assert FAMILIES[path].parse(Head(path), body, HASHER).computed_anew_by == anew


def new_scene(engine: str = "vllm", settings: SchedulerSettings | None = None) -> Scene:
    """Return a scene with one worker that holds the prompt."""
    scene = Scene("rr+dlpm", DlpmParameters(), workers=(), settings=settings)
    scene.join("w1", engine=engine)
    scene.serve(scene.arrive("bob", PROMPT))
    return scene


@pytest.mark.parametrize(("engine", "found"), [("vllm", 0), ("sglang", SIZE - 1), ("generic", 0), ("", 0)])
def test_no_hit_is_predicted_where_the_engine_does_not_read_its_cache(engine: str, found: int) -> None:
    """A hit is predicted at an engine of another kind; an engine of an unknown kind is assumed not to
    read its cache.
    """
    scene = new_scene(engine)
    asked = scene.arrive("ada", PROMPT, anew={"vllm"})
    assert scene.dispatched[asked].cached_tokens == found
    scene.start(asked)
    scene.cancel(asked)
    assert scene.charged("ada") == SIZE - scene.dispatched[asked].cached_tokens


def test_a_prompt_computed_anew_is_cached_for_later_requests() -> None:
    """The engine stores what it computes, whether it read its cache or not."""
    scene = Scene("rr+dlpm", DlpmParameters(), workers=())
    scene.join("w1", engine="vllm")
    scene.serve(scene.arrive("ada", PROMPT, anew={"vllm"}))
    assert scene.dispatched[scene.arrive("bob", PROMPT)].cached_tokens > SIZE - 2 * CHUNK_TOKENS


def test_an_answer_that_did_not_read_the_cache_refutes_nothing() -> None:
    """Such an answer changes neither the believed content of the cache nor the trust in predictions for
    other requests.
    """
    scene = new_scene()
    for _ in range(40):
        asked = scene.arrive("ada", PROMPT, anew={"vllm"})
        scene.start(asked)
        scene.finish(asked, 0, cached=0)
    assert scene.dispatched[scene.arrive("bob", PROMPT)].cached_tokens > SIZE - 2 * CHUNK_TOKENS
    cache = scene.scheduler.mirror.cache(W1)
    assert (cache.calibration.totals.answers, cache.evictions.total(), list(cache.hit_ages)) == (1, 0, [])


def test_a_prompt_computed_anew_counts_in_full_in_the_window() -> None:
    """A window with room for little uncached input makes such a prompt wait while another request is unstarted."""
    scene = new_scene(settings=SchedulerSettings(window=FixedWindow(requests=8, unstarted_tokens=2 * SIZE + 64)))
    scene.arrive("bob", "other text", limit=1)
    first, second, third = (scene.arrive("ada", PROMPT, anew=anew) for anew in ({"vllm"}, {"vllm"}, ()))
    assert [request in scene.dispatched for request in (first, second, third)] == [True, False, True]


def test_longest_match_does_not_prefer_prompts_computed_anew() -> None:
    """Such a request gains nothing by going early, so a request that would hit its prefix goes first."""
    scene = new_scene(settings=SchedulerSettings(window=FixedWindow(requests=1)))
    busy = scene.arrive("ada", "x")
    anew = scene.arrive("ada", PROMPT, anew={"vllm"})
    other = scene.arrive("ada", PROMPT)
    scene.serve(busy)
    assert scene.order[-1] == other
    scene.serve(other)
    assert scene.order[-1] == anew


@pytest.mark.parametrize("source", ["itself", "its metrics"])
def test_no_hit_is_predicted_at_a_worker_without_a_prefix_cache(source: str) -> None:
    """A worker without a prefix cache is believed to hold nothing until it reports that it has one."""
    scene = new_scene()
    worker = Worker(W1, frozenset(["llama"]), engine="vllm", caches=source != "itself")
    scene.feed(WorkerJoined(worker))
    if source == "its metrics":
        scene.feed(WorkerReported(W1, 0, 0, cache=CacheReport(caches=False)))
    assert scene.dispatched[scene.arrive("ada", PROMPT)].cached_tokens == 0
    assert scene.scheduler.mirror.held_tokens(W1) == 0.0
    scene.feed(WorkerReported(W1, 0, 0, cache=CacheReport(caches=True)))
    assert scene.dispatched[scene.arrive("bob", PROMPT)].cached_tokens > 0


SECONDS_PER_TOKEN = 0.001
LONG = "a longer text, of which all but a little is found in the cache"
LONG_SIZE = len(LONG) * CHUNK_TOKENS


def measured(engine: str = "vllm", settings: SchedulerSettings | None = None) -> Scene:
    """Return a scene whose worker has a known prefill rate of a thousand tokens per second and holds the
    long prompt.
    """
    scene = new_scene(engine, settings)
    for number in range(60):
        asked = scene.arrive("bob", f"{number:02} lessons of its pace " * 2)
        scene.now += 44 * CHUNK_TOKENS * SECONDS_PER_TOKEN
        scene.serve(asked)
    scene.serve(scene.arrive("bob", LONG))
    scene.now += 10.0
    return scene


def left_after(scene: Scene, asked: RequestId, seconds: float) -> float:
    """Return what a client is charged that leaves at its first token, which comes after this many seconds."""
    scene.now += seconds
    scene.start(asked)
    scene.cancel(asked)
    return scene.charged("ada")


def test_a_client_that_leaves_at_a_late_first_token_pays_for_the_prefill() -> None:
    """The charge rises with the time, from the prediction to the whole prompt and no further."""
    seconds = [0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 60.0]
    charges = []
    for each in seconds:
        scene = measured()
        asked = scene.arrive("ada", LONG)
        predicted = LONG_SIZE - scene.dispatched[asked].cached_tokens
        assert predicted <= 2 * CHUNK_TOKENS
        charges.append(left_after(scene, asked, each))
    assert charges[:2] == [predicted, predicted]
    assert charges[-2:] == [LONG_SIZE, LONG_SIZE]
    assert all(before <= after for before, after in pairwise(charges))
    for each, charged in zip(seconds[3:6], charges[3:6], strict=True):
        assert 0.7 * each / SECONDS_PER_TOKEN - 400 <= charged <= 1.3 * each / SECONDS_PER_TOKEN


def test_the_engines_usage_counts_more_than_the_time() -> None:
    """If the engine reports its usage, the time does not count: the engine may have done work that the router does not
    know.
    """
    scene = measured()
    asked = scene.arrive("ada", LONG)
    scene.now += 60.0
    scene.start(asked)
    scene.finish(asked, 0, cached=LONG_SIZE - 7)
    assert scene.charged("ada") == 7


@pytest.mark.parametrize("computed", [0, 700])
def test_the_engines_counter_bounds_the_charge_for_the_time(computed: int) -> None:
    """However long the first token took, no client pays for input that the engine has not counted."""
    scene = measured()
    scene.feed(WorkerReported(W1, 0, 0, work=WorkReport(1e6)))
    scene.feed(WorkerReported(W1, 0, 0, work=WorkReport(1e6 + computed)))
    asked = scene.arrive("ada", LONG)
    predicted = LONG_SIZE - scene.dispatched[asked].cached_tokens
    assert left_after(scene, asked, 60.0) == predicted + computed


def test_no_client_pays_for_the_prefill_of_others() -> None:
    """A client does not pay for requests before its own, beside its own, or for waiting ones that may have been
    started.
    """
    scene = measured()
    others = [scene.arrive("bob", f"{number} other " * 7) for number in range(3)]
    asked = scene.arrive("ada", LONG)
    predicted = LONG_SIZE - scene.dispatched[asked].cached_tokens
    work = sum(len(f"{number} other " * 7) * CHUNK_TOKENS for number in range(3)) * SECONDS_PER_TOKEN
    scene.now += work / 3
    scene.start(others[0])
    scene.now += 2 * work / 3
    scene.start(others[1])
    assert left_after(scene, asked, 0.01) == predicted


def test_no_client_pays_for_waiting_for_a_slot() -> None:
    """If the engine's batch was full, the time counts from when another request left it."""
    scene = measured()
    scene.feed(WorkerReported(W1, 4, 0, places=4))
    running = [scene.arrive("bob", f"run {number}") for number in range(4)]
    for request in running:
        scene.now += 0.2
        scene.start(request)
    asked = scene.arrive("ada", LONG)
    predicted = LONG_SIZE - scene.dispatched[asked].cached_tokens
    scene.now += 50.0
    scene.finish(running[0], 0)
    assert left_after(scene, asked, 0.05) == predicted


def test_the_same_time_is_not_charged_twice() -> None:
    """If two requests started together and both clients leave, one is charged for the unexplained time and the other
    for the rest.
    """
    scene = measured()
    asked = [scene.arrive("ada", LONG), scene.arrive("ada", LONG)]
    predicted = sum(LONG_SIZE - scene.dispatched[each].cached_tokens for each in asked)
    scene.now += 1.5
    for each in asked:
        scene.start(each)
    for each in asked:
        scene.cancel(each)
    assert predicted < scene.charged("ada") <= 1.3 * 1.5 / SECONDS_PER_TOKEN


def test_no_request_is_charged_more_than_its_whole_prompt() -> None:
    """The rest of the unexplained time is left for those that started with it."""
    scene = measured()
    asked = [scene.arrive("ada", LONG), scene.arrive("ada", LONG)]
    scene.now += 60.0
    for each in asked:
        scene.start(each)
    for each in asked:
        scene.cancel(each)
    assert scene.charged("ada") == 2 * LONG_SIZE


@pytest.mark.parametrize("way", ["whole answers", "an answer that reports it", "slow steps"])
def test_other_causes_of_a_late_first_token_are_not_charged(way: str) -> None:
    """No client pays for prompts whose start is not visible, for one that proved to be computed in full, or for steps
    with many streams.
    """
    scene = measured()
    running = scene.arrive("bob", "runs beside it") if way == "slow steps" else None
    if running is not None:
        scene.start(running)
        for number in range(1, 20):
            scene.now += 1.5
            scene.progress(running, 1 + number)
    for number in range(2 if way == "whole answers" else 0):
        scene.arrive("bob", f"{number} whole " * 4, streamed=False)
    reporting = scene.arrive("bob", LONG) if way == "an answer that reports it" else None
    asked = scene.arrive("ada", LONG)
    predicted = LONG_SIZE - scene.dispatched[asked].cached_tokens
    scene.now += 1.8
    if reporting is not None:
        scene.start(reporting)
        scene.start(asked)
        scene.finish(reporting, 0, cached=0)
    assert left_after(scene, asked, 0.0) == predicted


def test_before_its_prefill_rate_is_known_the_prediction_is_charged() -> None:
    """A guessed prefill rate never raises the charge above the prediction."""
    scene = new_scene()
    asked = scene.arrive("ada", PROMPT)
    assert left_after(scene, asked, 60.0) == SIZE - scene.dispatched[asked].cached_tokens


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prompt_with_several_answers_is_charged_once(engine: str) -> None:
    """A real engine reports as cached what the first answer had computed just before."""
    scene = new_scene(engine)
    asked = scene.arrive("ada", "a new one.", answers=3)
    scene.start(asked)
    scene.finish(asked, cached=SIZE - 1)
    assert scene.charged("ada") == SIZE
    again = scene.arrive("carol", "a new one.", answers=3)
    scene.start(again)
    scene.finish(again, cached=SIZE - 1)
    assert scene.charged("carol") == SIZE - scene.dispatched[again].cached_tokens <= CHUNK_TOKENS
