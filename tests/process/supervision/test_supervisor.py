"""The supervisor with stubs as its processes: each is started again when it dies or hangs, and none is left behind."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM
from typing import Final, NamedTuple

import pytest

from router.config.settings import Settings
from router.process.supervision.child_process import ChildProcess
from router.process.supervision.keeper import FIRST_PAUSE, LONGEST_PAUSE, STABLE_SECONDS, LivenessRules, RestartPauses
from router.process.supervision.supervisor import INTERRUPTED, Supervisor
from tests.support.running import TIMEOUT_S, until

STUB: Final = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stub.py")))
RULES: Final = LivenessRules(turn_seconds=0.1, silent_turns=10, start_turns=20, grace_seconds=0.2)
SETTINGS: Final = Settings.model_validate({"worker": ["http://127.0.0.1:1"]})


class Started(NamedTuple):
    """What a stub has written at its start."""

    pid: int
    connected: tuple[int, ...]


class Supervised:
    """A supervisor of a scheduler and two fronts, all of them stubs."""

    def __init__(self, folder: Path, listener: socket.socket, rules: LivenessRules) -> None:
        self.folder = folder
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(SETTINGS, listener, 2, str(folder), self.ready.set, rules, STUB)
        self.running = asyncio.create_task(self.supervisor.run())

    def has_started(self, name: str, restart: int = 0) -> bool:
        return (self.folder / f"{name}-{restart}.json").exists()

    async def started(self, name: str, restart: int = 0) -> Started:
        """Wait until a process was started so often, and return what it has written."""
        await until(lambda: self.has_started(name, restart))
        found = json.loads((self.folder / f"{name}-{restart}.json").read_text("ascii"))
        return Started(found["pid"], tuple(found["connected"]))

    async def standby(self) -> int:
        """Wait until a standby runs, and return its process id."""
        standby = self.supervisor._standby

        def there() -> bool:
            return standby.process is not None and standby.process.runs

        await until(there)
        assert standby.process is not None
        return standby.process.pid

    @property
    def processes(self) -> list[ChildProcess]:
        """All that the supervisor has started last."""
        return self.supervisor._processes()

    async def end(self) -> int:
        """Wait for the end of the supervisor, check that nothing is left, and return its exit code."""
        async with asyncio.timeout(TIMEOUT_S):
            code = await self.running
        assert not [process.name for process in self.processes if exists(process.pid)]
        assert not [file.name for file in self.folder.glob("*.json") if exists(json.loads(file.read_bytes())["pid"])]
        return code


def exists(pid: int) -> bool:
    """Whether there is a process with this id, even if it has ended and nobody has waited for it."""
    return Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def starting(folder: Path, rules: LivenessRules = RULES) -> AsyncIterator[Supervised]:
    """Run a supervisor, which starts its processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Supervised(folder, listener, rules)
        try:
            yield made
        finally:
            made.running.cancel()
            await asyncio.gather(made.running, return_exceptions=True)


@asynccontextmanager
async def supervised(folder: Path, rules: LivenessRules = RULES) -> AsyncIterator[Supervised]:
    """Run a supervisor, all of whose processes serve."""
    async with starting(folder, rules) as made:
        async with asyncio.timeout(TIMEOUT_S):
            await made.ready.wait()
        yield made


