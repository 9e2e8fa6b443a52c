"""The export of usage: rows by day, client and model, as JSON and CSV, over restarts, for operators alone."""

import asyncio
import csv
import io
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from router.auth.keys_file import hash_of
from router.auth.prices import PricedUsage
from router.control.usage_export import UsageExport, as_csv, as_json
from router.core.model.request import ClientId
from tests.support.running import TIMEOUT_S, RunningRouter, chat, running_router
from tests.support.scripted_engine import DONE, ScriptedEngine, chunk, scripted_engine, usage_chunk

KEY = "k" * 16
BEARER = {"authorization": f"Bearer {KEY}"}
KEYS = {"alice": "sk-alice", "bob": "sk-bob"}
CLIENTS = "clients: " + json.dumps({name: {"key": hash_of(key)} for name, key in KEYS.items()}) + "\n"
PRICES = CLIENTS + "prices: {currency: EUR, models: {m: {input: 2, cached_input: 0.5, output: 8}}}\n"
AMOUNT = (10 * 2 + 90 * 0.5 + 3 * 8) / 1e6
"""Of one call of `ask`."""


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    path = tmp_path / "clients.yaml"
    path.write_text(PRICES)
    return path


async def ask(router: RunningRouter, engine: ScriptedEngine, client: str) -> None:
    """Make a call of 100 input tokens, 90 of them cached, and 3 output tokens."""
    async with router.post(chat(stream=True), authorization=f"Bearer {KEYS[client]}") as post:
        call = await engine.call()
        await call.stream(chunk("yes"), chunk("", "stop"), usage_chunk(100, 3, 90), DONE)
        await post.read()
    await router.until_all_ended()


async def exported(router: RunningRouter, query: str = "") -> Any:
    return await router.get_json(f"/usage{query}", **BEARER)


async def own(router: RunningRouter, client: str) -> Any:
    return await router.get_json("/v1/usage", authorization=f"Bearer {KEYS[client]}")


def calls(count: int, amount: float | None = AMOUNT) -> dict[str, object]:
    """Return what this many calls of `ask` have used."""
    return {
        **{"calls": count, "input_tokens": 100 * count, "cached_tokens": 90 * count, "output_tokens": 3 * count},
        **{"estimated_input_tokens": 0, "estimated_output_tokens": 0},
        "amount": None if amount is None else pytest.approx(amount * count),
    }


def by_client(report: Any) -> dict[str, dict[str, Any]]:
    """Return what each client has used of the model `m` over all days: midnight may have passed."""
    found: dict[str, dict[str, Any]] = {}
    for row in report["usage"]:
        assert row.pop("day") in (STARTED, today())
        assert row.pop("model") == "m"
        client = row.pop("client", None)
        before = found.get(client, {})
        found[client] = {name: value and value + before.get(name, 0) for name, value in row.items()}
    return found


def today() -> str:
    return str(datetime.now(UTC).date())


STARTED = today()


async def test_a_restart_keeps_the_sums(tmp_path: Path, clients: Path) -> None:
    """Usage goes on from where it was, in every process; a client sees its own rows and no others."""
    settings = {"clients": clients, "admin_key": KEY, "state": tmp_path / "state"}
    async with scripted_engine() as engine:
        async with running_router(engine.url, **settings) as router:
            for client in ("alice", "bob", "alice"):
                await ask(router, engine, client)
            assert by_client(await exported(router)) == {"alice": calls(2), "bob": calls(1)}
        async with running_router(engine.url, **settings) as router:
            assert by_client(await exported(router)) == {"alice": calls(2), "bob": calls(1)}
            await ask(router, engine, "bob")
            assert by_client(await exported(router)) == {"alice": calls(2), "bob": calls(2)}
            report = await own(router, "bob")
            assert (report["client"], report["currency"]) == ("bob", "EUR")
            assert by_client(report) == {"bob": calls(2)}


async def test_a_client_that_leaves_pays_what_was_computed_as_an_estimate(clients: Path) -> None:
    """A call that was given up counts what was charged for it, and the export says that it is an estimate."""
    async with scripted_engine() as engine, running_router(engine.url, clients=clients, admin_key=KEY) as router:
        async with router.post(chat(stream=True), authorization=f"Bearer {KEYS['alice']}") as post:
            call = await engine.call()
            await call.begin()
            await call.write(chunk("one"))
            await post.response()
        await call.wait_closed()
        await router.until_all_ended()
        (given_up,) = (await exported(router))["usage"]
        assert given_up["calls"] == 1
        assert given_up["estimated_input_tokens"] == given_up["input_tokens"] > 0
        assert given_up["estimated_output_tokens"] == given_up["output_tokens"] > 0


