"""Where the token ids of calls come from, and what happens when they do not come."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from router.core.model.block_key import BlockHasher, BlockKey
from router.core.model.events import Arrived, Finished
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.errors import ConfigError
from router.kv_events.local_tokenizer import LocalTokenizer
from router.kv_events.tokenize import MAX_CONCURRENT, MAX_MISCOUNTS, PromptTokenizer, TokenizeOutcome
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from tests.support.running import CHAT, COMPLETIONS, TIMEOUT_S, until
from tests.support.workers_http import worker
from workers.engine.tokenizer import encode, render_chat

HASHER = BlockHasher(b"secret")
MESSAGES = [{"role": "user", "content": "hello you"}]
WORDS = ("[UNK]", "<s>", "hello", "you", "user", "assistant", "think")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {{ message.role + ' ' + message.content + ' ' }}\n"
    "{% endfor %}{% if think %}think{% endif %}{% if add_generation_prompt %}assistant{% endif %}"
)


def body(**fields: object) -> bytes:
    return orjson.dumps({"model": "tiny", **fields})


class Fixed:
    """A tokenizer that gives one id per letter, when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.let.set()
        self.asked = 0

    def text(self, prompt: str, special: bool) -> list[int]:
        self.asked += 1
        assert self.let.wait(TIMEOUT_S)
        return [1] * special + [ord(letter) for letter in prompt]

    def chat(self, messages: object, variables: Mapping[str, Any]) -> list[int] | None:
        return self.text(json.dumps([messages, variables]), False)


@asynccontextmanager
async def finding(
    url: str = "http://127.0.0.1:1",
    *,
    sizes: Sequence[int] = (2,),
    tokenizer: Fixed | None = None,
    budget: float = TIMEOUT_S,
    healthy: bool = True,
) -> AsyncIterator[PromptTokenizer]:
    """Before one worker with a model and an adapter on it."""
    models, parents = frozenset(("tiny", "adapter")), {"adapter": "tiny"}
    backend = WorkerEndpoint(WorkerId("w"), url, healthy=healthy, models=models, parents=parents)
    async with PromptTokenizer(WorkerDirectory([backend], 1.0), HASHER, lambda _: sizes, tokenizer, budget) as tokens:
        yield tokens


def key(ids: Sequence[int], *sizes: int) -> BlockKey:
    return HASHER.key(ids, sizes or (2,))


async def test_nothing_is_done_where_nothing_is_wanted() -> None:
    """While no worker that serves the model is followed, a call costs nothing and has no keys."""
    fixed = Fixed()
    async with finding(sizes=(), tokenizer=fixed) as tokens:
        assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny") == ()
        assert (fixed.asked, tokens.outcomes) == (0, {})


async def test_ids_that_come_with_the_call() -> None:
    """A prompt of token ids needs no tokenizer; several prompts have a key each, in every wanted size."""
    async with finding(sizes=(2, 3)) as tokens:
        assert await tokens.keys(COMPLETIONS, body(prompt=[5, 6, 7]), "tiny") == (key([5, 6, 7], 2, 3),)
        several = await tokens.keys(COMPLETIONS, body(prompt=[[5, 6], [7]]), "tiny")
        assert several == (key([5, 6], 2, 3), key([7], 2, 3))


async def test_the_local_tokenizer_comes_first() -> None:
    """Texts have special tokens unless the call says otherwise; a chat has those of its template."""
    async with finding(tokenizer=Fixed()) as tokens:
        assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny") == (key([1, 97, 98]),)
        plain = await tokens.keys(COMPLETIONS, body(prompt=["ab", "c"], add_special_tokens=False), "tiny")
        assert plain == (key([97, 98]), key([99]))
        said = json.dumps([MESSAGES, {"x": 1, "add_generation_prompt": False}])
        call = body(messages=MESSAGES, chat_template_kwargs={"x": 1}, add_generation_prompt=False)
        assert await tokens.keys(CHAT, call, "tiny") == (key([ord(letter) for letter in said]),)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_worker_is_asked(dialect: str) -> None:
    """Without a tokenizer here, the worker's own says what its engine will see."""
    with worker(dialect=dialect) as url:
        async with finding(url) as tokens:
            assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny") == (key(encode(render_chat(MESSAGES))),)
            texts = await tokens.keys(COMPLETIONS, body(prompt=["ab", "c d"]), "tiny")
            assert texts == (key(encode("ab")), key(encode("c d")))
            assert tokens.outcomes == {TokenizeOutcome.KNOWN: 2}


@pytest.mark.parametrize(
    "fields",
    [{"cache_salt": "s"}, {"truncate_prompt_tokens": 5}, {"documents": [{}]}, {"continue_final_message": True}],
)
async def test_what_makes_another_prompt_is_declined(fields: dict[str, object]) -> None:
    """A call whose cache or prompt is not that of its messages alone has no keys."""
    async with finding(tokenizer=Fixed()) as tokens:
        assert await tokens.keys(CHAT, body(messages=MESSAGES, **fields), "tiny") == ()
        assert tokens.outcomes == {TokenizeOutcome.DECLINED: 1}


async def test_an_adapter_is_declined() -> None:
    """The blocks of an adapter are not those of its base, so its calls have no keys."""
    async with finding(tokenizer=Fixed()) as tokens:
        assert await tokens.keys(CHAT, body(model="adapter", messages=MESSAGES), "adapter") == ()
        assert tokens.outcomes == {TokenizeOutcome.DECLINED: 1}


