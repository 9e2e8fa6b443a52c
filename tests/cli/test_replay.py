"""The journal of a router that served real calls replays to the same commands."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from router.cli.main import main
from router.cli.replay import replay, replay_file
from router.config.settings import Settings
from router.core.model.commands import Dispatch, Reject
from router.core.model.events import Arrived, Cancelled, Failed, Finished, Progressed, Started, WorkerLeft
from router.core.model.request import ClientId
from router.errors import ConfigError
from router.persistence.journal import JournalEntry, read
from tests.support.running import COMPLETIONS, RunningRouter, chat, emulated_workers, running_router, until
from tests.support.scripted_engine import chunk, scripted_engine

CLIENTS = ("ann", "bob", "cy")
ROUNDS = 4
CROWD = 30
TIGHT = {"max_inflight": 2, "max_queued": 8, "d2lpm": {"quantum": 900.5}, "dlpm": {"quantum": 300}, "seed": 7}
"""Limits so low that requests wait, are refused, and use up their deficits."""


@pytest.fixture(scope="module")
def workers() -> Iterator[list[str]]:
    with emulated_workers(2) as urls:
        yield urls


async def rounds(router: RunningRouter, client: str) -> None:
    """Send one client's calls in turn: streamed, whole, abandoned, and with a prefix that all clients share."""
    shared = "The same document for all. " * 40
    for turn in range(ROUNDS):
        content = f"{shared} {client} asks {turn}"
        async with router.post(chat(content, stream=True, max_tokens=40, user=client)) as post:
            await post.read()
        async with router.post(chat(content + " and more", max_tokens=10, user=client)) as post:
            await post.read()
        async with router.post(chat(client * 300, stream=True, max_tokens=50_000, user=client)) as post:
            await post.response()  # and leave
        await router.fairness()  # which changes nothing
        body = {"model": "m", "prompt": [shared, client], "max_tokens": 5, "user": client}
        async with router.post(body, COMPLETIONS) as post:
            await post.read()


async def crowd(router: RunningRouter) -> None:
    """Send more calls at once than can be queued."""
    posts = [router.post(chat(f"{n} " * n, stream=True, max_tokens=20, user=CLIENTS[n % 3])) for n in range(CROWD)]
    for post in posts:
        async with post:
            await post.read()


async def record(path: Path, workers: list[str], policy: str) -> None:
    """Write the journal of a router that served all kinds of calls; one of its workers fails and is gone."""
    async with scripted_engine("odd") as engine:
        urls = [*workers, engine.url]
        async with running_router(*urls, policy=policy, journal=path, hash_secret="s" * 16, **TIGHT) as router:
            await asyncio.gather(*(rounds(router, client) for client in CLIENTS))
            await crowd(router)
            async with router.post({**chat(user="di", stream=True), "model": "odd"}) as post:
                call = await engine.call()
                await call.begin()
                await call.write(chunk("so far"))
                await until(lambda: router.scheduler.ledger.accounts[ClientId("user-di")].served.output > 0)
                call.reset()
                await post.read()
            await engine.stop()
            async with router.post({**chat(), "model": "odd"}) as post:
                await post.read()


