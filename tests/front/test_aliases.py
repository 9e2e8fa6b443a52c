"""Several models behind one router: their own names, adapters on them, and aliases."""

import asyncio
import json

import aiohttp
import openai
import pytest
from pydantic import ValidationError

from router.config.settings import Settings
from tests.support.running import RunningRouter, chat, running_router
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.served import service


def adapters(engine: ScriptedEngine, *names: str) -> None:
    """Let an engine of `m` say that it also serves these adapters on it."""
    cards = [{"id": "m", "owned_by": "vllm", "parent": None}]
    cards += [{"id": name, "owned_by": "vllm", "parent": "m"} for name in names]
    engine.polled["/v1/models"] = (200, json.dumps({"data": cards}).encode())


async def card(router: RunningRouter, name: str) -> tuple[object, object]:
    """Root and parent of a model."""
    told = await router.get_json(f"/v1/models/{name}")
    return told["root"], told["parent"]


async def test_models_adapters_and_aliases_are_listed() -> None:
    """An adapter with the model that it is on; an alias with what it stands for, as long as that is served."""
    async with scripted_engine() as one, scripted_engine("b") as two:
        adapters(one, "french")
        aliases = ["gpt=m", "fr=french", "gone=nobodys"]
        async with running_router(one.url, two.url, alias=aliases) as router:
            async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x") as client:
                assert [model.id async for model in client.models.list()] == ["b", "fr", "french", "gpt", "m"]
            assert await card(router, "french") == ("french", "m")
            assert await card(router, "fr") == ("french", None)
            assert await card(router, "m") == ("m", None)
            async with router.http.get("/v1/models/gone") as response:
                assert response.status == 404


async def test_an_adapter_is_called_by_its_name_where_it_is() -> None:
    """The body goes as it came, to a worker that has it."""
    async with scripted_engine() as one, scripted_engine() as two:
        adapters(one, "french")
        async with running_router(two.url, one.url) as router:
            for _ in range(3):
                async with router.post(chat(model="french")) as post:
                    call = await one.call()
                    assert call.json["model"] == "french"
                    await call.answer()
                    assert (await post.response()).status == 200
            assert two.calls.empty()


async def test_an_alias_is_the_only_thing_that_changes_in_a_body() -> None:
    """Spacing, order and all else stay; whoever calls the model by its own name has its bytes forwarded."""
    sent = b'{ "messages":[{"role":"user","content":"\\u00e9"}] , "model" : "gpt", "x":1e2 }\n'
    async with scripted_engine() as engine, running_router(engine.url, alias=["gpt=m"]) as router:
        for body, got in ((sent, sent.replace(b'"model" : "gpt"', b'"model":"m"')), (chat_bytes("m"), chat_bytes("m"))):
            async with router.post(body) as post:
                call = await engine.call()
                assert call.body == got
                await call.answer()
                assert (await post.response()).status == 200


def chat_bytes(model: str) -> bytes:
    return json.dumps(chat(model=model), indent=1).encode()


async def test_a_form_is_changed_in_its_model_alone() -> None:
    """As audio is sent; the file's bytes stay."""
    form = aiohttp.FormData({"model": "w", "user": "ann"})
    form.add_field("file", b'name="model"\r\n\r\nw\r\n\xff', filename="a.wav", content_type="audio/wav")
    async with scripted_engine("whisper") as engine, running_router(engine.url, alias=["w=whisper"]) as router:
        request = asyncio.ensure_future(router.http.post("/v1/audio/transcriptions", data=form))
        call = await engine.call()
        assert b'name="model"\r\n\r\nwhisper\r\n' in call.body
        assert b'name="model"\r\n\r\nw\r\n\xff' in call.body
        await call.respond(200, b"{}")
        async with await request as response:
            assert response.status == 200
        extend, *_ = await service(router, "user-ann")
        assert extend == max(1, len(call.body) // 512)


async def test_both_names_of_a_model_share_its_cache() -> None:
    """A prompt that was sent under one is predicted to be cached under the other."""
    async with scripted_engine() as engine, running_router(engine.url, alias=["gpt=m"]) as router:
        predicted = []
        for model in ("m", "gpt"):
            async with router.post(chat("x" * 4000, model=model)) as post:
                await (await engine.call()).answer(prompt=1000)
                await post.read()
                predicted.append(int((await post.response()).headers["x-d2lpm-predicted-cached-tokens"]))
        assert predicted[0] == 0
        assert predicted[1] > 500


@pytest.mark.parametrize("aliases", [["gpt"], ["=m"], ["gpt="], ["gpt=m", "gpt=b"]])
def test_an_alias_is_one_name_of_one_model(aliases: list[str]) -> None:
    """Anything else is refused at the start."""
    with pytest.raises(ValidationError):
        Settings.model_validate({"alias": aliases})


async def test_an_alias_counts_whatever_parameters_the_type_has() -> None:
    """What is read as JSON is changed as JSON."""
    body = b'{"model":"gpt","max_tokens":9,"messages":[{"role":"user","content":"Hi"}]}'
    async with (
        scripted_engine() as engine,
        running_router(engine.url, alias=["gpt=m"]) as router,
        router.post(body, "/v1/messages", content_type="Application/Json; boundary=x") as post,
    ):
        call = await engine.call()
        assert (call.json["model"], call.headers["content-type"]) == ("m", "application/json")
        await call.respond(200, b'{"type":"message"}')
        assert (await post.response()).status == 200
