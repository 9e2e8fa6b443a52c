"""Several models behind one router: their names, their adapters and their aliases."""

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


def serve_adapters(engine: ScriptedEngine, *names: str) -> None:
    """Let an engine of model `m` list these adapters of it, too."""
    cards = [{"id": "m", "owned_by": "vllm", "parent": None}]
    cards += [{"id": name, "owned_by": "vllm", "parent": "m"} for name in names]
    engine.poll_answers["/v1/models"] = (200, json.dumps({"data": cards}).encode())


async def root_and_parent(router: RunningRouter, name: str) -> tuple[object, object]:
    """Return the root and parent of a model."""
    card = await router.get_json(f"/v1/models/{name}")
    return card["root"], card["parent"]


async def test_models_adapters_and_aliases_are_listed() -> None:
    """An adapter is listed with its base model, an alias with its target while that is served."""
    async with scripted_engine() as one, scripted_engine("b") as two:
        serve_adapters(one, "french")
        aliases = ["gpt=m", "fr=french", "gone=nobodys"]
        async with running_router(one.url, two.url, alias=aliases) as router:
            async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x") as client:
                assert [model.id async for model in client.models.list()] == ["b", "fr", "french", "gpt", "m"]
            assert await root_and_parent(router, "french") == ("french", "m")
            assert await root_and_parent(router, "fr") == ("french", None)
            assert await root_and_parent(router, "m") == ("m", None)
            async with router.http.get("/v1/models/gone") as response:
                assert response.status == 404


async def test_a_call_to_an_adapter_goes_to_a_worker_that_has_it() -> None:
    """The body is forwarded unchanged."""
    async with scripted_engine() as one, scripted_engine() as two:
        serve_adapters(one, "french")
        async with running_router(two.url, one.url) as router:
            for _ in range(3):
                async with router.post(chat(model="french")) as post:
                    call = await one.call()
                    assert call.json["model"] == "french"
                    await call.answer()
                    assert (await post.response()).status == 200
            assert two.calls.empty()


async def test_a_body_changes_only_in_its_alias() -> None:
    """Spacing and order stay; a body with the model's own name is forwarded byte for byte."""
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


async def test_a_form_changes_only_in_its_model() -> None:
    """Audio is sent as a form; the bytes of the file stay."""
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
    """A prompt sent under one name is predicted to be cached under the other."""
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
    """Settings with any other alias are invalid."""
    with pytest.raises(ValidationError):
        Settings.model_validate({"alias": aliases})


async def test_an_alias_is_replaced_whatever_parameters_the_content_type_has() -> None:
    """A body that is parsed as JSON is also edited as JSON."""
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
