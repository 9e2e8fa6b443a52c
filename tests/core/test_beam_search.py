"""vLLM's beam search computes more input than its usage reports: this decides who pays for that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.body.call import Head
from router.api.families import FAMILIES
from router.core.cache.engine_rules import resent_tokens
from router.core.model.events import CacheReport, Fault, Returned, WorkerReported
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import WorkerId
from router.core.policies.dlpm.dlpm_parameters import DlpmParameters
from tests.core.scenario import CHUNK_TOKENS, Scene

PROMPT = "ten chunks"
SIZE = len(PROMPT) * CHUNK_TOKENS
BEAMS, LENGTH, BLOCK = 4, 20, 16
HASHER = PromptHasher(b"a secret")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("members", "searches"),
    [(b"", False), (b',"use_beam_search":true', True), (b',"use_beam_search":"false"', False)],
)
def test_a_body_says_whether_beams_are_searched(path: str, members: bytes, searches: bool) -> None:
    """By vLLM's member of that name."""
    body = b'{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}]%b}' % members
    assert FAMILIES[path].parse(Head(path), body, HASHER).beam_search is searches


@given(st.integers(1, 500), st.integers(1, 5), st.integers(0, 60), st.integers(1, 64))
def test_each_beam_is_sent_anew_for_each_token_after_the_first(
    prompt: int, beams: int, length: int, block: int
) -> None:
    """All of its full blocks are found in the cache, but never its last token."""
    lengths = range(prompt + 1, prompt + length)
    assert resent_tokens(prompt, beams, length, block) == beams * sum(
        sent - (sent - 1) // block * block for sent in lengths
    )


def charged(engine: str, *, caches: bool = True, searches: bool = True) -> float:
    """What a client pays for the prompt and four beams of twenty tokens, with an empty cache."""
    scene = Scene("rr+dlpm", DlpmParameters(), workers=())
    scene.join("w1", engine=engine)
    scene.feed(WorkerReported(WorkerId("w1"), 0, 0, cache=CacheReport(block_tokens=BLOCK, caches=caches)))
    asked = scene.arrive("ada", PROMPT, answers=BEAMS, limit=BEAMS * LENGTH, streamed=False, beam_search=searches)
    scene.serve(asked, BEAMS * LENGTH)
    return scene.charged("ada")


@pytest.mark.parametrize(("engine", "more"), [("vllm", resent_tokens(SIZE, BEAMS, LENGTH, BLOCK)), ("sglang", 0)])
def test_a_client_pays_for_the_beams_that_are_sent_anew(engine: str, more: int) -> None:
    """Only at vLLM; SGLang does not search beams."""
    assert charged(engine) == charged(engine, searches=False) + more


def test_an_engine_without_a_prefix_cache_computes_whole_beams() -> None:
    """Then each token costs as many prompts as there are beams."""
    beams = BEAMS * sum(range(SIZE + 1, SIZE + LENGTH))
    assert charged("vllm", caches=False) == charged("vllm", caches=False, searches=False) + beams


def test_beams_are_paid_for_by_whom_another_worker_serves_after_a_failure() -> None:
    """The prompt is paid for once; the beams where they are computed."""
    scene = Scene("rr+dlpm", DlpmParameters(), workers=())
    scene.join("w1", engine="vllm")
    scene.join("w2", engine="vllm")
    asked = scene.arrive("ada", PROMPT, answers=BEAMS, limit=BEAMS * LENGTH, streamed=False, beam_search=True)
    scene.feed(Returned(asked, accepted=True, fault=Fault.BROKEN))
    scene.serve(asked, BEAMS * LENGTH)
    assert scene.charged("ada") == charged("vllm")


def test_who_leaves_a_search_for_beams_pays_for_the_output_that_is_charged() -> None:
    """The beams of a call that is given up were sent anew as well, as far as their tokens are charged."""
    paid = []
    for searches in (False, True):
        scene = Scene("rr+dlpm", DlpmParameters(), workers=())
        scene.join("w1", engine="vllm")
        asked = scene.arrive("ada", PROMPT, answers=BEAMS, limit=BEAMS * LENGTH, beam_search=searches)
        scene.start(asked)
        scene.progress(asked, BEAMS * LENGTH)
        scene.cancel(asked)
        paid.append(scene.charged("ada"))
    assert paid[1] == paid[0] + resent_tokens(SIZE, BEAMS, LENGTH, BLOCK)
