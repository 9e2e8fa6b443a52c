"""Where the token ids of calls come from, and what happens if they cannot be found."""

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

from router.channel.messages import WorkerCard, WorkerChanged
from router.core.model.block_key import BlockHasher, BlockKey
from router.core.model.events import Arrived, Finished
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.errors import ConfigError
from router.kv_events.local_tokenizer import LocalTokenizer
from router.kv_events.token_sources import MAX_MISCOUNTS
from router.kv_events.tokenize import (
    MAX_CONCURRENT,
    PromptTokenizer,
    TokenizeOutcome,
    _tokenize_requests,
)
from router.upstream.connections import WorkerConnections
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


class StubTokenizer:
    """A tokenizer that gives one id per letter, once it may proceed."""

    def __init__(self) -> None:
        self.proceed = threading.Event()
        self.proceed.set()
        self.calls = 0

    def text(self, prompt: str, special: bool) -> list[int]:
        self.calls += 1
        assert self.proceed.wait(TIMEOUT_S)
        return [1] * special + [ord(letter) for letter in prompt]

    def chat(self, messages: object, variables: Mapping[str, Any]) -> list[int] | None:
        return self.text(json.dumps([messages, variables]), False)


CLIENT = ClientId("c")


@asynccontextmanager
async def prompt_tokenizer(
    url: str = "http://127.0.0.1:1",
    *,
    sizes: Sequence[int] = (2,),
    tokenizer: StubTokenizer | None = None,
    budget: float = TIMEOUT_S,
    healthy: bool = True,
) -> AsyncIterator[PromptTokenizer]:
    """A prompt tokenizer before workers with a model and its adapter: one of each block size, and one not followed."""
    models, parents = frozenset(("tiny", "adapter")), {"adapter": "tiny"}
    connections = WorkerConnections(1.0)
    for number, size in enumerate([*sizes, None]):
        card = WorkerCard(
            WorkerId(f"w{number}"), url, healthy=healthy, models=models, parents=parents, block_tokens=size
        )
        connections.apply(WorkerChanged(card))
    async with PromptTokenizer(connections, HASHER, tokenizer, budget) as tokens:
        yield tokens


def key(ids: Sequence[int], *sizes: int) -> BlockKey:
    return HASHER.key(ids, sizes or (2,))


async def test_no_keys_without_a_followed_worker() -> None:
    """While no worker that serves the model is followed, a call costs nothing and has no keys."""
    tokenizer_stub = StubTokenizer()
    async with prompt_tokenizer(sizes=(), tokenizer=tokenizer_stub) as tokens:
        assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny", CLIENT) == ()
        assert (tokenizer_stub.calls, tokens.outcomes) == (0, {})


async def test_ids_in_the_call_need_no_tokenizer() -> None:
    """A prompt of token ids needs no tokenizer; several prompts have a key each, in every wanted size."""
    async with prompt_tokenizer(sizes=(2, 3)) as tokens:
        assert await tokens.keys(COMPLETIONS, body(prompt=[5, 6, 7]), "tiny", CLIENT) == (key([5, 6, 7], 2, 3),)
        several = await tokens.keys(COMPLETIONS, body(prompt=[[5, 6], [7]]), "tiny", CLIENT)
        assert several == (key([5, 6], 2, 3), key([7], 2, 3))


async def test_the_local_tokenizer_comes_first() -> None:
    """Texts get special tokens unless the call says otherwise; a chat gets those of its template."""
    async with prompt_tokenizer(tokenizer=StubTokenizer()) as tokens:
        assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny", CLIENT) == (key([1, 97, 98]),)
        plain = await tokens.keys(COMPLETIONS, body(prompt=["ab", "c"], add_special_tokens=False), "tiny", CLIENT)
        assert plain == (key([97, 98]), key([99]))
        rendered = json.dumps([MESSAGES, {"x": 1, "add_generation_prompt": False}])
        call = body(messages=MESSAGES, chat_template_kwargs={"x": 1}, add_generation_prompt=False)
        assert await tokens.keys(CHAT, call, "tiny", CLIENT) == (key([ord(letter) for letter in rendered]),)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_worker_is_asked(dialect: str) -> None:
    """Without a local tokenizer, the worker's own provides the ids that its engine will see."""
    with worker(dialect=dialect) as url:
        async with prompt_tokenizer(url) as tokens:
            assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny", CLIENT) == (
                key(encode(render_chat(MESSAGES))),
            )
            texts = await tokens.keys(COMPLETIONS, body(prompt=["ab", "c d"]), "tiny", CLIENT)
            assert texts == (key(encode("ab")), key(encode("c d")))
            assert tokens.outcomes == {TokenizeOutcome.KNOWN: 2}


