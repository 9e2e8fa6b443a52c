"""The state file: the next router starts with the saved state, and a damaged file is set aside."""

import asyncio
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from router.cli.replay import replay_file
from router.config.settings import Settings
from router.core.model.cost import Tokens
from router.core.model.events import CacheReport
from router.core.model.request import ClientId, GroupId, WorkerId
from router.core.model.saved import (
    Cache,
    Clients,
    Counters,
    DailyUsage,
    Groups,
    Piece,
    Prefixes,
    SavedClient,
    SavedCounter,
    SavedGroup,
    SavedNode,
    SavedTouch,
    UsageRows,
)
from router.errors import ConfigError
from router.persistence.state_file import FILE_NAME, StateFile, decode, load, new_header
from router.process.scheduling import initial_state
from router.runtime.atomic_file import replace_file
from tests.support.processes import process_count
from tests.support.running import chat, running_router
from tests.support.scripted_engine import scripted_engine

P = ParamSpec("P")
T = TypeVar("T")

W = WorkerId("w")
PIECES: list[Piece] = [
    Clients((SavedClient(ClientId("user-ä"), 2.0, Tokens(1, 2, 3)),)),
    Counters("placement", (SavedCounter(ClientId("a"), W, -1.5, 10.0),)),
    Counters("order", (SavedCounter(ClientId("a"), None, 0.1, 10.0),)),
    Groups((SavedGroup(GroupId("g"), W, -7.5, 10.0),)),
    Cache(W, "m", CacheReport(born=1.0)),
    Prefixes((SavedNode(-1, b"\x00\xff345678"),), (SavedTouch(W, 0, 2.5),)),
    UsageRows((DailyUsage(20_000, ClientId("a"), "m", 1, 20, 5, 7, 20, 0),)),
]


async def write(directory: Path, pieces: list[Piece], policy: str = "dlpm_home", secret: bytes = b"s" * 16) -> Path:
    async with StateFile(directory, lambda: iter(pieces), lambda: new_header(policy, secret), 3600):
        pass
    return directory / FILE_NAME