def signal_to_self(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


async def test_a_standby_takes_the_place_of_a_scheduler_that_dies(tmp_path: Path) -> None:
    """It is the process that waited, it learns which fronts run, and another standby waits soon."""
    async with supervised(tmp_path) as scene:
        standby, scheduler = await scene.standby(), await scene.started("scheduler")
        assert scheduler.connected == ()
        os.kill(scheduler.pid, SIGKILL)
        assert await scene.started("scheduler", 1) == (standby, (1, 2))
        assert await scene.standby() not in (standby, scheduler.pid)
        os.kill(standby, SIGKILL)
        await scene.started("scheduler", 2)
        assert not scene.has_started("front-1", 1)
        signal_to_self(SIGTERM)
        assert await scene.end() == 0


async def test_without_a_standby_the_scheduler_is_started_again_all_the_same(tmp_path: Path) -> None:
    """A standby that dies is no use, and is replaced; the supervisor goes on."""
    async with supervised(tmp_path) as scene:
        standby, scheduler = await scene.standby(), await scene.started("scheduler")
        os.kill(standby, SIGKILL)
        await until(lambda: not exists(standby))
        os.kill(scheduler.pid, SIGKILL)
        assert (await scene.started("scheduler", 1)).pid != standby
        assert await scene.standby() != standby
        signal_to_self(SIGTERM)
        assert await scene.end() == 0


@pytest.mark.parametrize("name", ["scheduler", "front-2"])
async def test_a_process_that_hangs_is_ended_and_started_again(name: str, tmp_path: Path) -> None:
    """One that is stopped writes nothing; the others run on."""
    async with supervised(tmp_path) as scene:
        hung = (await scene.started(name)).pid
        os.kill(hung, SIGSTOP)
        assert (await scene.started(name, 1)).pid != hung
        assert not exists(hung)
        others = {"scheduler", "front-1", "front-2"} - {name}
        assert not [other for other in others if scene.has_started(other, 1)]
        signal_to_self(SIGTERM)
        assert await scene.end() == 0


async def test_a_front_that_hangs_is_not_announced_to_a_scheduler_once_it_was_ended(tmp_path: Path) -> None:
    """Only fronts that serve are; one that is being started again is none of them."""
    async with supervised(tmp_path) as scene:
        (tmp_path / "front-1-hangs").touch()
        os.kill((await scene.started("front-1")).pid, SIGKILL)
        await scene.started("front-1", 1)
        os.kill((await scene.started("scheduler")).pid, SIGKILL)
        assert (await scene.started("scheduler", 1)).connected == (2,)


async def test_a_process_that_does_not_come_to_serve_is_started_once_more(tmp_path: Path) -> None:
    async with supervised(tmp_path) as scene:
        hangs = tmp_path / "scheduler-hangs"
        hangs.touch()
        os.kill((await scene.started("scheduler")).pid, SIGKILL)
        hung = (await scene.started("scheduler", 1)).pid
        hangs.unlink()
        await scene.started("scheduler", 2)
        assert not exists(hung)


async def test_a_stall_of_the_supervisor_itself_ends_no_process(tmp_path: Path) -> None:
    """However long it stands still, this is one turn of its timer."""
    async with supervised(tmp_path) as scene:
        before = [process.pid for process in scene.processes]
        time.sleep(1.5 * RULES.silent_turns * RULES.turn_seconds)  # noqa: ASYNC251 - this is the stall
        for _ in range(RULES.silent_turns // 2):
            await asyncio.sleep(RULES.turn_seconds)
        assert set(before) <= {process.pid for process in scene.processes}


async def test_a_scheduler_that_fails_again_and_again_is_started_until_it_serves(tmp_path: Path) -> None:
    """Once it has served, its end is not that of the router."""
    async with supervised(tmp_path) as scene:
        fails = tmp_path / "scheduler-fails"
        fails.touch()
        os.kill((await scene.started("scheduler")).pid, SIGKILL)
        await until(lambda: scene.supervisor._scheduler._restarts >= 3)
        fails.unlink()
        await until(lambda: scene.supervisor._scheduler.serves)
        assert not scene.running.done()
        signal_to_self(SIGTERM)
        assert await scene.end() == 0


@pytest.mark.parametrize("name", ["scheduler", "front-1", "front-2"])
async def test_a_process_that_fails_at_its_first_start_ends_all(name: str, tmp_path: Path) -> None:
    """With its exit code."""
    (tmp_path / f"{name}-fails").touch()
    async with starting(tmp_path) as scene:
        assert await scene.end() == 3
        assert not scene.ready.is_set()


@pytest.mark.parametrize("name", ["scheduler", "front-1", "front-2"])
async def test_a_signal_during_the_start_ends_all(name: str, tmp_path: Path) -> None:
    """Whichever process has not come to serve yet."""
    (tmp_path / f"{name}-hangs").touch()
    async with starting(tmp_path) as scene:
        await scene.started(name)
        signal_to_self(SIGINT)
        assert await scene.end() == INTERRUPTED
        assert not scene.ready.is_set()


async def test_a_signal_between_death_and_start_ends_all(tmp_path: Path) -> None:
    """No process is started once the drain has begun."""
    async with supervised(tmp_path) as scene:
        pids = [(await scene.started(name)).pid for name in ("scheduler", "front-1", "front-2")]
        for pid in pids:
            os.kill(pid, SIGKILL)
        signal_to_self(SIGTERM)
        assert await scene.end() == 0


async def test_a_second_signal_ends_even_a_process_that_hangs(tmp_path: Path) -> None:
    """A process that drains is not judged, so the first signal waits for it."""
    patient = LivenessRules(turn_seconds=0.02, silent_turns=1000, grace_seconds=0.2)
    async with supervised(tmp_path, patient) as scene:
        hung = (await scene.started("front-1")).pid
        os.kill(hung, SIGSTOP)
        signal_to_self(SIGTERM)
        await until(ended(scene, "front-2"))
        await until(ended(scene, "scheduler"))
        assert not scene.running.done()
        signal_to_self(SIGTERM)
        assert await scene.end() == INTERRUPTED


def ended(scene: Supervised, name: str) -> Callable[[], bool]:
    return lambda: not [process for process in scene.processes if process.name == name and process.runs]


def test_quick_deaths_are_followed_by_longer_pauses() -> None:
    """The first start again is at once, and so is each after a stable run; no pause is longer than the longest."""
    pauses = RestartPauses()
    quick = [pauses.after(0.1) for _ in range(9)]
    assert quick[:3] == [0.0, FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert quick[-1] == LONGEST_PAUSE
    assert pauses.after(STABLE_SECONDS) == 0.0
    assert pauses.after(0.1) == FIRST_PAUSE