async def test_what_no_living_worker_has_is_declined() -> None:
    """Nobody is asked about a model that nobody serves now."""
    with worker() as url:
        async with finding(url, healthy=False) as tokens:
            assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny") == ()
        async with finding(url) as tokens:
            assert await tokens.keys(CHAT, body(model="ghost", messages=MESSAGES), "ghost") == ()
            assert tokens.outcomes == {TokenizeOutcome.DECLINED: 1}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", body(messages=7), body(prompt={}), b"\xff"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_whatever_the_body_is_the_call_goes_on(path: str, content: bytes) -> None:
    """A body that cannot be tokenised has no keys, and nothing is raised: the engine will refuse it."""
    with worker() as url:
        async with finding(url) as tokens:
            assert await tokens.keys(path, content, "tiny") == ()


async def test_nobody_answers() -> None:
    """Where no worker can be asked, a call has no keys."""
    async with finding() as tokens:
        assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny") == ()
        assert tokens.outcomes == {TokenizeOutcome.FAILED: 1}


async def test_who_is_slow_is_not_waited_for() -> None:
    """Beyond the budget a call goes without; its keys are there for the next one of the same body."""
    fixed = Fixed()
    fixed.let.clear()
    async with finding(tokenizer=fixed, budget=0.01) as tokens:
        call = body(prompt="ab")
        assert await tokens.keys(COMPLETIONS, call, "tiny") == ()
        assert tokens.outcomes == {TokenizeOutcome.SLOW: 1}
        fixed.let.set()
        await until(lambda: tokens.outcomes[TokenizeOutcome.KNOWN] == 1)
        assert await tokens.keys(COMPLETIONS, call, "tiny") == (key([1, 97, 98]),)
        assert fixed.asked == 1


async def test_only_so_many_at_once() -> None:
    """While as many calls as may are in work, others go without at once."""
    fixed = Fixed()
    fixed.let.clear()
    async with finding(tokenizer=fixed) as tokens:
        waiting = [
            asyncio.create_task(tokens.keys(COMPLETIONS, body(prompt=str(number)), "tiny"))
            for number in range(MAX_CONCURRENT)
        ]
        await until(lambda: len(tokens._tasks) == MAX_CONCURRENT)
        assert await tokens.keys(COMPLETIONS, body(prompt="more"), "tiny") == ()
        assert tokens.outcomes == {TokenizeOutcome.BUSY: 1}
        fixed.let.set()
        assert all(await asyncio.gather(*waiting))


def end(tokens: PromptTokenizer, number: int, ours: int, engines: int) -> None:
    """A request with keys is over, and its engine has counted."""
    request = Request(RequestId(str(number)), ClientId("c"), "tiny", (), blocks=(BlockKey(ours, {}),))
    tokens.observe(0.0, Arrived(request), [])
    tokens.observe(0.0, Finished(request.id, Usage(engines, 1)), [])


async def test_the_wrong_tokenizer_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that counts otherwise, again and again, is asked itself, and then nobody; now and then is no reason."""
    with worker() as url:
        async with finding(url, tokenizer=Fixed()) as tokens:
            for number in range(3 * MAX_MISCOUNTS):
                end(tokens, number, 10, 10 if number % MAX_MISCOUNTS == 0 else 11)
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny") == (key([1, 97, 98]),)
            for number in range(MAX_MISCOUNTS):
                end(tokens, number, 10, 11)
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny") == (key(encode("ab")),)
            for number in range(MAX_MISCOUNTS):
                end(tokens, number, 10, 11)
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny") == ()
            assert tokens.outcomes[TokenizeOutcome.DISTRUSTED] == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def folder(path: Path, **config: object) -> Path:
    """A model's folder with a tokenizer of a few words, which puts <s> before a text."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    return path


def words(*texts: str) -> list[int]:
    return [WORDS.index(text) for text in texts]


def test_the_template_makes_the_prompt(tmp_path: Path) -> None:
    """A chat is what its template renders, with its white space rules, and no special tokens beside it."""
    local = LocalTokenizer(folder(tmp_path, chat_template=TEMPLATE))
    assert local.chat(MESSAGES, {}) == words("<s>", "user", "hello", "you", "assistant")
    told = {"think": True, "add_generation_prompt": False}
    assert local.chat(MESSAGES, told) == words("<s>", "user", "hello", "you", "think")
    assert local.text("hello", special=True) == words("<s>", "hello")
    assert local.text("hello", special=False) == words("hello")


def test_where_the_template_stands(tmp_path: Path) -> None:
    """A file of its own counts before the configuration, which may hold several, or none."""
    assert LocalTokenizer(folder(tmp_path)).chat(MESSAGES, {}) is None
    several = [{"name": "tool_use", "template": "think"}, {"name": "default", "template": "you"}]
    assert LocalTokenizer(folder(tmp_path, chat_template=several)).chat(MESSAGES, {}) == words("you")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}hello")
    token = {"content": "<s>", "lstrip": False}
    assert LocalTokenizer(folder(tmp_path, bos_token=token)).chat(MESSAGES, {}) == words("<s>", "hello")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [7],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "", "tool_calls": []}],
        [{"role": "system"}],
    ],
)
def test_what_is_more_than_text_is_declined(tmp_path: Path, messages: object) -> None:
    """Engines differ in what they make of it before the template sees it."""
    assert LocalTokenizer(folder(tmp_path, chat_template=TEMPLATE)).chat(messages, {}) is None


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages.nothing.at_all }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses(tmp_path: Path, source: str) -> None:
    """A chat that its template refuses is declined."""
    assert LocalTokenizer(folder(tmp_path, chat_template=source)).chat(MESSAGES, {}) is None


@pytest.mark.parametrize("given", ["missing", "garbage", "template"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, given: str) -> None:
    """The message names the folder."""
    if given == "garbage":
        folder(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
    if given == "template":
        folder(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match=tmp_path.name):
        LocalTokenizer(tmp_path)