async def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every piece is read back with the policy and the secret, only the owner can read the file, and no other file is
    left.
    """
    path = await write(tmp_path, PIECES)
    state = decode(path.read_bytes())
    assert state.pieces == PIECES
    assert (state.header.policy, state.header.hash_secret) == ("dlpm_home", (b"s" * 16).hex())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [FILE_NAME]


async def test_a_state_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    """The state is saved again and again, and a concurrent reader always finds a complete one."""
    path = tmp_path / FILE_NAME
    saved = 0

    def pieces() -> list[Piece]:
        nonlocal saved
        saved += 1
        return PIECES * saved

    async with StateFile(tmp_path, lambda: iter(pieces()), lambda: new_header("p", b"s"), 0.001):
        while saved < 20:
            if path.exists():
                assert len(decode(path.read_bytes()).pieces) % len(PIECES) == 0
            await asyncio.sleep(0)
    assert len(decode(path.read_bytes()).pieces) == saved * len(PIECES)


@pytest.mark.one_process("the test reads the router's log")
async def test_a_state_is_loaded_while_it_is_fresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older state is left in its place, with one line in the log; only its usage, which is past, is loaded."""
    saved = decode((await write(tmp_path, PIECES)).read_bytes()).header.saved
    assert load(tmp_path, 10.0, saved + 10.0) is not None
    assert not caplog.messages
    old = load(tmp_path, 10.0, saved + 10.1)
    assert old is not None
    assert old.too_old
    assert old.pieces == [piece for piece in PIECES if isinstance(piece, UsageRows)] != []
    assert len(caplog.messages) == 1
    assert (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:0],
        lambda content: content[:-1000],
        lambda content: content[: content.rindex(b"\n", 0, -1) + 1],
        lambda content: content.replace(b"-1.5", b"-1.0"),
        lambda content: content.replace(b'"d2lpm_state":2', b'"d2lpm_state":3'),
        lambda content: b"something else\n" + content,
    ],
)
async def test_what_is_damaged_or_foreign_is_set_aside(
    damage: "object", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line, the router begins without the state, and the file is kept for inspection."""
    path = await write(tmp_path, PIECES)
    assert callable(damage)
    broken = damage(path.read_bytes())
    path.write_bytes(broken)
    assert load(tmp_path, 10.0, 0.0) is None
    assert len(caplog.messages) == 1
    assert not path.exists()
    assert (tmp_path / "state.broken").read_bytes() == broken


@pytest.mark.one_process("the test reads the router's log")
async def test_a_state_that_contradicts_itself_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is taken from a state whose checksum is right and whose pieces contradict each other."""
    await write(tmp_path, [*PIECES, Prefixes((SavedNode(7, b"12345678"),), ())])
    begun = initial_state(Settings(state=tmp_path), 0.0)
    assert begun.restored == []
    assert not begun.scheduler.weights
    assert len(caplog.messages) == 1
    assert (tmp_path / "state.broken").exists()


@given(st.binary(max_size=300), st.integers(0, 2000), st.booleans())
def test_no_bytes_crash_the_loader(noise: bytes, place: int, cut: bool) -> None:
    """Any bytes either are a state or raise ValueError."""
    content = b"".join(CONTENT)
    place %= len(content)
    for tried in (noise, content[:place] + noise + (b"" if cut else content[place:])):
        if tried != content:
            with pytest.raises(ValueError, match=r"^it "):
                decode(tried)


async def test_under_another_policy_or_secret_the_rest_is_loaded(tmp_path: Path) -> None:
    """Deficits depend on the policy and hashes on the secret; service depends on neither."""
    await write(tmp_path, PIECES)
    begun = initial_state(Settings(state=tmp_path, policy="d2lpm", hash_secret=SecretStr("t" * 16)), 0.0)
    assert [type(piece) for piece in begun.restored] == [Clients, Cache, UsageRows]
    assert begun.secret == b"t" * 16
    begun = initial_state(Settings(state=tmp_path), 0.0)
    assert begun.restored == PIECES
    assert begun.secret == b"s" * 16


def test_a_directory_that_cannot_be_created_is_a_configuration_error(tmp_path: Path) -> None:
    """The error is one line that names the file, also where the file system creates no directories, such as /proc."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/state: Not a directory"):
        initial_state(Settings(state=tmp_path / "file"), 0.0)
    with pytest.raises(ConfigError, match="/proc/nothing/state: No such file or directory"):
        initial_state(Settings(state=Path("/proc/nothing")), 0.0)


@pytest.mark.one_process("the test reads the router's log")
async def test_a_failing_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failing disk is logged in one line, and the router goes on."""
    with caplog.at_level(logging.ERROR):
        async with StateFile(tmp_path / "nowhere", lambda: iter(PIECES), lambda: new_header("p", b"s"), 0.001) as file:
            for _ in range(3):
                await file._run_once()
    assert len(caplog.messages) == 1


async def test_deficits_service_and_prefixes_survive_a_restart(tmp_path: Path) -> None:
    """The next router reports the same of its clients, finds the prefixes of the last one, and its journal replays."""
    prompt = "A long document that is asked about again. " * 40
    journal = tmp_path / "journal"
    async with scripted_engine() as engine:
        settings = {"state": tmp_path / "state", "journal": journal, "dlpm_home": {"quantum": 100}}
        worker = {"url": engine.url, "id": "w"}
        async with running_router(worker=[worker], **settings) as router:
            async with router.post(chat(prompt, user="ann")) as post:
                await (await engine.call()).answer(prompt=430, completion=7)
                await post.read()
            await router.until_all_ended()
            before = await router.fairness()
            hashed = router.hasher.prompt(b"x" * 128).key
        async with running_router(worker=[worker], **settings) as router:
            after = await router.fairness()
            assert after["clients"]["user-ann"]["service"] == before["clients"]["user-ann"]["service"]
            assert after["clients"]["user-ann"]["deficit"] == before["clients"]["user-ann"]["deficit"]
            assert before["clients"]["user-ann"]["deficit"]["w"]["order"] < 0
            assert router.hasher.prompt(b"x" * 128).key == hashed
            async with router.post(chat(prompt, user="bob")) as post:
                await (await engine.call()).answer(prompt=430, completion=7)
                assert int((await post.response()).headers["x-d2lpm-predicted-cached-tokens"]) > 300
                await post.read()
            await router.until_all_ended()
            assert (await router.fairness())["clients"]["user-ann"]["deficit"]["w"]["order"] < 0
    replayed = replay_file(journal)
    assert (replayed.runs, replayed.difference) == (2, None)
    assert json.loads(journal.read_bytes().splitlines()[0])["restored"] == []


CONTENT: list[bytes] = []


@pytest.fixture(autouse=True, scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Save a state, whose content the tests damage."""
    CONTENT.append(asyncio.run(write(tmp_path_factory.mktemp("state"), PIECES)).read_bytes())


class HeldWrites(ThreadPoolExecutor):
    """Threads in which nothing goes on before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.has_begun = asyncio.Event()
        self.may_go = threading.Event()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        self.begun += 1
        self.has_begun.set()

        def held() -> T:
            self.may_go.wait(10.0)
            return fn(*args, **kwargs)

        return super().submit(held)


async def test_the_last_save_waits_for_one_that_is_being_written(tmp_path: Path) -> None:
    """Both write to the same temporary file."""
    threads = HeldWrites()
    asyncio.get_running_loop().set_default_executor(threads)
    state = StateFile(tmp_path, lambda: iter(PIECES), lambda: new_header("dlpm_home", b"s" * 16), 0.0)
    await state.__aenter__()
    await threads.has_begun.wait()
    leaving = asyncio.create_task(state.__aexit__(None, None, None))
    for _ in range(50):
        await asyncio.sleep(0)
    assert threads.begun == 1
    threads.may_go.set()
    await leaving
    assert threads.begun == 2
    assert decode((tmp_path / FILE_NAME).read_bytes()).pieces == PIECES


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """A user who can write into the directory cannot make the router overwrite a file elsewhere."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    state = tmp_path / "state"
    (tmp_path / "state.new").symlink_to(precious)
    replace_file(state, [b"saved"])
    assert precious.read_bytes() == b"precious"
    assert state.read_bytes() == b"saved"
    assert not state.is_symlink()


async def test_a_metric_shows_that_the_state_cannot_be_written(tmp_path: Path) -> None:
    """The metric shows it for as long as writing fails, and no journal metric exists where no journal is kept.

    Several processes have a file for the scheduler's next run, too, which can be written all the time.
    """
    directory = tmp_path / "kept"
    async with scripted_engine() as engine, running_router(engine.url, state=directory, state_interval=0.01) as router:

        async def failing() -> dict[str, float]:
            async with router.http.get("/metrics") as response:
                found = re.findall(r'^d2lpm_file_failing{file="(\w+)"} (\S+)$', await response.text(), re.MULTILINE)
            return {file: float(value) for file, value in found}

        well = {"state": 0.0} | ({"takeover": 0.0} if process_count() > 1 else {})
        assert await failing() == well
        directory.rename(tmp_path / "elsewhere")
        async with asyncio.timeout(60):
            while await failing() != well | {"state": 1.0}:
                pass
            (tmp_path / "elsewhere").rename(directory)
            while await failing() != well:
                pass