@pytest.mark.parametrize(
    "fields",
    [{"cache_salt": "s"}, {"truncate_prompt_tokens": 5}, {"documents": [{}]}, {"continue_final_message": True}],
)
async def test_calls_with_another_prompt_are_declined(fields: dict[str, object]) -> None:
    """A call whose cache or prompt does not follow from its messages alone has no keys."""
    async with prompt_tokenizer(tokenizer=StubTokenizer()) as tokens:
        assert await tokens.keys(CHAT, body(messages=MESSAGES, **fields), "tiny", CLIENT) == ()
        assert tokens.outcomes == {TokenizeOutcome.DECLINED: 1}


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ([{"type": "text", "text": "hello"}, "you"], TokenizeOutcome.KNOWN),
        (
            [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": ""}}],
            TokenizeOutcome.DECLINED,
        ),
        ([{"image_url": {}}], TokenizeOutcome.DECLINED),
    ],
)
async def test_a_chat_with_media_is_declined(content: object, outcome: TokenizeOutcome) -> None:
    """Tokens do not say what an image shows, so a chat with media has no keys; one with parts of text has."""
    async with prompt_tokenizer(tokenizer=StubTokenizer()) as tokens:
        await tokens.keys(CHAT, body(messages=[*MESSAGES, {"role": "user", "content": content}]), "tiny", CLIENT)
        assert tokens.outcomes == {outcome: 1}


def test_a_worker_learns_whether_tools_may_be_called() -> None:
    """SGLang leaves the tools out of the prompt if the call forbids them, so its /tokenize must know."""
    (asked,) = _tokenize_requests({"messages": MESSAGES, "tools": [{}], "tool_choice": "none"}, chat=True)
    assert asked["tool_choice"] == "none"


async def test_an_adapter_is_declined() -> None:
    """An adapter does not share blocks with its base model, so its calls have no keys."""
    async with prompt_tokenizer(tokenizer=StubTokenizer()) as tokens:
        assert await tokens.keys(CHAT, body(model="adapter", messages=MESSAGES), "adapter", CLIENT) == ()
        assert tokens.outcomes == {TokenizeOutcome.DECLINED: 1}


async def test_a_model_without_a_healthy_worker_is_declined() -> None:
    """No worker is asked about a model that no healthy worker serves."""
    with worker() as url:
        async with prompt_tokenizer(url, healthy=False) as tokens:
            assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny", CLIENT) == ()
            assert tokens.outcomes == {TokenizeOutcome.DECLINED: 1}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", body(messages=7), body(prompt={}), b"\xff"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_invalid_body_raises_nothing(path: str, content: bytes) -> None:
    """A body that cannot be tokenized has no keys, and nothing is raised: the engine will reject it."""
    with worker() as url:
        async with prompt_tokenizer(url) as tokens:
            assert await tokens.keys(path, content, "tiny", CLIENT) == ()


async def test_an_unreachable_worker_gives_no_keys() -> None:
    """If no worker can be reached, a call has no keys."""
    async with prompt_tokenizer() as tokens:
        assert await tokens.keys(CHAT, body(messages=MESSAGES), "tiny", CLIENT) == ()
        assert tokens.outcomes == {TokenizeOutcome.FAILED: 1}


async def test_slow_tokenization_is_not_awaited() -> None:
    """After the budget a call goes on without keys; they are kept for the next call with the same body."""
    tokenizer_stub = StubTokenizer()
    tokenizer_stub.proceed.clear()
    async with prompt_tokenizer(tokenizer=tokenizer_stub, budget=0.01) as tokens:
        call = body(prompt="ab")
        assert await tokens.keys(COMPLETIONS, call, "tiny", CLIENT) == ()
        assert tokens.outcomes == {TokenizeOutcome.SLOW: 1}
        tokenizer_stub.proceed.set()
        await until(lambda: tokens.outcomes[TokenizeOutcome.KNOWN] == 1)
        assert await tokens.keys(COMPLETIONS, call, "tiny", CLIENT) == (key([1, 97, 98]),)
        assert tokenizer_stub.calls == 1


