"""Tests that requests with a common prefix reach the cache that holds it, and that charges are the engine's usage."""

import pytest

from . import prompts
from .fleet import BLOCK_TOKENS, BLOCKS, Engine, Router
from .wire import CHAT, COMPLETIONS, Answer, Json, call, listed, mapped

pytestmark = [pytest.mark.engine, pytest.mark.fleets("vllm", "sglang", "mixed")]

BODY: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 6}


def ask(router: Router, document: str, question: str, key: str = "reader") -> Answer:
    answer = call(router.url, CHAT, {**BODY, "messages": messages(document, question)}, key)
    assert answer.status == 200, answer.body
    return answer


def messages(document: str, question: str) -> list[Json]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


def usage(answer: Answer) -> tuple[int, int, int]:
    """Return the tokens of the prompt, its cached tokens, and the tokens of the answer."""
    counts = mapped(answer.json["usage"])
    cached = mapped(counts["prompt_tokens_details"])["cached_tokens"]
    return int(str(counts["prompt_tokens"])), int(str(cached)), int(str(counts["completion_tokens"]))


def worker(answer: Answer) -> str:
    return answer.headers["x-d2lpm-worker"]


def predicted(answer: Answer) -> int:
    return int(answer.headers["x-d2lpm-predicted-cached-tokens"])


def test_a_second_request_reaches_the_cache_of_the_first(router: Router) -> None:
    """The second request with a long prefix goes to the first one's worker, and finds the predicted hit."""
    document = prompts.text("affinity", words=400)
    first = ask(router, document, "Who?")
    second = ask(router, document, "When, and why?")
    assert worker(second) == worker(first)
    assert (predicted(first), usage(first)[1]) == (0, 0)
    prompt, cached, _ = usage(second)
    assert cached > 0.9 * prompt
    assert 0.8 * cached < predicted(second) <= prompt


def test_two_clients_with_own_prefixes_stay_at_two_workers(router: Router) -> None:
    """When two clients ask in turn, each about its own document, each client stays at a worker of its own."""
    documents = {key: prompts.text(f"document of {key}", words=400) for key in ("alice", "bob")}
    answers: dict[str, list[Answer]] = {key: [] for key in documents}
    for turn in range(4):
        for key, document in documents.items():
            answers[key].append(ask(router, document, f"Question {turn}?", key))
    homes = [{worker(answer) for answer in answers[key]} for key in documents]
    assert [len(home) for home in homes] == [1, 1]
    assert homes[0] != homes[1]
    assert all(usage(answer)[1] > 0 for key in documents for answer in answers[key][1:])
    assert len({answer.headers["x-d2lpm-client"] for key in documents for answer in answers[key]}) == 2


def test_a_conversation_stays_at_its_worker(router: Router) -> None:
    """Each turn of a conversation finds the prompt of the turn before it in the cache.

    Not all of the answer is found: when its text comes back, it is split into other tokens than a random model's. Its
    beginning is long, so that it has a home even at a worker whose predictions other tests have misled.
    """
    messages: list[Json] = [{"role": "user", "content": prompts.text("conversation", words=800)}]
    home: str | None = None
    before = 0
    for turn in range(4):
        answer = call(router.url, CHAT, {**BODY, "max_tokens": 64, "messages": messages}, "talker")
        prompt, cached, _ = usage(answer)
        home = home or worker(answer)
        assert worker(answer) == home, f"predicted {predicted(answer)} tokens there"
        assert cached > before - BLOCK_TOKENS
        before = prompt
        said = mapped(listed(answer.json["choices"])[0]["message"])["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And then, {turn}?"}]


def test_prompts_of_token_ids_reach_the_cache(router: Router, engines: tuple[Engine, ...]) -> None:
    """A prompt of token ids finds all whole blocks of the prefix that it shares with another one."""
    ids = prompts.tokens("ids", 600)
    answers = [call(router.url, COMPLETIONS, {**BODY, "prompt": [*ids, *end]}, "ids") for end in ([300], [301, 302])]
    assert worker(answers[0]) == worker(answers[1])
    (block,) = {engine.block_tokens for engine in engines if router.worker(engine)["id"] == worker(answers[0])}
    assert usage(answers[1])[1] == 600 // block * block


def test_charges_are_the_engines_usage(router: Router) -> None:
    """A client is charged the extend, cached and output tokens that the engine counted."""
    document = prompts.text("account", words=200)
    answers = [ask(router, document, question, "accountant") for question in ("Who?", "When?", "Where to?")]
    counts = [usage(answer) for answer in answers]
    router.wait_settled()
    charged = router.service(answers[0].headers["x-d2lpm-client"])
    assert charged["extend"] == sum(prompt - cached for prompt, cached, _ in counts)
    assert charged["cached"] == sum(cached for _, cached, _ in counts)
    assert charged["output"] == sum(output for _, _, output in counts)


def test_a_stream_without_usage_is_charged(router: Router, engines: tuple[Engine, ...]) -> None:
    """A stream whose client asks for no usage is charged for all its prompts and choices.

    A prompt of two choices counts once: SGLang computes it before the choices, which then find it in its cache.
    """
    texts = [prompts.text(f"streamed account {number}", words=60) for number in range(2)]
    body: Json = {**BODY, "temperature": 0.5, "prompt": texts, "n": 2}
    answer = call(router.url, COMPLETIONS, {**body, "stream": True}, "streamer")
    prompt = usage(call(engines[0].url, COMPLETIONS, body))[0]
    router.wait_settled()
    charged = router.service(answer.headers["x-d2lpm-client"])
    assert int(str(charged["extend"])) + int(str(charged["cached"])) == prompt
    assert charged["output"] == 6 * 2 * 2


def test_the_router_knows_the_size_of_each_cache(router: Router, engines: tuple[Engine, ...]) -> None:
    """The router reads how many tokens each cache holds, without the block that vLLM keeps for itself."""
    workers = mapped(router.get("/fairness")["workers"])
    ids = [str(router.worker(engine)["id"]) for engine in engines]
    assert [mapped(workers[id])["kv_tokens"] for id in ids] == [(BLOCKS - 1) * BLOCK_TOKENS] * 2