def entries_of(path: Path) -> list[JournalEntry]:
    with path.open("rb") as file:
        return [item for item in read(file) if isinstance(item, JournalEntry)]


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home", "two_choices+vtc", "pooled_fcfs"])
async def test_a_live_journal_replays_to_the_same_commands(policy: str, workers: list[str], tmp_path: Path) -> None:
    """The journal holds every kind of event of a call, and its replay gives the same commands."""
    path = tmp_path / "journal"
    await record(path, workers, policy)
    entries = entries_of(path)
    assert {type(entry.event) for entry in entries} >= {
        *(Arrived, Started, Progressed, Finished, Failed, Cancelled, WorkerLeft)
    }
    assert {type(command) for entry in entries for command in entry.commands} >= {Dispatch, Reject}
    replayed = replay_file(path)
    assert replayed.difference is None, replayed.difference
    assert (replayed.runs, replayed.events, replayed.torn) == (1, len(entries), 0)
    assert replayed.requests >= CROWD + len(CLIENTS) * ROUNDS * 4 + 2
    assert 0 < replayed.seconds < 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def journal(workers: list[str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """A journal for several tests, which only read it."""
    path = tmp_path_factory.mktemp("replay") / "journal"
    await record(path, workers, "d2lpm")
    yield path


def test_the_command_prints_one_line(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay without a difference prints one line and exits with 0."""
    assert main(["replay", str(journal)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs 1, events ")
    assert out.endswith(", differences 0\n")
    assert out.count("\n") == 1


def test_a_second_run_has_a_scheduler_of_its_own(journal: Path) -> None:
    """A journal of two runs is replayed with a new scheduler for each run."""
    lines = journal.read_bytes().splitlines()
    once, twice = replay(lines), replay(lines * 2)
    assert twice.difference is None
    assert (twice.runs, twice.events, twice.requests) == (2, 2 * once.events, 2 * once.requests)
    assert twice.seconds == pytest.approx(2 * once.seconds)


def test_a_line_cut_off_by_a_crash_is_skipped_and_reported(journal: Path) -> None:
    """All lines before the incomplete one are replayed."""
    whole = replay_file(journal)
    cut = replay(journal.read_bytes()[:-3].splitlines())
    assert (cut.difference, cut.torn, cut.events) == (None, 1, whole.events - 1)
    assert "1 cut off" in str(cut)


def test_the_first_difference_is_reported(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has line number, expected and actual command, and the exit code is 1."""
    lines = journal.read_bytes().splitlines(keepends=True)
    number, line = next((n, line) for n, line in enumerate(lines) if b'"Dispatch"' in line)
    lines[number] = line.replace(b'"why":"', b'"why":"not ')
    forged = tmp_path / "forged"
    forged.write_bytes(b"".join(lines))
    assert main(["replay", str(forged)]) == 1
    summary, where, expected, came = capsys.readouterr().out.splitlines()
    assert summary.endswith("differences 1")
    assert where.startswith(f"line {number + 1}: ")
    assert expected.lstrip().startswith("expected: Dispatch(")
    assert came.lstrip().startswith("actual:   Dispatch(")
    assert "why='not " in expected
    assert "why='not " not in came


@pytest.mark.parametrize(
    ("setting", "other"),
    [(b'"max_inflight":2', b'"max_inflight":3'), (b'"quantum":900.5', b'"quantum":90000.0'), (b":8,", b":7,")],
)
def test_a_run_under_other_settings_differs(journal: Path, setting: bytes, other: bytes) -> None:
    """A replay under a changed header differs, because the scheduler is built from the header."""
    header, *lines = journal.read_bytes().splitlines()
    assert setting in header
    assert replay([header.replace(setting, other), *lines]).difference is not None


def test_the_header_holds_what_the_scheduler_depends_on_and_no_address() -> None:
    """The header restores all settings except addresses and secrets."""
    given = {"policy": "rr+dlpm", "seed": 3, "extend_weight": 0.1, "queue_ttl": 1 / 3, "dlpm": {"quantum": 1e-7}}
    secret = {"worker_api_key": "sk-x", "hash_secret": "0123456789abcdef", "worker": ["http://there:1"]}
    header = Settings.model_validate({**given, **secret}).without_addresses()
    assert Settings.model_validate(header) == Settings.model_validate(given)
    assert not {"worker_api_key", "hash_secret", "worker"} & header.keys()


@pytest.mark.parametrize("content", [None, "policy: d2lpm\n", '{"d2lpm_journal":0,"router":"0"}\n', ""])
def test_what_cannot_be_replayed_is_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one line that names the file, and the exit code is 2."""
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"d2lpm: {path}: ")
    assert error.count("\n") == 1


def test_unknown_settings_are_named(journal: Path) -> None:
    """The error names settings that only another version of the router has."""
    lines = journal.read_bytes().replace(b'"max_inflight"', b'"max_in_orbit"').splitlines()
    with pytest.raises(ConfigError, match="settings unknown here: max_in_orbit"):
        replay(lines)