async def test_prices_are_read_again(clients: Path) -> None:
    """Without a price there is no amount; new prices count from when the file is read again, and for all days kept."""
    await asyncio.to_thread(clients.write_text, CLIENTS)
    async with scripted_engine() as engine, running_router(engine.url, clients=clients, admin_key=KEY) as router:
        await ask(router, engine, "alice")
        assert by_client(await exported(router)) == {"alice": calls(1, None)}
        await asyncio.to_thread(clients.write_text, PRICES)
        async with asyncio.timeout(TIMEOUT_S):
            while (report := await exported(router))["currency"] is None:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.01)
        assert report["currency"] == "EUR"
        assert by_client(report) == {"alice": calls(1)}


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("", True),
        ("?from={first}&to={last}", True),
        ("?from=2000-01-01&format=json", True),
        ("?from=2999-01-01", False),
        ("?to=2000-01-01", False),
    ],
)
async def test_the_days_can_be_chosen(clients: Path, query: str, shown: bool) -> None:
    """The first and the last day are included."""
    async with scripted_engine() as engine, running_router(engine.url, clients=clients, admin_key=KEY) as router:
        await ask(router, engine, "alice")
        report = await exported(router, query.format(first=STARTED, last=today()))
        assert len(report["usage"]) == shown


async def test_the_export_is_for_operators_and_says_what_is_wrong(clients: Path) -> None:
    """It needs the operator's key, not that of a client, and refuses a format or day that is none."""
    async with scripted_engine() as engine, running_router(engine.url, clients=clients, admin_key=KEY) as router:
        for headers in ({}, {"authorization": f"Bearer {KEYS['alice']}"}):
            async with router.http.get("/usage", headers=headers) as response:
                assert response.status == 401
        for query, param in (
            *(("format=xml", "format"), ("from=yesterday", "from"), ("to=2027-02-30", "to")),
            ("from=2027-02-02&to=2027-02-01", "from"),
        ):
            async with router.http.get(f"/usage?{query}", headers=BEARER) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == param
        async with router.http.get("/usage?format=csv", headers=BEARER) as response:
            assert response.headers["content-type"].startswith("text/csv")
            assert response.headers["content-disposition"] == 'attachment; filename="usage.csv"'
            head = "day,client,model,calls,input_tokens,cached_tokens,output_tokens,estimated_input_tokens,"
            assert await response.text() == f"{head}estimated_output_tokens,amount,currency\r\n"


def priced(client: str, model: str = "m", amount: str | None = "0.0000005") -> PricedUsage:
    value = None if amount is None else Decimal(amount)
    return PricedUsage(date(2026, 11, 26), ClientId(client), model, 1, 20, 5, 7, 0, 0, value)


async def written(form: Any, *batches: Sequence[PricedUsage]) -> str:
    rows: Iterator[Sequence[PricedUsage]] = iter(batches)
    return b"".join([block async for block in form(UsageExport("EUR", rows))]).decode()


async def test_csv_can_be_read_back_and_computes_nothing() -> None:
    """Odd names are quoted, a small amount has no exponent, a missing one is empty, and no cell is a formula."""
    names = ['o"dd, one\nline', "-minus", "@cf/meta/llama", "=1+1", "+1", "plain-"]
    text = await written(
        as_csv, [priced(name, amount=None) for name in names[:3]], [priced("a", name) for name in names]
    )
    head, *rows = csv.reader(io.StringIO(text, newline=""))
    guarded = [names[0], "'-minus", "'@cf/meta/llama", "'=1+1", "'+1", "plain-"]
    assert [each[head.index("client")] for each in rows[:3]] == guarded[:3]
    assert [each[head.index("model")] for each in rows[3:]] == guarded
    assert [each[head.index("amount")] for each in rows] == [""] * 3 + ["0.0000005"] * 6
    assert {each[head.index("day")] for each in rows} == {"2026-11-26"}
    assert {each[-1] for each in rows} == {"EUR"}


async def test_json_joins_its_batches() -> None:
    """The rows are one list, whatever the batches, and an amount is a number."""
    report = json.loads(await written(as_json, [priced("a"), priced("b")], [priced('"')]))
    assert [each["client"] for each in report["usage"]] == ["a", "b", '"']
    assert {each["amount"] for each in report["usage"]} == {5e-7}
    assert json.loads(await written(as_json)) == {"currency": "EUR", "usage": []}