async def test_concurrent_lookups_are_limited() -> None:
    """While the maximum number of lookups is running, further calls get no keys at once."""
    tokenizer_stub = StubTokenizer()
    tokenizer_stub.proceed.clear()
    async with prompt_tokenizer(tokenizer=tokenizer_stub) as tokens:
        waiting = [
            asyncio.create_task(tokens.keys(COMPLETIONS, body(prompt=str(number)), "tiny", CLIENT))
            for number in range(MAX_CONCURRENT)
        ]
        await until(lambda: len(tokens._tasks) == MAX_CONCURRENT)
        assert await tokens.keys(COMPLETIONS, body(prompt="more"), "tiny", CLIENT) == ()
        assert tokens.outcomes == {TokenizeOutcome.BUSY: 1}
        tokenizer_stub.proceed.set()
        assert all(await asyncio.gather(*waiting))


def end(tokens: PromptTokenizer, number: int, expected: int, reported: int) -> None:
    """End a request with keys, for which its engine reports a token count."""
    request = Request(RequestId(str(number)), CLIENT, "tiny", (), blocks=(BlockKey(expected, {}),))
    tokens.observe_sent(Arrived(request))
    tokens.observe_sent(Finished(request.id, Usage(reported, 1)))


async def test_a_wrong_tokenizer_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """After repeated miscounts of a client's prompts the worker is asked for it instead, and then ids are not used;
    occasional miscounts do not matter, and other clients keep their source.
    """
    with worker() as url:
        async with prompt_tokenizer(url, tokenizer=StubTokenizer()) as tokens:
            for number in range(3 * MAX_MISCOUNTS):
                end(tokens, number, 10, 10 if number % MAX_MISCOUNTS == 0 else 11)
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny", CLIENT) == (key([1, 97, 98]),)
            for number in range(MAX_MISCOUNTS):
                end(tokens, number, 10, 11)
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny", CLIENT) == (key(encode("ab")),)
            for number in range(MAX_MISCOUNTS):
                end(tokens, number, 10, 11)
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny", CLIENT) == ()
            assert tokens.outcomes[TokenizeOutcome.DISTRUSTED] == 1
            other = ClientId("other")
            assert await tokens.keys(COMPLETIONS, body(prompt="ab"), "tiny", other) == (key([1, 97, 98]),)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def model_folder(path: Path, **config: object) -> Path:
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
    """A chat is what its template renders, with its white space rules and without further special tokens."""
    local = LocalTokenizer(model_folder(tmp_path, chat_template=TEMPLATE))
    assert local.chat(MESSAGES, {}) == words("<s>", "user", "hello", "you", "assistant")
    variables = {"think": True, "add_generation_prompt": False}
    assert local.chat(MESSAGES, variables) == words("<s>", "user", "hello", "you", "think")
    assert local.text("hello", special=True) == words("<s>", "hello")
    assert local.text("hello", special=False) == words("hello")


def test_a_folder_without_a_tokenizer_is_reported_with_the_file(tmp_path: Path) -> None:
    """The error names the missing file, because the folder itself is there."""
    with pytest.raises(ConfigError, match=f"^tokenizer: {tmp_path}/tokenizer.json: No such file or directory$"):
        LocalTokenizer(tmp_path)


def test_the_template_file_comes_first(tmp_path: Path) -> None:
    """A template file takes precedence over the configuration, which may hold several templates, or none."""
    assert LocalTokenizer(model_folder(tmp_path)).chat(MESSAGES, {}) is None
    several = [{"name": "tool_use", "template": "think"}, {"name": "default", "template": "you"}]
    assert LocalTokenizer(model_folder(tmp_path, chat_template=several)).chat(MESSAGES, {}) == words("you")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}hello")
    token = {"content": "<s>", "lstrip": False}
    assert LocalTokenizer(model_folder(tmp_path, bos_token=token)).chat(MESSAGES, {}) == words("<s>", "hello")


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
def test_messages_beyond_text_are_declined(tmp_path: Path, messages: object) -> None:
    """Engines differ in what they make of such messages before the template is rendered."""
    assert LocalTokenizer(model_folder(tmp_path, chat_template=TEMPLATE)).chat(messages, {}) is None


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages.nothing.at_all }}", "{{ 1 / 0 }}"])
def test_a_chat_that_its_template_rejects_is_declined(tmp_path: Path, source: str) -> None:
    """A template may reject a chat, or fail."""
    assert LocalTokenizer(model_folder(tmp_path, chat_template=source)).chat(MESSAGES, {}) is None


@pytest.mark.parametrize("defect", ["missing", "garbage", "template"])
def test_an_unusable_folder_is_an_error(tmp_path: Path, defect: str) -> None:
    """The message names the folder."""
    if defect == "garbage":
        model_folder(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
    if defect == "template":
        model_folder(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match=tmp_path.name):
        LocalTokenizer(tmp_path)
